// The division of a ragged batch of prompts into tiles of 128 query rows, found on the device.
#pragma once

#include "backend/cuda/attention/attention_kernel.h"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {

// What there is to do, in every warp alike.
struct PrefillTile {
  int sequence;   // -1: no more
  int head;       // KV head
  int token0;     // the sequence's first query token
  int first_row;  // of the sequence's query tokens * group
  int rows;       // at most 128
  int context;
  int position0;  // of the sequence's first query
  int first_key, key_tiles;
};

// Item `item` of the batch: all heads of the last tile, then of the one before. Sequences lie in lanes, in runs.
template <int kKeys>
__device__ __forceinline__ PrefillTile find_prefill_tile(const AttentionParams& p, int item) {
  const int lane = threadIdx.x % 32;
  const int run = (p.sequences + 31) / 32;
  const int first = min(lane * run, p.sequences), last = min(first + run, p.sequences);
  const auto tiles_of = [&](int s) {
    return ((p.query_start[s + 1] - p.query_start[s]) * p.group + kPrefillRows - 1) / kPrefillRows;
  };
  int tiles = 0;
#pragma unroll 1
  for (int s = first; s < last; ++s) tiles += tiles_of(s);
  int before = warp_scan(tiles, lane);
  PrefillTile tile{};
  int index = __shfl_sync(0xffffffffu, before, 31) - 1 - item / p.kv_heads;
  tile.sequence = -1;
  if (index < 0) return tile;
  before -= tiles;
  const uint32_t holders = __ballot_sync(0xffffffffu, before <= index && index < before + tiles);
  const int holder = __ffs(static_cast<int>(holders)) - 1;
  int sequence = __shfl_sync(0xffffffffu, first, holder);
  index -= __shfl_sync(0xffffffffu, before, holder);
#pragma unroll 1
  for (; index >= tiles_of(sequence); ++sequence) index -= tiles_of(sequence);
  tile.sequence = sequence;
  tile.head = item % p.kv_heads;
  tile.token0 = p.query_start[sequence];
  const int tokens = p.query_start[sequence + 1] - tile.token0;
  tile.first_row = index * kPrefillRows;
  tile.rows = min(kPrefillRows, tokens * p.group - tile.first_row);
  tile.context = p.context[sequence];
  tile.position0 = tile.context - tokens;
  const int first_position = tile.position0 + tile.first_row / p.group;
  const int last_position = tile.position0 + (tile.first_row + tile.rows - 1) / p.group;
  tile.first_key = max(0, first_position - p.window + 1) / kKeys * kKeys;
  tile.key_tiles = (last_position - tile.first_key) / kKeys + 1;
  return tile;
}

}  // namespace nfp::cuda
