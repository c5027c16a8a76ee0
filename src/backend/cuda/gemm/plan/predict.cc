#include "backend/cuda/gemm/plan/predict.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace nfp::cuda {
namespace {

double ceil_div(double a, double b) { return std::ceil(a / b); }
double cubed(double x) { return x * x * x; }

// The blocks, of so many that are launched together, that the busiest pair of SMs works at in all. Blocks go to every
// pair first, then to every SM, then to SMs that hold two.
double busiest_pair(double blocks, int blocks_per_sm, const DeviceShape& device) {
  const double room = static_cast<double>(device.sms) * blocks_per_sm;
  const double full = std::floor(blocks / room), rest = blocks - full * room;
  const double top = rest == 0 ? 0 : 2 * rest <= device.sms ? 1 : rest <= device.sms ? 2 : 2 * blocks_per_sm;
  return full * 2 * blocks_per_sm + top;
}

// Weights that are read again before they have left the L2 cost nothing; this is about half of one.
constexpr double kL2Megabytes = 50;

// Blocks of an exchange do one tile each, so every further turn of them begins with an empty ring. For each 1000 bytes
// of a tile's sums (measured on an H200: 26 turns of 5120 x 5120 with 5727 tokens and tiles of 128 x 224 took 10 us
// each more than their steps and joins).
constexpr double kTurnMicroseconds = 0.087;

}  // namespace

double predict_us(const TimeModel& model, const Problem& problem, const Config& config, const DeviceShape& device) {
  const Tile& tile = config.tile;
  const auto known = std::find(kTiles.begin(), kTiles.end(), tile);
  if (known == kTiles.end()) return std::numeric_limits<double>::infinity();
  const TileCost& cost = model.tiles[static_cast<size_t>(known - kTiles.begin())];
  if (cost.step_us <= 0) return std::numeric_limits<double>::infinity();

  const Schedule s = make_schedule(problem, config, device);
  const double k_steps = s.k_iterations;
  // Of the slot with the most work: steps of k and tiles, or parts of tiles, that it begins and ends.
  double steps = 0, ends = 0, fragments = 1;
  double pair_steps = 0;  // steps of k of the pair of SMs with the most
  const double cluster = tile.cluster;
  const bool cut = s.shares > s.split_tiles;
  const bool stream = config.splits == 0 && s.shares > 0;
  if (s.exchange > 1) {
    const double resident = std::max(1, device.resident(s.cluster, tile.blocks_per_sm));
    const double waves = ceil_div(s.tiles(), resident), share = ceil_div(k_steps, s.exchange);
    steps = waves * share;
    ends = waves;
    pair_steps = share * ((waves - 1) * busiest_pair(resident * s.cluster, tile.blocks_per_sm, device) +
                          busiest_pair((s.tiles() - (waves - 1) * resident) * s.cluster, tile.blocks_per_sm, device));
  } else {
    const double room = slots(tile, device);
    const double waves = ceil_div(s.tiles() - s.split_tiles, room);
    steps = waves * k_steps;
    ends = waves;
    pair_steps = k_steps * busiest_pair((s.tiles() - s.split_tiles) * cluster, tile.blocks_per_sm, device);
    if (s.shares > 0) {
      const double rounds = ceil_div(s.shares, room), share = ceil_div(s.split_tiles * k_steps, s.shares);
      steps += rounds * share;
      pair_steps += share * busiest_pair(s.shares * cluster, tile.blocks_per_sm, device);
      fragments = 1 + static_cast<double>(s.split_tiles) / s.shares;
      ends += rounds * (stream ? fragments : 1);
    }
  }
  const double busy = (steps * cost.step_us + ends * cost.tile_us) * tile.blocks_per_sm;

  const double weight_bytes = reads_lower(problem.mode) ? 2 : 1, token_bytes = is_fp8(problem.mode) ? 1 : 2;
  const double step = step_k(problem.mode);
  const double tiles = static_cast<double>(s.tiles()) * tile.cluster;
  const double m = static_cast<double>(problem.m), n = static_cast<double>(problem.n),
               k = static_cast<double>(problem.k);
  const double weights = n * k * weight_bytes * 1e-6;  // megabytes, which are microseconds of a TB/s
  // Tiles of the same weights but different tokens run side by side and share what is read. Under stream-K they are at
  // different k, and weights are read again as far as the L2 cannot hold those of the rows that are worked at.
  const double at_once = std::min<double>(static_cast<double>(slots(tile, device)) / s.m_tiles, s.n_tiles) *
                         tile.cluster_rows() * k * weight_bytes * 1e-6;
  const double again =
      stream ? model.reread * (s.m_tiles - 1) * s.split_tiles / s.tiles() * at_once / (at_once + kL2Megabytes) : 0;
  double memory = (weights * (1 + again) + m * k * token_bytes * 1e-6 + m * n * 2e-6) / model.memory_tb_s;
  const double stage_weights = tile.rows() * step * weight_bytes / (tile.along_tokens ? cluster : 1);
  const double stage_tokens = tile.tokens * step * token_bytes / (tile.along_tokens ? 1 : cluster);
  if (model.pair_tb_s > 0) memory = std::max(memory, pair_steps * stage_weights * 1e-6 / model.pair_tb_s);
  const double l2 = tiles * k_steps * (stage_weights + stage_tokens) * 1e-6 / model.l2_tb_s;
  const double power = tiles * tile.rows() * tile.tokens * k_steps * 2 * step * 1e-6 / model.tflops;
  // What overlaps is about as long as its longest part, but not quite: the part's neighbours add when they are close.
  const double overlapped = std::cbrt(cubed(busy) + cubed(memory) + cubed(l2) + cubed(power));

  double joining = 0;
  const double kilobytes = tile.rows() * tile.tokens * 4e-3;
  if (stream) {
    joining = model.stream_us + model.stream_us_kb * kilobytes * fragments;
  } else if (cut && s.exchange > 1) {
    joining = model.exchange_us + model.exchange_us_part * (s.exchange - 2) + model.turn_us * (ends - 1) +
              kilobytes * (model.exchange_us_kb * ends + kTurnMicroseconds * (ends - 1));
  } else if (cut) {
    const double parts = static_cast<double>(s.shares) / s.split_tiles;
    // Of its sums a part writes all but a slice, and reads as much; or one block reads all of the others.
    const double passed = s.sliced ? 2 * (parts - 1) / parts : parts;
    joining = model.split_us + model.split_us_part * (parts - 2) + model.split_us_kb * kilobytes * passed;
  }
  return model.launch_us + overlapped + joining;
}

}  // namespace nfp::cuda
