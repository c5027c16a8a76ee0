#include "backend/cuda/gemm/plan/predict.h"

#include <gtest/gtest.h>

#include <cmath>

#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/gemm/testing/shapes.h"

namespace nfp::cuda {
namespace {

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
  device.clusters[0][4] = 31;
  const Config parts{Tile{128, 1, 1, 1}, 4, true};
  ASSERT_TRUE(can_exchange(parts.tile, 4));
  const double step = 128 * 128 * 1e-4;
  EXPECT_NEAR(predict_us(model, {128, int64_t{31} * 128, 4096, Mode::kF16, false}, parts, device), 16 * step, 1e-6);
  // (A second turn begins with an empty ring: 0.087 us for each 1000 bytes of sums.)
  EXPECT_NEAR(predict_us(model, {128, int64_t{32} * 128, 4096, Mode::kF16, false}, parts, device),
              32 * step + 0.087 * 128 * 128 * 4e-3, 1e-6);
}

TEST(Predict, PartsAndTurnsCost) {
  TimeModel model = arithmetic_only();
  const Tile tile{128, 1, 1, 1};
  const auto us = [&](int n, int splits, bool exchange) {
    return predict_us(model, {128, n, 4096, Mode::kF16, false}, {tile, static_cast<int16_t>(splits), exchange}, kH200);
  };
  const double exchanged = us(8 * 128, 8, true), turned = us(17 * 128, 8, true), cut = us(8 * 128, 8, false),
               halves = us(8 * 128, 2, true);
  model.exchange_us_part = 0.25;
  model.split_us_part = 0.5;
  model.turn_us = 2;
  // Six parts beyond two; 17 clusters of eight are a turn more than the 16 that are resident.
  EXPECT_NEAR(us(8 * 128, 8, true), exchanged + 6 * 0.25, 1e-9);
  EXPECT_NEAR(us(17 * 128, 8, true), turned + 6 * 0.25 + 2, 1e-9);
  EXPECT_NEAR(us(8 * 128, 8, false), cut + 6 * 0.5, 1e-9);
  EXPECT_NEAR(us(8 * 128, 2, true), halves, 1e-9);
}

TEST(Predict, APairOfMultiprocessorsLoadsSoMuch) {
  TimeModel model;
  model.memory_tb_s = model.l2_tb_s = model.tflops = 1e9;
  model.pair_tb_s = 0.1;
  for (TileCost& tile : model.tiles) tile.step_us = 1e-9;
  // Blocks of 128 x 8192 E4M3 weights, one for each pair up to 66, then two; where SMs hold two, four beyond 132.
  const auto turns = [&](int64_t tiles, int blocks_per_sm) {
    const Config whole{Tile{8, 1, 1, static_cast<int16_t>(blocks_per_sm)}, 1, false};
    return predict_us(model, {1, tiles * 128, 8192, Mode::kE4M3, false}, whole, kH200) / (128 * 8192 * 1e-6 / 0.1);
  };
  EXPECT_NEAR(turns(1, 1), 1, 1e-6);
  EXPECT_NEAR(turns(66, 1), 1, 1e-6);
  EXPECT_NEAR(turns(67, 1), 2, 1e-6);
  EXPECT_NEAR(turns(133, 1), 3, 1e-6);
  EXPECT_NEAR(turns(132, 2), 2, 1e-6);
  EXPECT_NEAR(turns(133, 2), 4, 1e-6);
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
  EXPECT_EQ(choose({49, 4096, 4096, Mode::kF16, false}, kH200, &table, Reduction::kFastest).config, tuned);
  EXPECT_STREQ(choose({65, 4096, 4096, Mode::kF16, false}, kH200, &table, Reduction::kFastest).reason, "predicted");
}

}  // namespace
}  // namespace nfp::cuda
