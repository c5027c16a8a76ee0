#include "io/fp8_checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>

#include "io/convert.h"
#include "io/testing/model_files.h"
#include "nested/format.h"

namespace nfp {
namespace {

using testing::TestTensor;

std::string with_scheme(const std::string& scheme) {
  std::string config = testing::kTinyConfig;
  config.insert(config.rfind('}'), ", \"quantization_config\": " + scheme);
  return config;
}

constexpr const char* kRows =
    R"({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0":
       {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}})";
constexpr const char* kBlocks = R"({"quant_method": "fp8", "weight_block_size": [128, 128]})";

// Any codes but NaN, each of them somewhere.
TestTensor random_codes(const std::string& name, int64_t rows, int64_t columns, uint32_t seed) {
  std::mt19937 random(seed);
  TestTensor tensor{name, DType::kF8E4M3, {rows, columns}, {}};
  for (int64_t i = 0; i < rows * columns; ++i) {
    uint8_t code = static_cast<uint8_t>(i < 256 ? static_cast<uint32_t>(i) : random());
    if ((code & 0x7fu) == 0x7f) code = 0;
    tensor.bytes += static_cast<char>(code);
  }
  return tensor;
}

TestTensor random_scales(const std::string& name, DType dtype, Shape shape, uint32_t seed) {
  TestTensor tensor = testing::random_tensor(name, dtype, shape, seed, 1e-3f);
  const size_t size = size_of(dtype);
  for (size_t i = 0; i < tensor.bytes.size() / size; ++i) tensor.bytes[size * i + size - 1] &= 0x7f;  // no sign
  return tensor;
}

float scale_at(const TestTensor& scales, int64_t i) {
  if (scales.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, scales.bytes.data() + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, scales.bytes.data() + 2 * i, 2);
  return scales.dtype == DType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits);
}

class Fp8Checkpoint : public testing::ScratchTest {
 protected:
  void write(const std::string& scheme, const std::vector<TestTensor>& tensors) {
    testing::write_model(path("m"), tensors);
    ASSERT_TRUE(write_file(path("m/config.json"), with_scheme(scheme)).ok());
  }
  Result<std::unique_ptr<ModelSource>> open() { return ModelSource::open(path("m")); }
  ThreadPool threads_{2};
};

TEST_F(Fp8Checkpoint, AScaleARowOrAMatrixIsNestedWithoutRounding) {
  constexpr int64_t kM = 40, kK = 24;
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Shape& shape : {Shape{kM, 1}, Shape{kM}, Shape{1}, Shape{}}) {
      const TestTensor codes = random_codes(name, kM, kK, 3), scales = random_scales(name + "_scale", dtype, shape, 4);
      write(kRows, {codes, scales, random_scales("model.layers.0.self_attn.q_proj.input_scale", DType::kF32, {1}, 5)});
      const auto source = open();
      ASSERT_TRUE(source.ok()) << source.error().message;
      ASSERT_EQ((*source)->tensors().size(), 1u);
      ASSERT_TRUE((*source)->stored_fp8().has_value());
      EXPECT_TRUE((*source)->stored_fp8()->by_rows);
      MatrixAnalysis analysis;
      const auto matrix = (*source)->matrix(name, threads_, &analysis);
      ASSERT_TRUE(matrix.ok()) << matrix.error().message;
      ASSERT_EQ((*matrix)->storage(), Storage::kNested);
      EXPECT_EQ(analysis.storage, Storage::kNested);
      float largest = 0;
      for (int64_t r = 0; r < kM; ++r) {
        std::vector<uint8_t> upper(kK), lower(kK);
        std::vector<uint16_t> fp16(kK);
        int8_t exponent = 1;
        float factor = 0;
        ASSERT_TRUE((*matrix)->read_nested(r, 1, upper.data(), lower.data(), &exponent).ok());
        ASSERT_TRUE((*matrix)->row_factors(r, 1, &factor).ok());
        ASSERT_TRUE((*matrix)->read_fp16(r, 1, fp16.data()).ok());
        EXPECT_EQ(exponent, 0);
        const float scale = scale_at(scales, shape.elements() == 1 ? 0 : r);
        for (int64_t c = 0; c < kK; ++c) {
          const float code = e4m3_to_fp32(static_cast<uint8_t>(codes.bytes[static_cast<size_t>(r * kK + c)]));
          const auto at = static_cast<size_t>(c);
          largest = std::max(largest, std::abs(code * scale));
          // In double both products are exact: either precision's weight is the checkpoint's.
          const double exact = static_cast<double>(code) * scale;
          EXPECT_EQ(static_cast<double>(e4m3_to_fp32(upper[at])) * 0x1p-8 * factor, exact);
          EXPECT_EQ(static_cast<double>(fp16_to_fp32(join(upper[at], lower[at]))) * factor, exact);
          EXPECT_EQ(std::signbit(fp16_to_fp32(join(upper[at], lower[at]))), std::signbit(code));
          EXPECT_EQ(fp16[at], fp32_to_fp16(code * scale));
        }
      }
      EXPECT_EQ(analysis.largest, largest);
    }
  }
}

TEST_F(Fp8Checkpoint, BlocksAreRoundedToFp16AndThenNested) {
  constexpr int64_t kM = 300, kK = 200;
  const std::string name = "model.layers.0.mlp.down_proj.weight";
  const TestTensor codes = random_codes(name, kM, kK, 6);
  const TestTensor scales = random_scales(name + "_scale_inv", DType::kF32, {3, 2}, 7);
  write(kBlocks, {codes, scales});
  const auto source = open();
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_FALSE((*source)->stored_fp8()->by_rows);
  EXPECT_EQ((*source)->find(name)->stored, "F8_E4M3");
  std::vector<uint16_t> fp16(kM * kK);
  ASSERT_TRUE((*source)->read_fp16_rows(name, 0, kM, fp16.data()).ok());
  for (int64_t r = 0; r < kM; ++r) {
    for (int64_t c = 0; c < kK; ++c) {
      const auto at = static_cast<size_t>(r * kK + c);
      const float code = e4m3_to_fp32(static_cast<uint8_t>(codes.bytes[at]));
      ASSERT_EQ(fp16[at], fp32_to_fp16(code * scale_at(scales, r / 128 * 2 + c / 128))) << r << ", " << c;
    }
  }
  // From there on it is a matrix like any other.
  const auto matrix = (*source)->matrix(name, threads_);
  ASSERT_TRUE(matrix.ok()) << matrix.error().message;
  ASSERT_EQ((*matrix)->storage(), Storage::kNested);
  std::vector<uint8_t> upper(kK), lower(kK);
  int8_t exponent = 0;
  ASSERT_TRUE((*matrix)->read_nested(150, 1, upper.data(), lower.data(), &exponent).ok());
  for (int64_t c = 0; c < kK; ++c) {
    const auto at = static_cast<size_t>(c);
    EXPECT_EQ(std::ldexp(fp16_to_fp32(join(upper[at], lower[at])), exponent),
              fp16_to_fp32(fp16[static_cast<size_t>(150 * kK) + at]));
  }
}

TEST_F(Fp8Checkpoint, ItIsNotConverted) {
  write(kRows, {random_codes("model.layers.0.mlp.up_proj.weight", 8, 4, 1),
                random_scales("model.layers.0.mlp.up_proj.weight_scale", DType::kF32, {1}, 2)});
  const auto source = open();
  ASSERT_TRUE(source.ok()) << source.error().message;
  const auto report = convert(**source, path("out"), {}, threads_);
  ASSERT_FALSE(report.ok());
  EXPECT_NE(report.error().message.find("FP8 already"), std::string::npos) << report.error().message;
}

TEST_F(Fp8Checkpoint, WhatIsWrongIsNamed) {
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const TestTensor codes = random_codes(name, 8, 4, 1);
  const auto message = [&](const std::string& scheme, const std::vector<TestTensor>& tensors) {
    write(scheme, tensors);
    const auto source = open();
    if (!source.ok()) return source.error().message;
    const auto matrix = (*source)->matrix(name, threads_);
    return matrix.ok() ? std::string() : matrix.error().message;
  };
  EXPECT_NE(message(kRows, {codes}).find(name + "_scale'"), std::string::npos);
  const TestTensor empty{name, DType::kF8E4M3, {0, 7}, ""};
  EXPECT_NE(message(kRows, {empty, random_scales(name + "_scale", DType::kF32, {1}, 2)}).find("is empty"),
            std::string::npos);
  for (const Shape& shape : {Shape{3}, Shape{4}, Shape{8, 2}, Shape{1, 8}}) {
    EXPECT_NE(
        message(kRows, {codes, random_scales(name + "_scale", DType::kF32, shape, 2)}).find("scales for a matrix"),
        std::string::npos)
        << shape.rank();
  }
  TestTensor scales = random_scales(name + "_scale", DType::kF32, {8, 1}, 2);
  for (const float wrong : {-1.0f, INFINITY, NAN}) {
    std::memcpy(scales.bytes.data() + 4, &wrong, 4);
    EXPECT_NE(message(kRows, {codes, scales}).find("is no scale"), std::string::npos) << wrong;
  }
  scales = random_scales(name + "_scale", DType::kF32, {8, 1}, 2);
  EXPECT_EQ(message(kRows, {codes, scales}), "");
  TestTensor damaged = codes;
  damaged.bytes[4 * 5 + 2] = '\x7f';
  EXPECT_NE(message(kRows, {damaged, scales}).find("row 5 holds a NaN"), std::string::npos);
  scales = random_scales(name + "_scale_inv", DType::kF32, {1, 1}, 2);
  damaged.bytes[4 * 5 + 2] = '\xff';
  EXPECT_NE(message(kBlocks, {damaged, scales}).find("row 5"), std::string::npos);
}

TEST(Fp8Scheme, WhatIsNotFp8IsRefusedByField) {
  const auto find = [](const std::string& scheme) { return find_fp8_scheme(with_scheme(scheme), "config.json"); };
  const auto blocks = find(kBlocks);
  ASSERT_TRUE(blocks.ok() && blocks->has_value());
  EXPECT_EQ((*blocks)->block_rows, 128);
  EXPECT_TRUE(find(kRows).ok());
  EXPECT_TRUE(find(R"({"quant_method": "fp8", "activation_scheme": "static"})").ok());
  EXPECT_TRUE(find(R"({"quant_method": "fp8", "fmt": "e4m3"})").ok());
  EXPECT_TRUE(find(R"({"quant_method": "fbgemm_fp8"})").ok());
  // NVIDIA's, with a scale for each matrix, by the names that vLLM gives them.
  EXPECT_TRUE(find(R"({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]})").ok());
  EXPECT_FALSE(find_fp8_scheme(testing::kTinyConfig, "config.json")->has_value());
  const std::string group = R"({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": )";
  for (const auto& [field, scheme] : std::vector<std::pair<std::string, std::string>>{
           {"awq", R"({"quant_method": "awq"})"},
           {"gptq", R"({"quant_method": "gptq", "bits": 4})"},
           {"bitsandbytes", R"({"quant_method": "bitsandbytes"})"},
           {"quant_method", "{}"},
           {"quant_algo", R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})"},
           {"quant_algo", R"({"quant_method": "modelopt"})"},
           {"fmt", R"({"quant_method": "fp8", "fmt": "e5m2"})"},
           {"fmt", R"({"quant_method": "fp8", "fmt": 5})"},
           {"weight_block_size", R"({"quant_method": "fp8", "weight_block_size": [128]})"},
           {"weight_block_size", R"({"quant_method": "fp8", "weight_block_size": [0, 128]})"},
           {"format", R"({"quant_method": "compressed-tensors", "format": "pack-quantized"})"},
           {"config_groups", R"({"quant_method": "compressed-tensors", "format": "float-quantized"})"},
           {"transform_config", group + R"({}, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}})"},
           {"sparsity_config", group + R"({}, "sparsity_config": {"format": "sparse-24-bitmask"}})"},
           {"weights", group + R"({"g": {}}})"},
           {"num_bits", group + R"({"g": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor"}}}})"},
           {"type", group + R"({"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "tensor"}}}})"},
           {"strategy", group + R"({"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}}})"}}) {
    const auto found = find(scheme);
    ASSERT_FALSE(found.ok()) << scheme;
    EXPECT_NE(found.error().message.find(field), std::string::npos) << found.error().message;
    EXPECT_NE(found.error().message.find("quantization_config"), std::string::npos) << found.error().message;
  }
}

}  // namespace
}  // namespace nfp
