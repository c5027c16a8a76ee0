#include "nested/format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/float_types.h"
#include "nested/narrow.h"

namespace nfp {
namespace {

static_assert(split(0x3f00) == NestedWeight{0x7e, 0x00});
static_assert(join(0x7e, 0x00) == 0x3f00);
static_assert(split(0xbf00).upper == 0xfe);
static_assert(!is_nestable(0x3f01) && !is_nestable(0x7c00) && !is_nestable(0xfe00));

uint16_t pattern(uint32_t i) { return static_cast<uint16_t>(i); }

TEST(Format, ExactlyThoseUpTo1_75Nest) {
  int count = 0;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const float value = fp16_to_fp32(pattern(i));
    EXPECT_EQ(is_nestable(pattern(i)), std::abs(value) <= 1.75f) << i;
    count += is_nestable(pattern(i)) ? 1 : 0;
  }
  EXPECT_EQ(count, 32258);
}

TEST(Format, EveryNestablePatternComesBackFromBothNeighbours) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const uint16_t w = pattern(i);
    if (!is_nestable(w)) continue;
    const NestedWeight nested = split(w);
    ASSERT_EQ(join(nested.upper, nested.lower), w) << i;
    ASSERT_EQ(join(other_neighbour(w), nested.lower), w) << i;
  }
}

TEST(Format, UpperIsTheNearestE4M3AndOtherNeighbourTheNextBest) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const uint16_t w = pattern(i);
    if (!is_nestable(w)) continue;
    const float scaled = fp16_to_fp32(w) * 256.0f;
    const uint8_t upper = split(w).upper;
    ASSERT_EQ(upper, fp32_to_e4m3(scaled)) << i;
    ASSERT_NE(upper & 0x7f, 0x7f) << i;
    const uint8_t other = other_neighbour(w);
    ASSERT_NE(other & 0x7f, 0x7f) << i;
    const float a = e4m3_to_fp32(upper);
    const float b = e4m3_to_fp32(other);
    if (a == scaled) {
      ASSERT_EQ(other, upper) << i;
    } else {
      ASSERT_EQ(std::abs(other - upper), 1) << i;
      ASSERT_LT(std::min(a, b), scaled) << i;
      ASSERT_GT(std::max(a, b), scaled) << i;
    }
  }
}

TEST(Format, SpansAgreeWithSingleWeights) {
  std::vector<uint16_t> weights;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    if (is_nestable(pattern(i))) weights.push_back(pattern(i));
  }
  weights.pop_back();  // an odd length, so that vectorised loops meet their tail
  std::vector<uint8_t> upper(weights.size());
  std::vector<uint8_t> lower(weights.size());
  split(weights, upper.data(), lower.data());
  for (size_t i = 0; i < weights.size(); ++i) ASSERT_EQ(split(weights[i]), (NestedWeight{upper[i], lower[i]}));
  std::vector<uint16_t> back(weights.size());
  join(upper.data(), lower.data(), back.size(), back.data());
  EXPECT_EQ(back, weights);
  split({}, nullptr, nullptr);
}

TEST(Narrow, EqualsTheReferenceNearEveryFp16Number) {
  for (uint32_t i = 0; i < 0x7c00; ++i) {
    const float low = fp16_to_fp32(pattern(i));
    const float high = i + 1 == 0x7c00 ? 65536.0f : fp16_to_fp32(pattern(i + 1));
    const float middle = low + (high - low) / 2;
    for (float x : {low, std::nextafter(low, 1e9f), std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e9f),
                    std::nextafter(high, 0.0f)}) {
      ASSERT_EQ(narrow_to_fp16(x), fp32_to_fp16(x)) << x;
      ASSERT_EQ(narrow_to_fp16(-x), fp32_to_fp16(-x)) << x;
      if (x < 65520.0f) {
        ASSERT_EQ(round_to_fp16(x), fp16_to_fp32(fp32_to_fp16(x))) << x;
      }
    }
  }
}

TEST(Narrow, EqualsTheReferenceOnEveryBf16Pattern) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const float value = bf16_to_fp32(pattern(i));
    if (std::isnan(value)) continue;
    ASSERT_EQ(narrow_to_fp16(value), fp32_to_fp16(value)) << i;
  }
}

}  // namespace
}  // namespace nfp
