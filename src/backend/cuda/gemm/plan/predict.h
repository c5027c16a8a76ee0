// How long a launch should take, for any number of tokens: what the choice between tuned numbers of tokens goes by.
// Plain C++: waves and tails are counted, the rest is a few measured quantities of a device (TimeModel).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "backend/cuda/gemm/plan/config.h"

namespace nfp::cuda {

struct TileCost {
  double step_us = 0;  // a step of k (128 bytes) on an SM that does nothing else; 0 = not measured
  double tile_us = 0;  // beginning and storing a tile
};

// Of one device and mode.
struct TimeModel {
  double launch_us = 0;
  double memory_tb_s = 0;       // device memory
  double l2_tb_s = 0;           // from the L2 to all SMs
  double tflops = 0;            // that power lets all SMs keep up
  double exchange_us = 0;       // joining parts in a cluster: at all,
  double exchange_us_kb = 0;    // for each 1000 bytes of a tile's sums
  double exchange_us_part = 0;  // and for each part beyond two; a further turn of clusters begins with empty rings:
  double turn_us = 0;
  double split_us = 0;  // joining parts through memory
  double split_us_kb = 0;
  double split_us_part = 0;
  double stream_us = 0;  // the same for stream-K
  double stream_us_kb = 0;
  double pair_tb_s = 0;  // weights that a pair of neighbouring SMs (a TPC) loads; 0 = not a limit
  double reread = 0;     // how often stream-K reads weights again for each further tile of tokens, where the L2 is full
  std::array<TileCost, kTiles.size()> tiles{};
};

// Thread blocks, in clusters of the tile's, that are resident at once.
int slots(const Tile& tile, const DeviceShape& device);

// The tiles of a width that suits a problem's number of tokens, in no order.
template <typename Visit>
void for_each_tile(const Problem& problem, const Visit& visit) {
  for (const Tile& tile : kTiles) {
    if (!exists(tile, problem.mode, problem.join)) continue;
    // A token tile at most twice as wide as the smallest that holds all tokens, and never so narrow that weights are
    // read often.
    const bool smallest = tile.tokens == 8;
    if (!smallest && tile.tokens >= 4 * problem.m && tile.tokens > 16) continue;
    if (int64_t{tile.tokens} * 4 < std::min<int64_t>(problem.m, 256)) continue;
    if (problem.m <= 64 && tile.tokens < problem.m) continue;
    if (tile.tokens > 64 && problem.m * 2 < tile.tokens) continue;
    if (tile.along_tokens && problem.m <= tile.tokens) continue;  // half of each cluster would be idle
    visit(tile);
  }
}

// Whether a tile's parts are worth joining in global memory. Three warpgroups' tiles, which one block adds up, gained
// by it in FP16 only where power is the limit, and cost a prompt of 320 tokens 4 %.
constexpr bool joins_in_memory(const Tile& tile, Mode mode) {
  return can_join(tile) && (tile.warpgroups < 3 || !reads_lower(mode));
}

// Every configuration worth considering for a problem, in no order.
template <typename Visit>
void for_each_candidate(const Problem& problem, const DeviceShape& device, const Visit& visit) {
  const int64_t k_iterations = (problem.k + step_k(problem.mode) - 1) / step_k(problem.mode);
  for_each_tile(problem, [&](const Tile& tile) {
    const int64_t columns = tile.cluster_rows(), rows = tile.cluster_tokens();
    const int64_t tiles = ((problem.m + rows - 1) / rows) * ((problem.n + columns - 1) / columns);
    const int64_t room = slots(tile, device);
    visit(Config{tile, 1, false});
    const bool joins = joins_in_memory(tile, problem.mode);
    if (joins && tiles % room != 0 && tiles < 16 * room) visit(Config{tile, 0, false});
    for (const int splits : {2, 3, 4, 5, 6, 8, 12, 16}) {
      if (tiles * splits > 2 * room || k_iterations / splits < 2) continue;
      if (joins) visit(Config{tile, static_cast<int16_t>(splits), false});
      if (can_exchange(tile, splits)) visit(Config{tile, static_cast<int16_t>(splits), true});
    }
  });
}

// Microseconds. Infinite for a tile that the model does not know.
double predict_us(const TimeModel& model, const Problem& problem, const Config& config, const DeviceShape& device);

}  // namespace nfp::cuda
