// The producers of prefill.cuh over an E4M3 cache: they make FP16 of the codes on their way, exactly, into the same
// ring, so that the products are those over an FP16 cache.
//
// Every thread has the same places of each tile: it copies its codes to shared memory that is its own, two or three
// tiles ahead, and widens them from there, so producers wait for nobody but the consumers.
#pragma once

#include "backend/cuda/attention/kv_tile.cuh"
#include "backend/cuda/attention/prefill_tile.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nfp::cuda {

// This thread's places of a tile: chunk `chunk` of 16 columns of rows `row0`, row0 + kRowsAtOnce, ...
template <int kDim>
struct CodePlaces {
  using Layout = PrefillLayout<kDim, KvType::kE4m3>;
  static constexpr int kChunks = kDim / 16;  // of a row
  static constexpr int kRowsAtOnce = 128 / kChunks;
  static constexpr int kCount = Layout::kKeys / kRowsAtOnce;
  int chunk = static_cast<int>(threadIdx.x) % kChunks, row0 = static_cast<int>(threadIdx.x) / kChunks;

  // Of the i-th place in a tile of codes; neighbours copy to neighbouring banks.
  __device__ __forceinline__ uint32_t code(int i) const { return (threadIdx.x + i * 128) * 16; }
  // Of 8 columns of it (half 0 or 1) in a tile of the ring.
  __device__ __forceinline__ uint32_t widened(int i, int half) const {
    const int row = row0 + i * kRowsAtOnce;
    return chunk / 4 * Layout::kBandBytes + row * 128 + ((chunk % 4 * 2 + half) ^ (row & 7)) * 16;
  }
};

// Copies of the batch's tiles of codes in the order in which they are used: keys and values of one, of the next, ...
template <int kDim>
struct CodeLoader {
  using Places = CodePlaces<kDim>;
  static constexpr int kKeys = Places::Layout::kKeys;
  const PrefillParams& params;
  const AttentionParams& p;
  PrefillTiles tiles;
  const PrefillTile* tile;
  int index;
  bool values = false;

  __device__ __forceinline__ CodeLoader(const PrefillParams& all, const PrefillTiles& first)
      : params(all), p(all.a), tiles(first) {
    enter();
  }
  __device__ __forceinline__ bool done() const { return tile->sequence < 0; }
  __device__ __forceinline__ void enter() {
    tile = threadIdx.x < 32 ? &tiles.draw<kKeys>(params) : &tiles.read();
    index = tile->key_tiles - 1;
  }
  // Under way to `to`, as a group of this thread's; an empty one after the last.
  __device__ __forceinline__ void copy_next(const Places& places, uint32_t to) {
    if (!done()) {
      const int32_t* const table = p.block_table + int64_t{tile->sequence} * p.table_width;
      const int key0 = tile->first_key + index * kKeys + places.row0;
      const bool is_column = places.chunk * 16 < p.head_dim;
      const uint8_t* const from = (values ? p.values : p.keys) + (is_column ? places.chunk * 16 : 0);
      const auto key_of = [&](int i) {
        return min(key0 + i * Places::kRowsAtOnce, tile->context - 1);  // behind it may be anything, in the table too
      };
      int blocks[Places::kCount];  // all asked for before the first is waited for
#pragma unroll
      for (int i = 0; i < Places::kCount; ++i) blocks[i] = __ldg(table + (key_of(i) >> p.block_shift));
#pragma unroll
      for (int i = 0; i < Places::kCount; ++i) {
        const int key = key_of(i);
        const int64_t row =
            ((int64_t{blocks[i]} * p.block_heads + tile->head) << p.block_shift) + (key & ((1 << p.block_shift) - 1));
        ptx::copy_async_16(to + places.code(i), from + row * p.head_dim,
                           is_column && key0 + i * Places::kRowsAtOnce == key);
      }
      if (values && --index < 0) enter();
      values = !values;
    }
    ptx::copy_async_commit();
  }
};

// All of the producing warpgroup.
template <int kDim>
__device__ __forceinline__ void produce_prefill_e4m3(const PrefillParams& p, const PrefillTiles& tiles, uint32_t ring,
                                                     uint32_t codes) {
  const PrefillBarriers& barriers = tiles.barriers;
  using Layout = PrefillLayout<kDim, KvType::kE4m3>;
  constexpr int kAhead = Layout::kCodeTiles;
  const CodePlaces<kDim> places;
  CodeLoader<kDim> loader(p, tiles);
  int copied = 0, slot = 0;  // tiles; the slot of codes of the tile that is widened next
  const auto copy_next = [&](int to) {
    if (!loader.done()) ++copied;
    loader.copy_next(places, codes + to * Layout::kCodeTileBytes);
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) copy_next(i);
#pragma unroll 1
  for (int widened = 0; widened < copied; ++widened) {
    const int use = widened / 2, stage = use % Layout::kStages, parity = use / Layout::kStages % 2;
    const bool values = widened % 2 != 0;
    ptx::mbarrier_wait(values ? barriers.values_empty(stage) : barriers.keys_empty(stage), parity ^ 1);
    ptx::copy_async_wait_group<kAhead - 1>();
    const uint32_t to = ring + (stage * 2 + (values ? 1 : 0)) * Layout::kTileBytes;
    constexpr int kBatch = 4;  // loads under way
    static_assert(CodePlaces<kDim>::kCount % kBatch == 0);
#pragma unroll 1
    for (int i0 = 0; i0 < CodePlaces<kDim>::kCount; i0 += kBatch) {
      uint4 four[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        four[i] = ptx::load_shared_16(codes + slot * Layout::kCodeTileBytes + places.code(i0 + i));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // Neighbouring bands begin with different halves, which lie in different banks.
        const bool swapped = places.chunk / 4 % 2 != 0;
        uint4 first, second;
        widen_codes(swapped ? four[i].z : four[i].x, first.x, first.y);
        widen_codes(swapped ? four[i].w : four[i].y, first.z, first.w);
        widen_codes(swapped ? four[i].x : four[i].z, second.x, second.y);
        widen_codes(swapped ? four[i].y : four[i].w, second.z, second.w);
        ptx::store_shared_16(to + places.widened(i0 + i, swapped ? 1 : 0), first);
        ptx::store_shared_16(to + places.widened(i0 + i, swapped ? 0 : 1), second);
      }
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(values ? barriers.values_full(stage) : barriers.keys_full(stage));
    copy_next(slot);
    slot = slot + 1 == kAhead ? 0 : slot + 1;
  }
}

}  // namespace nfp::cuda
