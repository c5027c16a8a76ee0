#include "backend/cuda/experts/grouped_plan.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace nfp::cuda {
namespace {

constexpr std::array kTiles = {8, 16, 32, 64, 128, 160, 256};

TEST(GroupedPlan, FewTokensTakeTheSmallestTile) {
  for (const Mode mode : {Mode::kF16, Mode::kW8A16, Mode::kE4M3}) {
    EXPECT_EQ(grouped_tile({mode, 1, 128, 8, 1536, 2048}, kTiles), 8);
    EXPECT_EQ(grouped_tile({mode, 8, 128, 8, 2048, 768}, kTiles), 8);
    EXPECT_EQ(grouped_tile({mode, 1, 1, 1, 64, 64}, kTiles), 8);
  }
}

TEST(GroupedPlan, TilesHoldWhatMostExpertsHave) {
  // Where weights are what is read, two tiles for most experts would read them twice.
  EXPECT_GE(grouped_tile({Mode::kF16, 64, 8, 2, 28672, 4096}, kTiles), 32);
  EXPECT_GE(grouped_tile({Mode::kF16, 128, 8, 2, 28672, 4096}, kTiles), 64);
  EXPECT_EQ(grouped_tile({Mode::kF16, 2048, 8, 2, 28672, 4096}, kTiles), 256);
  // 128 tokens an expert, give or take ten: one tile of 160 holds nearly all.
  EXPECT_EQ(grouped_tile({Mode::kF16, 2048, 128, 8, 1536, 2048}, kTiles), 160);
}

TEST(GroupedPlan, OnlyTilesThatAreThere) {
  constexpr std::array kOne = {64};
  EXPECT_EQ(grouped_tile({Mode::kW8A16, 1, 128, 8, 1536, 2048}, kOne), 64);
}

TEST(GroupedPlan, RefusesTilesThatAreNotThere) {
  const GroupedProblem problem{Mode::kF16, 2048, 128, 8, 1536, 2048};
  EXPECT_EQ(*choose_grouped_tile(problem, 0, kTiles), grouped_tile(problem, kTiles));
  for (const int tile : kTiles) EXPECT_EQ(*choose_grouped_tile(problem, tile, kTiles), tile);
  for (const int tile : {-2, 1, 192, 512}) {
    const auto refused = choose_grouped_tile(problem, tile, kTiles);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, ErrorCode::kUsage);
    EXPECT_EQ(refused.error().message, "expert_linear: tile_tokens " + std::to_string(tile) +
                                           " is none of the tiles of these products: 8, 16, 32, 64, 128, 160, 256");
  }
}

}  // namespace
}  // namespace nfp::cuda
