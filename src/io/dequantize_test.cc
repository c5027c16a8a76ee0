#include "io/dequantize.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/float_types.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

std::vector<float> values(GgmlType type, const std::string& blocks) {
  const GgmlTypeInfo* info = find_ggml_type(static_cast<uint32_t>(type));
  const auto count = static_cast<int64_t>(blocks.size()) / info->bytes;
  std::vector<float> out(static_cast<size_t>(count * info->block));
  info->dequantize(reinterpret_cast<const std::byte*>(blocks.data()), count, out.data());
  return out;
}

std::string half(float value) { return testing::GgufBuilder::raw(fp32_to_fp16(value)); }

// By hand from the formats' definitions; tests/gguf/oracle.py compares random blocks with the gguf package.
TEST(Dequantize, SmallBlocksByHand) {
  std::string q8 = half(0.5f);
  for (int i = 0; i < 32; ++i) q8 += static_cast<char>(i - 16);
  EXPECT_EQ(values(GgmlType::kQ8_0, q8)[0], -8.0f);
  EXPECT_EQ(values(GgmlType::kQ8_0, q8)[31], 7.5f);

  const std::string nibbles(16, '\x9a');  // low 10, high 9
  EXPECT_EQ(values(GgmlType::kQ4_0, half(2.0f) + nibbles)[3], 4.0f);
  EXPECT_EQ(values(GgmlType::kQ4_0, half(2.0f) + nibbles)[19], 2.0f);
  EXPECT_EQ(values(GgmlType::kQ4_1, half(2.0f) + half(-1.0f) + nibbles)[0], 19.0f);
  EXPECT_EQ(values(GgmlType::kQ4_1, half(2.0f) + half(-1.0f) + nibbles)[16], 17.0f);

  const std::string fifth = testing::GgufBuilder::raw<uint32_t>((1u << 3) | (1u << 17));
  const auto q5 = values(GgmlType::kQ5_0, half(1.0f) + fifth + nibbles);
  EXPECT_EQ(q5[2], 10.0f - 16.0f);
  EXPECT_EQ(q5[3], 26.0f - 16.0f);
  EXPECT_EQ(q5[17], 25.0f - 16.0f);
  EXPECT_EQ(values(GgmlType::kQ5_1, half(1.0f) + half(0.5f) + fifth + nibbles)[3], 26.5f);
}

TEST(Dequantize, UnknownTypesAreNotFound) {
  for (uint32_t type : {4u, 5u, 9u, 10u, 11u, 15u, 16u, 29u, 31u, 99u}) EXPECT_EQ(find_ggml_type(type), nullptr);
}

}  // namespace
}  // namespace nfp
