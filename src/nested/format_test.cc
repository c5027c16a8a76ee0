#include "nested/format.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/float_types.h"

namespace nfp {
namespace {

TEST(Format, ExactlyTheRightPatternsNest) {
  int nest = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto w = static_cast<uint16_t>(bits);
    const float value = fp16_to_fp32(w);
    EXPECT_EQ(is_nestable(w), std::abs(value) <= 1.75f) << bits;
    nest += is_nestable(w) ? 1 : 0;
  }
  EXPECT_EQ(nest, 32258);
}

TEST(Format, EveryNestablePatternComesBackFromBothNeighbours) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto w = static_cast<uint16_t>(bits);
    if (!is_nestable(w)) continue;
    const NestedWeight nested = split(w);
    EXPECT_EQ(nested.upper, fp32_to_e4m3(fp16_to_fp32(w) * 256.0f)) << bits;
    EXPECT_NE(nested.upper & 0x7f, 0x7f) << bits;
    EXPECT_EQ(join(nested.upper, nested.lower), w);
    const uint8_t other = other_neighbour(w);
    EXPECT_EQ(join(other, nested.lower), w) << bits;
    const float low = std::min(e4m3_to_fp32(nested.upper), e4m3_to_fp32(other));
    const float high = std::max(e4m3_to_fp32(nested.upper), e4m3_to_fp32(other));
    EXPECT_LE(low, fp16_to_fp32(w) * 256.0f);
    EXPECT_GE(high, fp16_to_fp32(w) * 256.0f);
  }
}

}  // namespace
}  // namespace nfp
