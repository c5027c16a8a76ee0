#include "backend/cuda/gemm/plan/predict.h"

#include <gtest/gtest.h>

#include <cmath>

#include "backend/cuda/gemm/plan/tuning_table.h"

namespace nfp::cuda {
namespace {

const DeviceShape kH200;

// Tiles that cost their arithmetic and nothing else, on a machine whose memory and L2 are free.
TimeModel arithmetic_only() {
  TimeModel model;
  model.memory_tb_s = model.l2_tb_s = model.tflops = 1e9;
  for (size_t i = 0; i < kTiles.size(); ++i) model.tiles[i].step_us = kTiles[i].rows() * kTiles[i].tokens * 1e-4;
  return model;
}

TEST(Predict, CountsWaves) {
  const TimeModel model = arithmetic_only();
  const Config whole{Tile{256, 1, 1, 1}, 1, false};
  const double step = 128 * 256 * 1e-4;
  // 4096 features are 32 tiles of rows: 4 tiles of tokens fit one wave of 132 SMs, a fifth needs another.
  const auto us = [&](int64_t m) { return predict_us(model, {m, 4096, 4096, Mode::kF16, false}, whole, kH200); };
  EXPECT_NEAR(us(1024), 64 * step, 1e-6);
  EXPECT_NEAR(us(1025), 2 * 64 * step, 1e-6);
  EXPECT_NEAR(us(2048), 2 * 64 * step, 1e-6);
  EXPECT_NEAR(us(2049), 3 * 64 * step, 1e-6);
  // Cut in two, 64 tiles fill 128 SMs for half as long.
  const Config cut{whole.tile, 2, false};
  EXPECT_NEAR(predict_us(model, {512, 4096, 4096, Mode::kF16, false}, cut, kH200), 32 * step, 1e-6);
}

TEST(Predict, ClustersThatDoNotFitTakeAnotherTurn) {
  const TimeModel model = arithmetic_only();
  DeviceShape device;
  device.clusters_of_4 = 31;
  const Config parts{Tile{128, 1, 1, 1}, 4, true};
  ASSERT_TRUE(can_exchange(parts.tile, 4));
  const double step = 128 * 128 * 1e-4;
  EXPECT_NEAR(predict_us(model, {128, int64_t{31} * 128, 4096, Mode::kF16, false}, parts, device), 16 * step, 1e-6);
  // (A second turn begins with an empty ring: 0.087 us for each 1000 bytes of sums.)
  EXPECT_NEAR(predict_us(model, {128, int64_t{32} * 128, 4096, Mode::kF16, false}, parts, device),
              32 * step + 0.087 * 128 * 128 * 4e-3, 1e-6);
}

TEST(Predict, MemoryIsALowerBound) {
  TimeModel model = arithmetic_only();
  model.memory_tb_s = 4;
  const Config whole{Tile{8, 1, 1, 1}, 1, false};
  const double us = predict_us(model, {1, 8192, 8192, Mode::kF16, false}, whole, kH200);
  EXPECT_GE(us, 2.0 * 8192 * 8192 / 4e6);
  EXPECT_LT(us, 1.2 * 2.0 * 8192 * 8192 / 4e6);
}

TEST(Predict, UnknownTilesAreNeverChosen) {
  TimeModel model = arithmetic_only();
  model.tiles = {};
  EXPECT_TRUE(std::isinf(predict_us(model, {1, 64, 64, Mode::kF16, false}, {kTiles[0], 1, false}, kH200)));
}

// Every choice exists, however odd the shape, and none is slower by prediction than the analytic choice.
TEST(Predict, ChoosesForAnyNumberOfTokens) {
  TuningTable table;
  const TimeModel model = arithmetic_only();
  for (const Mode mode : {Mode::kF16, Mode::kE4M3, Mode::kE4M3Promoted}) table.set_model(mode, model);
  for (const Mode mode : kModes) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {192, 72}, {28672, 4096}, {5120, 32768}}) {
      for (int64_t m = 1; m < 20000; m = m * 5 / 4 + 1) {
        const Problem problem{m, n, k, mode, false};
        const Choice choice = choose(problem, kH200, &table, Reduction::kFastest);
        ASSERT_STREQ(choice.reason, "predicted");
        ASSERT_TRUE(exists(choice.config.tile, mode)) << describe(problem, choice, kH200);
        for (const Reduction reduction : {Reduction::kFastest, Reduction::kBatchInvariant}) {
          const Problem free{m, n, k, mode, false, Join::kFree};
          const Choice other = choose(free, kH200, &table, reduction);
          ASSERT_TRUE(exists(other.config.tile, mode, Join::kFree)) << describe(free, other, kH200);
        }
        // Stream-K is only taken by a margin.
        ASSERT_LE(predict_us(model, problem, choice.config, kH200),
                  1.25 * predict_us(model, problem, analytic_choice(problem, kH200), kH200));
      }
    }
  }
}

// Where a number of tokens was measured, the measurement decides.
TEST(Predict, MeasuredChoicesStand) {
  TuningTable table;
  table.set_model(Mode::kF16, arithmetic_only());
  const Config tuned{Tile{64, 1, 1, 1}, 2, false};
  table.set(4096, 4096, Mode::kF16, 64, tuned);
  const Choice choice = choose({64, 4096, 4096, Mode::kF16, false}, kH200, &table, Reduction::kFastest);
  EXPECT_STREQ(choice.reason, "tuned");
  EXPECT_EQ(choice.config, tuned);
  EXPECT_EQ(choose({33, 4096, 4096, Mode::kF16, false}, kH200, &table, Reduction::kFastest).config, tuned);
  EXPECT_STREQ(choose({65, 4096, 4096, Mode::kF16, false}, kH200, &table, Reduction::kFastest).reason, "predicted");
}

}  // namespace
}  // namespace nfp::cuda
