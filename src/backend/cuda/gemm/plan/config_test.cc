#include "backend/cuda/gemm/plan/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backend/cuda/gemm/testing/shapes.h"

namespace nfp::cuda {
namespace {

TEST(Config, TextRoundTrips) {
  for (const Tile& tile : kTiles) {
    for (const int splits : {0, 1, 2, 16}) {
      const Config config{tile, static_cast<int16_t>(splits), false};
      const auto parsed = parse_config(to_string(config));
      ASSERT_TRUE(parsed.has_value()) << to_string(config);
      EXPECT_EQ(*parsed, config);
    }
  }
  EXPECT_EQ(parse_config("128x256 c2 b1 exchange4"), (Config{Tile{256, 1, 2, 1}, 4, true}));
  for (const char* bad : {"", "128x128", "128x128 c1 b1 split", "128x128 c1 b1 split1", "128x128 c1 b1 split99999",
                          "128x128 c1 b1 splitx", "128x128 c1 b1 stream2", "128x256 c2 b1 exchange8", "77x1 c1 b1"}) {
    EXPECT_FALSE(parse_config(bad).has_value()) << bad;
  }
}

TEST(Config, EveryTileFitsAnSm) {
  for (const Tile& tile : kTiles) {
    EXPECT_LE((fixed_bytes(tile) + stages(tile) * stage_bytes(tile) + 1024) * tile.blocks_per_sm, 228 * 1024)
        << to_string({tile, 1, false});
    EXPECT_GE(stages(tile), 3) << to_string({tile, 1, false});
    EXPECT_EQ(tile.tokens / tile.cluster % 8, 0);
  }
}

TEST(Config, OutputsAreStagedInWholeChunks) {
  for (const Tile& tile : kTiles) {
    const std::string name = to_string({tile, 1, false});
    EXPECT_EQ(chunks(tile) * staging_tokens(tile), tile.tokens) << name;
    EXPECT_LE(chunks(tile), 32) << name;  // bits of a mask
    EXPECT_EQ(staging_bytes(tile) % 1024, 0) << name;
    EXPECT_LE(staging_slots(tile), 4) << name;  // a warp has at most one group under way
    EXPECT_EQ(stages(tile), stages(tile, std::min(staging_slots(tile), 2))) << name;
  }
}

// What the blocks of a tile load of its last tokens: all of them, and hardly more.
TEST(Config, TailsHoldTheLastTokens) {
  for (const Tile& tile : kTiles) {
    EXPECT_EQ(halves(tile) * load_tokens(tile), tile.tokens);
    EXPECT_EQ(load_tokens(tile) % 8, 0);  // the swizzle begins anew
    EXPECT_LE(load_tokens(tile), 256);    // of one instruction, and of one copy
    for (int64_t m = 1; m < 700; ++m) {
      const int64_t tokens = (m - 1) % load_tokens(tile) + 1;
      const int rows = tail_rows(tile, m), loaded = rows * loaders(tile);
      ASSERT_GE(loaded, tokens) << to_string({tile, 1, false}) << " m " << m;
      ASSERT_LE(loaded, load_tokens(tile));
      ASSERT_LE(rows, box_tokens(tile));
      if (loaders(tile) == 1) {
        ASSERT_EQ(loaded, tokens);
      } else {
        ASSERT_EQ(rows % 8, 0);
        ASSERT_LT(loaded, tokens + int64_t{8} * loaders(tile));
      }
    }
  }
}

// The kernel's walk over the work (kernel.cuh, WorkList), done here: every iteration of every tile exactly once, a
// share meets at most one tile that began before it, and share_of finds the share of each iteration.
TEST(Config, SchedulesCoverAllWorkOnce) {
  const int64_t ms[] = {1, 16, 17, 64, 100, 128, 300, 1000, 4096};
  const std::pair<int64_t, int64_t> shapes[] = {{4096, 4096}, {6144, 5120}, {128, 64}, {300, 576}, {28672, 4096}};
  for (const int64_t m : ms) {
    for (const auto& [n, k] : shapes) {
      for (const Mode mode : {Mode::kF16, Mode::kE4M3Promoted}) {
        const Problem problem{m, n, k, mode, false};
        const auto configs = candidates(problem, kH200);
        ASSERT_FALSE(configs.empty());
        for (const Config& config : configs) {
          const Schedule s = make_schedule(problem, config, kH200);
          ASSERT_GT(s.grid, 0);
          ASSERT_EQ(s.grid % config.tile.cluster, 0);
          ASSERT_GE(int64_t{s.m_tiles} * config.tile.cluster_tokens(), m);
          ASSERT_GE(int64_t{s.n_tiles} * config.tile.cluster_rows(), n);
          const int64_t total = int64_t{s.split_tiles} * s.k_iterations;
          int64_t covered = 0;
          for (int share = 0; share < s.shares; ++share) {
            const int64_t begin = share * total / s.shares;
            const int64_t end = (share + 1) * total / s.shares;
            ASSERT_LT(begin, end) << to_string(config);
            covered += end - begin;
            for (const int64_t i : {begin, end - 1}) ASSERT_EQ(((i + 1) * s.shares - 1) / total, share);
            if (config.splits > 1) {
              ASSERT_EQ(begin / s.k_iterations, (end - 1) / s.k_iterations);
            }
          }
          ASSERT_EQ(covered, total);
        }
      }
    }
  }
}

TEST(Config, FixedSplitsCutEveryTileAtTheSamePlacesWhateverM) {
  const Config config{Tile{16, 1, 1, 2}, 4, false};
  std::vector<int64_t> first;
  for (const int64_t m : {1, 16, 40}) {
    const Schedule s = make_schedule({m, 4096, 4160, Mode::kF16, false}, config, kH200);
    const int64_t total = int64_t{s.split_tiles} * s.k_iterations;
    std::vector<int64_t> cuts;
    cuts.reserve(static_cast<size_t>(s.shares));
    for (int share = 0; share < s.shares; ++share) cuts.push_back(share * total / s.shares % s.k_iterations);
    cuts.resize(4);
    if (first.empty()) first = cuts;
    EXPECT_EQ(cuts, first);
    EXPECT_EQ(s.shares, s.tiles() * 4);
  }
}

TEST(Config, TokenBuckets) {
  EXPECT_EQ(token_bucket(1), 1);
  EXPECT_EQ(token_bucket(2), 8);
  EXPECT_EQ(token_bucket(65), 96);
  EXPECT_EQ(token_bucket(100000), 4096);
}

// Every iteration of a cut tile belongs to one share, whose ends the kernel finds again from the iteration.
TEST(Schedule, SharesCoverCutTiles) {
  const DeviceShape device;
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{8192, 4096, 14336},
                                {512, 5120, 4096},
                                {1024, 28672, 4096},
                                {20000, 576, 1536},
                                {16, 4096, 4160},
                                {100000, 5120, 512}}) {
    for (const char* text : {"128x256 c1 b1 stream", "128x256 c1 b1 exchange3", "128x16 c1 b1 split5",
                             "192x128 c1 b1 exchange2", "128x8 c1 b2 split16"}) {
      const Schedule s = make_schedule({m, n, k, Mode::kF16, false}, *parse_config(text), device);
      if (s.shares == 0) continue;
      const int64_t total = int64_t{s.split_tiles} * s.k_iterations;
      ASSERT_EQ(s.length.begin(0), 0) << text;
      ASSERT_EQ(s.length.begin(s.shares), total) << text << " m " << m;
      for (int share = 0; share < s.shares; share += std::max(1, s.shares / 997)) {
        const int begin = s.length.begin(share), end = s.length.begin(share + 1);
        ASSERT_LT(begin, end);
        ASSERT_EQ(s.length.of(begin), share);
        ASSERT_EQ(s.length.of(end - 1), share);
        if (s.exchange > 1) {
          ASSERT_EQ(s.shares, s.tiles() * s.exchange);
        }
      }
    }
  }
}

}  // namespace
}  // namespace nfp::cuda
