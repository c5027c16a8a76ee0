// The division of a batch's rows (decode.cuh) among thread blocks, found on the device.
#pragma once

#include <cstdint>

#include "backend/cuda/attention/attention_kernel.h"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {

// A block's or warp's way through the rows of its span, piece by piece. A piece is the part of a row that is summed as
// one.
struct DecodeWalk {
  int sequence, head;       // KV head
  int token;                // the sequence's query
  int context, first_tile;  // of the sequence: the window may hide the tiles before
  int tiles;                // of the row
  int begin, end;           // the piece, in tiles of the row
  int left;                 // work of the span behind the piece
  int row_start;            // work before the row, in the whole batch, a bundle's counted once
  int done;

  static __device__ __forceinline__ int first_visible_tile(const DecodeParams& p, int context) {
    return context > p.a.window ? (context - p.a.window) / kDecodeTile : 0;
  }
  // A sequence without keys is no work: its output is zeros (clear_keyless).
  static __device__ __forceinline__ int count_tiles(const DecodeParams& p, int context) {
    return context <= 0 ? 0 : (context + kDecodeTile - 1) / kDecodeTile - first_visible_tile(p, context);
  }
  static __device__ __forceinline__ int chunk(int tiles) {
    return kDecodeChunkTiles *
           ((tiles + kDecodeChunkTiles * kMaxDecodeChunks - 1) / (kDecodeChunkTiles * kMaxDecodeChunks));
  }
  // Work is counted in tiles, or in chunks where the sum must not depend on the batch.
  static __device__ __forceinline__ int row_work(const DecodeParams& p, int tiles) {
    return p.deterministic && tiles > 0 ? (tiles + chunk(tiles) - 1) / chunk(tiles) : tiles;
  }

  // The cache block of a tile of the row.
  __device__ __forceinline__ int cache_block(const DecodeParams& p, int tile) const {
    const int key = (first_tile + tile) * kDecodeTile;
    return __ldg(p.a.block_table + int64_t{sequence} * p.a.table_width + (key >> p.a.block_shift));
  }

  __device__ __forceinline__ void enter(const DecodeParams& p) {
    context = p.a.context[sequence];
    token = p.a.query_start[sequence];  // here, and not when the query is there and waits for it
    first_tile = first_visible_tile(p, context);
    tiles = count_tiles(p, context);
  }
  __device__ __forceinline__ void take(const DecodeParams& p) {
    end = min(tiles, begin + (p.deterministic ? chunk(tiles) : left));
    left -= p.deterministic ? 1 : end - begin;
  }
  template <bool kBundles>
  __device__ __forceinline__ void next(const DecodeParams& p) {
    done = left <= 0;
    if (done) return;
    begin = end;
    if (begin == tiles) {
      begin = 0;
      row_start += row_work(p, tiles);
      head += kBundles ? p.bundle : 1;
      if (head >= p.a.kv_heads) {
        head -= p.a.kv_heads;
        do {  // one with work follows, as some is left
          ++sequence;
          enter(p);
        } while (tiles == 0);
      }
    }
    take(p);
  }
};

// The span of `unit` of `units` (blocks or warps), found by every warp for itself: sequences in lanes, lane i with the
// i-th run of them. `span` is the work of each unit; the first `busy` have some, at least one bundle is counted.
//
// A bundle is p.bundle neighbouring heads of a sequence. Their rows are cut at the same places, and as many
// neighbouring units have the same piece of each: they read them at the same time, as a cache block has them side by
// side, and memory opens fewer pages.
template <bool kBundles>
__device__ __forceinline__ DecodeWalk start_walk(const DecodeParams& p, int unit, int units, int& span, int& busy) {
  const int least_span = kBundles ? kLeastRowsSpan : p.deterministic ? 1 : kLeastDecodeSpan;
  const int bundle = kBundles ? p.bundle : 1;
  const int lane = threadIdx.x % 32;
  const int bundles = p.a.kv_heads / bundle;  // of a sequence
  const int run = (p.a.sequences + 31) / 32;
  const int first = min(lane * run, p.a.sequences), last = min(first + run, p.a.sequences);
  int work = 0;
#pragma unroll 4
  for (int s = first; s < last; ++s)
    work += DecodeWalk::row_work(p, DecodeWalk::count_tiles(p, p.a.context[s])) * bundles;
  int before = warp_scan(work, lane);
  const int total = __shfl_sync(0xffffffffu, before, 31);
  before -= work;
  const int spans = units / bundle;
  span = max(least_span, (total + spans - 1) / spans);
  busy = max(1, (total + span - 1) / span) * bundle;

  DecodeWalk walk{};
  const int64_t wide_start = int64_t{span} * (unit / bundle);
  walk.done = wide_start >= total;
  if (walk.done) return walk;
  const int start = static_cast<int>(wide_start);
  walk.left = min(span, total - start);
  const uint32_t holders = __ballot_sync(0xffffffffu, before <= start && start < before + work);
  const int holder = __ffs(static_cast<int>(holders)) - 1;
  walk.sequence = __shfl_sync(0xffffffffu, first, holder);
  int offset = start - __shfl_sync(0xffffffffu, before, holder);
  walk.enter(p);
  while (offset >= DecodeWalk::row_work(p, walk.tiles) * bundles) {
    offset -= DecodeWalk::row_work(p, walk.tiles) * bundles;
    ++walk.sequence;
    walk.enter(p);
  }
  const int row = DecodeWalk::row_work(p, walk.tiles);
  walk.head = offset / row * bundle + unit % bundle;
  offset %= row;
  walk.row_start = start - offset;
  walk.begin = p.deterministic ? offset * DecodeWalk::chunk(walk.tiles) : offset;
  walk.take(p);
  return walk;
}

// What start_walk() finds for a block or a warp, kept for all calls over a batch (plan_decode), and the cache blocks of
// the first tiles. It is more than a microsecond's work, most of it waiting, where another load is done at once.
struct alignas(16) DecodeStart {
  DecodeWalk walk;
  int span, busy;
  int block[kDecodeWarps];  // of tiles walk.begin, walk.begin + 1, ...
};

// start_walk(), or what the plan has of it; then `block` is that of tile walk.begin + tile, else it stays.
template <int kDim, bool kBundles>
__device__ __forceinline__ DecodeWalk planned_walk(const DecodeParams& p, int unit, int units, int tile, int& span,
                                                   int& busy, int& block) {
  if (kDim > 128 || p.plan == nullptr) return start_walk<kBundles>(p, unit, units, span, busy);
  const auto* start = static_cast<const DecodeStart*>(p.plan) + unit;
  span = __ldg(&start->span);
  busy = __ldg(&start->busy);
  block = __ldg(&start->block[tile]);
  const DecodeWalk& walk = start->walk;
  return {__ldg(&walk.sequence),   __ldg(&walk.head),      __ldg(&walk.token), __ldg(&walk.context),
          __ldg(&walk.first_tile), __ldg(&walk.tiles),     __ldg(&walk.begin), __ldg(&walk.end),
          __ldg(&walk.left),       __ldg(&walk.row_start), __ldg(&walk.done)};
}

// The part of a row for this block of its cluster, maybe none. The first `blocks` have some.
__device__ __forceinline__ DecodeWalk share_row(const DecodeParams& p, int rank, int& blocks) {
  DecodeWalk walk{};
  const int row = static_cast<int>(blockIdx.x) / p.cluster;
  walk.sequence = row / p.a.kv_heads;
  walk.head = row % p.a.kv_heads;
  walk.enter(p);
  walk.tiles = max(1, walk.tiles);  // of no keys: sums of nothing are zeros
  const int wave = p.cluster * kDecodeWarps;
  const int part = (walk.tiles + wave - 1) / wave * kDecodeWarps;  // the same for every warp
  blocks = (walk.tiles + part - 1) / part;
  walk.begin = min(rank * part, walk.tiles);
  walk.end = min(walk.begin + part, walk.tiles);
  return walk;
}

// Sequences without keys (what pads a captured step) have outputs of zeros. Of `workers` groups of `threads` threads
// each takes some: were they rows of a span like others, all of them together would be the last block's. After the wait
// for the kernel before.
__device__ __forceinline__ void clear_keyless(const DecodeParams& p, int worker, int workers, int thread, int threads) {
  for (int s = worker; s < p.a.sequences; s += workers) {
    if (p.a.context[s] > 0) continue;
    const int numbers = p.a.heads * p.a.head_dim;
    uint16_t* const out = p.a.out + int64_t{p.a.query_start[s]} * numbers;
    for (int i = thread * 2; i < numbers; i += threads * 2) *reinterpret_cast<uint32_t*>(out + i) = 0;
  }
}

}  // namespace nfp::cuda
