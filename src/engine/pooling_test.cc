#include "engine/pooling.h"

#include <gtest/gtest.h>

#include <random>

#include "base/float_types.h"

namespace nfp {
namespace {

constexpr int32_t kWidth = 5;

HiddenRows rows_of(const std::vector<float>& values, int32_t first, int32_t count) {
  return {values.data() + static_cast<ptrdiff_t>(first) * kWidth, DType::kF32, kWidth, first, count};
}

std::vector<float> random_rows(int32_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 30);
  std::vector<float> values(static_cast<size_t>(count) * kWidth);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(Pooling, TheLastRowIsThatOfTheLastPiece) {
  const std::vector<float> values = random_rows(9);
  PooledStates pooled;
  pooled.add(Pooling::kLast, {});  // a piece of the prompt that does not end it
  pooled.add(Pooling::kLast, rows_of(values, 8, 1));
  EXPECT_EQ(pooled.result(), std::vector<float>(values.end() - kWidth, values.end()));
}

TEST(Pooling, TheMeanDoesNotDependOnThePieces) {
  const int32_t tokens = 23;
  const std::vector<float> values = random_rows(tokens);
  std::vector<float> expected;
  for (int32_t i = 0; i < kWidth; ++i) {
    double sum = 0;
    for (int32_t t = 0; t < tokens; ++t)
      sum += static_cast<double>(values[static_cast<size_t>(int64_t{t} * kWidth + i)]);
    expected.push_back(static_cast<float>(sum / tokens));
  }
  for (const int32_t piece : {1, 2, 7, 22, 23}) {
    PooledStates pooled;
    for (int32_t first = 0; first < tokens; first += piece) {
      pooled.add(Pooling::kMean, rows_of(values, first, std::min(piece, tokens - first)));
    }
    EXPECT_EQ(pooled.result(), expected) << piece;
  }
}

TEST(Pooling, RowsThatComeAgainAfterPreemptionCountOnce) {
  const std::vector<float> values = random_rows(10);
  PooledStates once, twice;
  once.add(Pooling::kMean, rows_of(values, 0, 10));
  twice.add(Pooling::kMean, rows_of(values, 0, 4));
  twice.add(Pooling::kMean, rows_of(values, 0, 3));
  twice.add(Pooling::kMean, rows_of(values, 3, 7));
  EXPECT_EQ(twice.result(), once.result());
}

TEST(Pooling, Fp16RowsAreWidened) {
  const std::vector<uint16_t> values = {0x3c00, 0xbc00, 0x0001, 0x7bff, 0x0000, 0x4000, 0x3c00, 0x0003, 0x7bff, 0x8000};
  PooledStates pooled;
  pooled.add(Pooling::kMean, {values.data(), DType::kF16, kWidth, 0, 2});
  EXPECT_EQ(pooled.result(), (std::vector<float>{1.5f, 0.0f, 0x1p-23f, 65504.0f, 0.0f}));
}

}  // namespace
}  // namespace nfp
