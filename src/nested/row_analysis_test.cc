#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/float_types.h"
#include "nested/format.h"
#include "nested/matrix_analysis.h"

namespace nfp {
namespace {

// Straight from the definition, in double: does exponent e put the row under 1.75 and lose nothing?
double source_value(uint16_t w, WeightType type) {
  return type == WeightType::kF16 ? fp16_to_fp32(w) : bf16_to_fp32(w);
}
bool under(const std::vector<uint16_t>& row, WeightType type, int e) {
  for (uint16_t w : row) {
    if (std::abs(source_value(w, type)) > std::ldexp(1.75, e)) return false;
  }
  return true;
}
bool lossless(const std::vector<uint16_t>& row, WeightType type, int e) {
  for (uint16_t w : row) {
    const double value = source_value(w, type);
    const double kept = std::ldexp(fp16_to_fp32(fp32_to_fp16(static_cast<float>(std::ldexp(value, -e)))), e);
    if (kept != value && kept != fp16_to_fp32(fp32_to_fp16(static_cast<float>(value)))) return false;
  }
  return true;
}
int64_t inexact(const std::vector<uint16_t>& row, int e) {
  int64_t count = 0;
  for (uint16_t w : row) {
    const double value = source_value(w, WeightType::kBF16);
    const float v = fp16_to_fp32(fp32_to_fp16(static_cast<float>(std::ldexp(value, -e))));
    count += std::ldexp(v, e) != value ? 1 : 0;
  }
  return count;
}

// Finite patterns, most of them with magnitudes of weights, some anywhere.
rc::Gen<std::vector<uint16_t>> rows(WeightType type) {
  const uint32_t infinity = type == WeightType::kF16 ? 0x7c00u : 0x7f80u;
  const uint32_t low = type == WeightType::kF16 ? 0u : 0x3000u;
  const uint32_t high = type == WeightType::kF16 ? 0x4a00u : 0x4160u;
  const auto sign = [](uint32_t m) { return rc::gen::element<uint16_t>(m, m | 0x8000u); };
  return rc::gen::container<std::vector<uint16_t>>(
      rc::gen::weightedOneOf<uint16_t>({{12, rc::gen::mapcat(rc::gen::inRange<uint32_t>(low, high), sign)},
                                        {1, rc::gen::mapcat(rc::gen::inRange<uint32_t>(0, infinity), sign)}}));
}

TEST(RowAnalysis, Fp16ExponentIsTheSmallestAndLosesNothing) {
  EXPECT_TRUE(rc::check([] {
    const auto row = *rows(WeightType::kF16);
    const RowAnalysis found = analyse_row(row, WeightType::kF16);
    int smallest = 0;
    while (!under(row, WeightType::kF16, smallest)) ++smallest;
    RC_ASSERT(found.nests == lossless(row, WeightType::kF16, smallest));
    RC_ASSERT(found.exponent == smallest);
    RC_ASSERT(found.inexact_fp16 == 0 && found.inexact_nested == 0);
    if (!found.nests) {
      RC_ASSERT(found.breaking_col >= 0);
      RC_ASSERT(!lossless({row[found.breaking_col]}, WeightType::kF16, smallest));
      return;
    }
    std::vector<uint16_t> shifted(row.size());
    shift_row(row, WeightType::kF16, found.exponent, shifted.data());
    for (size_t i = 0; i < row.size(); ++i) {
      RC_ASSERT(is_nestable(shifted[i]));
      const NestedWeight nested = split(shifted[i]);
      const float back = std::ldexp(fp16_to_fp32(join(nested.upper, nested.lower)), found.exponent);
      RC_ASSERT(fp32_to_fp16(back) == row[i]);
    }
  }));
}

TEST(RowAnalysis, Bf16ExponentFollowsTheRule) {
  EXPECT_TRUE(rc::check([] {
    const auto row = *rows(WeightType::kBF16);
    const RowAnalysis found = analyse_row(row, WeightType::kBF16);
    int smallest = kMinRowExponent;
    while (!under(row, WeightType::kBF16, smallest)) ++smallest;
    RC_ASSERT(found.inexact_fp16 == inexact(row, 0));
    if (smallest > kMaxRowExponent) {
      RC_ASSERT(!found.nests);
      return;
    }
    const int expected = smallest >= 0 || inexact(row, 0) == 0 ? std::max(smallest, 0) : smallest;
    RC_ASSERT(found.exponent == expected);
    RC_ASSERT(found.nests == (expected <= 0 || lossless(row, WeightType::kBF16, expected)));
    if (!found.nests) return;
    RC_ASSERT(found.inexact_nested == inexact(row, expected));
    RC_ASSERT(expected > 0 || found.inexact_nested <= found.inexact_fp16);
    std::vector<uint16_t> shifted(row.size());
    shift_row(row, WeightType::kBF16, found.exponent, shifted.data());
    double worst = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      RC_ASSERT(is_nestable(shifted[i]));
      // v * 2^e is always a BF16 number, so a restored weight loses nothing more.
      const double kept = std::ldexp(fp16_to_fp32(shifted[i]), found.exponent);
      RC_ASSERT(bf16_to_fp32(fp32_to_bf16(static_cast<float>(kept))) == kept);
      const double value = source_value(row[i], WeightType::kBF16);
      const double plain = fp16_to_fp32(fp32_to_fp16(static_cast<float>(value)));
      RC_ASSERT(std::abs(kept - value) <= std::abs(plain - value));
      worst = std::max(worst, std::abs(kept - value));
    }
    RC_ASSERT(static_cast<float>(worst) == found.largest_error_nested);
  }));
}

// One weight alone in its row: every finite BF16 number comes back, but for those beyond the exponent's limits.
TEST(RowAnalysis, EveryBf16PatternAloneInARowNestsExactly) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const std::vector<uint16_t> row = {static_cast<uint16_t>(i)};
    const float value = bf16_to_fp32(row[0]);
    const RowAnalysis found = analyse_row(row, WeightType::kBF16);
    if (!std::isfinite(value)) {
      ASSERT_EQ(found.not_finite_col, 0);
      continue;
    }
    if (std::abs(value) > 1.75f * 0x1p100f) {
      ASSERT_FALSE(found.nests) << value;
      continue;
    }
    ASSERT_TRUE(found.nests) << value;
    uint16_t v = 0;
    shift_row(row, WeightType::kBF16, found.exponent, &v);
    ASSERT_TRUE(is_nestable(v));
    const NestedWeight nested = split(v);
    const float back = std::ldexp(fp16_to_fp32(join(nested.upper, nested.lower)), found.exponent);
    if (std::abs(value) >= 0x1p-117f) {  // 7 bits above the last that FP16's unit and the smallest exponent reach
      ASSERT_EQ(fp32_to_bf16(back), row[0]) << value;
      ASSERT_EQ(found.inexact_nested, 0);
    } else {
      ASSERT_LE(std::abs(back - value), 0x1p-125f);
    }
    ASSERT_EQ(found.inexact_fp16, fp16_to_fp32(fp32_to_fp16(value)) == value ? 0 : 1) << value;
    ASSERT_EQ(found.over_col, std::abs(value) >= 65520.0f ? 0 : -1);
  }
}

// Rows of several pieces, in which a few weights are too small to be exact.
TEST(RowAnalysis, LongBf16RowsCountEveryWeight) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (const size_t size : {127u, 128u, 129u, 1000u, 4097u}) {
    for (const uint32_t one_in : {1u, 50u, 2000u}) {
      std::vector<uint16_t> row;
      for (size_t i = 0; i < size; ++i) {
        const float shrink = random() % one_in == 0 ? std::ldexp(1.0f, -static_cast<int>(random() % 30)) : 1.0f;
        row.push_back(random() % 97 == 0 ? uint16_t{0x8000} : fp32_to_bf16(normal(random) * shrink));
      }
      const RowAnalysis found = analyse_row(row, WeightType::kBF16);
      ASSERT_TRUE(found.nests);
      const auto largest_error = [&](int e) {
        double largest = 0;
        for (const uint16_t w : row) {
          const double value = bf16_to_fp32(w);
          const float v = fp16_to_fp32(fp32_to_fp16(static_cast<float>(std::ldexp(value, -e))));
          largest = std::max(largest, std::abs(std::ldexp(v, e) - value));
        }
        return static_cast<float>(largest);
      };
      EXPECT_EQ(found.inexact_fp16, inexact(row, 0));
      EXPECT_EQ(found.inexact_nested, inexact(row, found.exponent));
      EXPECT_EQ(found.largest_error_fp16, largest_error(0));
      EXPECT_EQ(found.largest_error_nested, largest_error(found.exponent));
    }
  }
}

TEST(RowAnalysis, EveryFp16PatternAloneInARow) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const std::vector<uint16_t> row = {static_cast<uint16_t>(i)};
    const RowAnalysis found = analyse_row(row, WeightType::kF16);
    if (!std::isfinite(fp16_to_fp32(row[0]))) {
      ASSERT_FALSE(found.nests);
      ASSERT_EQ(found.not_finite_col, 0);
      continue;
    }
    ASSERT_TRUE(found.nests);
    uint16_t v = 0;
    shift_row(row, WeightType::kF16, found.exponent, &v);
    ASSERT_TRUE(is_nestable(v));
    ASSERT_EQ(std::ldexp(fp16_to_fp32(v), found.exponent), fp16_to_fp32(row[0]));
  }
}

TEST(RowAnalysis, ASmallWeightBesideALargeOneBreaksTheRow) {
  // 9.25 needs e = 3; 2^-24, FP16's smallest number, cannot be halved.
  const RowAnalysis found = analyse_row(std::vector<uint16_t>{0x0001, 0x48a0}, WeightType::kF16);
  EXPECT_FALSE(found.nests);
  EXPECT_EQ(found.exponent, 3);
  EXPECT_EQ(found.breaking_col, 0);
  EXPECT_EQ(found.largest_col, 1);
}

TEST(RowAnalysis, EmptyAndZeroRowsNestWithExponentZero) {
  EXPECT_TRUE(analyse_row({}, WeightType::kF16).nests);
  for (WeightType type : {WeightType::kF16, WeightType::kBF16}) {
    const RowAnalysis found = analyse_row(std::vector<uint16_t>{0x8000, 0x0000}, type);
    EXPECT_TRUE(found.nests);
    EXPECT_EQ(found.exponent, 0);
  }
}

}  // namespace
}  // namespace nfp
