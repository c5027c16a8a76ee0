// The division of a ragged batch of prompts into tiles of 128 query rows, found on the device, and its blocks' way
// through them: each draws the next tile when it comes to one, so that long and short ones are spread however they lie.
#pragma once

#include "backend/cuda/attention/prefill_layout.cuh"
#include "backend/cuda/ptx/barrier.cuh"
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

// Of row `row` of a sequence's query tokens * group.
struct PackedRow {
  int token, head;  // of the group
  __device__ __forceinline__ PackedRow(const AttentionParams& p, int row) {
    token = static_cast<int>((static_cast<uint64_t>(row) * p.group_inverse) >> 31);
    head = row - token * p.group;
  }
};

// Item `item` of the batch, which has `items`: all heads of the last tile, then of the one before. Sequences lie in
// lanes, in runs.
template <int kKeys>
__device__ __forceinline__ PrefillTile find_prefill_tile(const AttentionParams& p, int item, int& items) {
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
  const int all = __shfl_sync(0xffffffffu, before, 31);
  items = all * p.kv_heads;
  int index = all - 1 - item / p.kv_heads;
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
  const int first_position = tile.position0 + PackedRow(p, tile.first_row).token;
  const int last_position = tile.position0 + PackedRow(p, tile.first_row + tile.rows - 1).token;
  tile.first_key = max(0, first_position - p.window + 1) / kKeys * kKeys;
  tile.key_tiles = (last_position - tile.first_key) / kKeys + 1;
  return tile;
}

// The tiles of a block, in order: one warp draws them, all read them. There are places for several, since who draws
// also produces: it may be two tiles ahead of what it has produced all of, and must not wait for that one's consumers.
struct PrefillTiles {
  static constexpr int kPlaces = PrefillBarriers::kPlaces;
  PrefillTile* places;  // [kPlaces], shared
  PrefillBarriers barriers;
  int next = 0;

  // By the drawing warp, and that alone. The block that draws the last number of all makes `next_item` zero again.
  template <int kKeys>
  __device__ __forceinline__ const PrefillTile& draw(const PrefillParams& p) {
    const int lane = threadIdx.x % 32;
    int item = 0, items = 0;
    if (lane == 0) item = atomicAdd(p.next_item, 1);
    item = __shfl_sync(0xffffffffu, item, 0);
    const PrefillTile tile = find_prefill_tile<kKeys>(p.a, item, items);
    const int place = next % kPlaces;
    ptx::mbarrier_wait(barriers.tile_empty(place), (next / kPlaces % 2) ^ 1);
    ++next;
    if (lane == 0) {
      if (item == items + static_cast<int>(gridDim.x) - 1) *p.next_item = 0;
      places[place] = tile;
      ptx::mbarrier_arrive(barriers.tile_full(place));
    }
    __syncwarp();
    return places[place];
  }
  // By the others: the next one, which stays where it is until all consuming warps have left it.
  __device__ __forceinline__ const PrefillTile& read() {
    const int place = next % kPlaces;
    ptx::mbarrier_wait(barriers.tile_full(place), next / kPlaces % 2);
    ++next;
    return places[place];
  }
  // By each consuming warp, when it is done with the tile that it read as its `tile`-th.
  __device__ __forceinline__ void leave(int tile) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barriers.tile_empty(tile % kPlaces));
  }
};

}  // namespace nfp::cuda
