// Attention of sequences with any number of query tokens: a tile is 128 query rows of one sequence and one KV head, a
// row being one token and one of the heads of the group, over all keys that its rows see.
//
// Blocks are persistent. Four warps copy tiles of keys and values into a ring, or make FP16 of them on the way
// (prefill_e4m3.cuh); two warpgroups have 64 rows each. As in FlashAttention-3 (Shah et al., 2024, sections 3.1
// and 3.2) a warpgroup's next product with the keys is under way while it weighs the last one's values, and the two
// take turns, so that one's softmax runs under the other's products.
//
// Tiles are numbered from the end of the batch, since the late tiles of a sequence see the most keys, and blocks draw
// them (prefill_tile.cuh); keys are taken from the last to the first.
#pragma once

#include "backend/cuda/attention/prefill_e4m3.cuh"
#include "backend/cuda/attention/prefill_tile.cuh"
#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/warp.cuh"
#include "backend/cuda/ptx/wgmma_attention.cuh"

namespace nfp::cuda {

// Descriptor of a tile of values as an N-major operand: 64 columns a band, bands `band_bytes` apart, groups of eight
// keys 1024 bytes apart (PTX ISA, "Strides": leading dimension between bands, stride between groups).
__device__ __forceinline__ uint64_t values_descriptor(uint32_t address, int band_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (static_cast<uint64_t>(band_bytes >> 4) << 16) |
         ((address & 0x3ffff) >> 4);
}

// The copying warps, of which two copy keys and two values, each half of a tile's boxes: a box of 16 keys by 64 columns
// takes its warp some 50 cycles, and one warp alone took longer for a tile than its products. Cache blocks behind the
// context are not copied, so a barrier expects fewer bytes.
template <int kDim>
__device__ __forceinline__ void produce_prefill(const PrefillParams& p, PrefillTiles tiles, uint32_t ring) {
  using Layout = PrefillLayout<kDim>;
  constexpr int kBoxKeys = 16, kHalf = Layout::kKeys / kBoxKeys / 2;
  const int lane = threadIdx.x % 32, warp = ptx::warp_uniform(static_cast<int>(threadIdx.x) / 32);
  const bool values = warp % 2 != 0;
  const int first_box = warp / 2 * kHalf;
  const int box = first_box + lane / Layout::kBands, band = lane % Layout::kBands;  // of this lane's copy
  const CUtensorMap* const map = values ? &p.values : &p.keys;
  const uint32_t to = ring + (values ? Layout::kTileBytes : 0) + box * (kBoxKeys * 128) + band * Layout::kBandBytes;
  const PrefillBarriers& barriers = tiles.barriers;
  int use = 0;
#pragma unroll 1
  for (;;) {
    const PrefillTile& tile = warp == 0 ? tiles.draw<Layout::kKeys>(p) : tiles.read();
    if (tile.sequence < 0) return;
    const int32_t* const table = p.a.block_table + int64_t{tile.sequence} * p.a.table_width;
    const int first_key = tile.first_key + box * kBoxKeys;
    const auto boxes_of = [&](int index) {  // of this warp's, that have keys
      const int keys = tile.context - (tile.first_key + index * Layout::kKeys);
      return max(0, min(kHalf, (keys + kBoxKeys - 1) / kBoxKeys - first_box));
    };
    const auto block_of = [&](int index) {
      const int key = first_key + index * Layout::kKeys;
      return lane < boxes_of(index) * Layout::kBands ? __ldg(table + (key >> p.a.block_shift)) : 0;
    };
    int block = block_of(tile.key_tiles - 1);
#pragma unroll 1
    for (int index = tile.key_tiles - 1; index >= 0; --index, ++use) {
      const int next_block = index > 0 ? block_of(index - 1) : 0;  // on its way while this tile's copies begin
      const int stage = use % Layout::kStages, parity = use / Layout::kStages % 2;
      const uint32_t full = values ? barriers.values_full(stage) : barriers.keys_full(stage);
      const int boxes = boxes_of(index);
      ptx::mbarrier_wait(values ? barriers.values_empty(stage) : barriers.keys_empty(stage), parity ^ 1);
      if (lane == 0) ptx::mbarrier_expect(full, static_cast<uint32_t>(boxes * kBoxKeys * kDim * 2));
      __syncwarp();
      if (lane < boxes * Layout::kBands) {
        const int key = first_key + index * Layout::kKeys;
        const int row =
            ((block * p.a.block_heads + tile.head) << p.a.block_shift) + (key & ((1 << p.a.block_shift) - 1));
        ptx::tensor_load_2d(to + stage * 2 * Layout::kTileBytes, map, band * 64, row, full, ptx::kEvictNormal);
      }
      __syncwarp();
      block = next_block;
    }
  }
}

// Weights of one tile's keys from its scores, in place. `scale` is what the sums so far must be multiplied by. limit:
// the last visible key of rows g and g + 8, counted from the lane's first column.
template <int kKeys>
__device__ __forceinline__ void softmax_tile(const AttentionParams& p, float (&s)[kKeys / 2], bool masked,
                                             const int (&limit)[2], float (&largest)[2], float (&sum)[2],
                                             float (&scale)[2]) {
  float factor = p.score_scale;
  if (p.soft_cap > 0.0f) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = p.soft_cap * tanh_fast(s[i] * p.score_scale);
    factor = 1.0f;
  }
  if (masked) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int h = i / 2 % 2, column = i / 4 * 8 + i % 2;
      if (column > limit[h] || column <= limit[h] - p.window) s[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = largest[h];
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) top = fmaxf(top, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
    top = quad_max(top);
    const float base = top == -INFINITY ? 0.0f : top * factor;
    scale[h] = exp2_fast(largest[h] * factor - base);
    largest[h] = top;
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& v = s[4 * i + 2 * h + j];
        v = exp2_fast(fmaf(v, factor, -base));
        total[j] += v;
      }
    }
    sum[h] = sum[h] * scale[h] + (total[0] + total[1]);
  }
}

constexpr int kRowsBarrier = 1;  // named barriers of prefill: 1, 2 one warpgroup; 3 both; 4, 5 turns

// Queries of a warpgroup's rows, zeros where there are none, in the swizzle that copies of keys have: under way, once
// all products with the ones before are done.
template <int kDim>
__device__ __forceinline__ void copy_prefill_queries(const AttentionParams& p, const PrefillTile& tile, int group_index,
                                                     int thread, int row0, uint32_t q_shared) {
  using Layout = PrefillLayout<kDim>;
  constexpr int kChunks = kDim / 8;

  ptx::named_barrier(kRowsBarrier + group_index, 128);
#pragma unroll 4
  for (int first = 0; first < Layout::kGroupRows * kChunks; first += 128) {  // (a bound that warps share)
    const int i = first + thread, row = i / kChunks, chunk = i % kChunks;
    const PackedRow packed(p, tile.first_row + min(row0 + row, tile.rows - 1));
    const uint16_t* from =
        p.q + int64_t{tile.token0 + packed.token} * p.q_stride + (tile.head * p.group + packed.head) * p.head_dim;
    const bool wanted = row0 + row < tile.rows && chunk * 8 < p.head_dim;
    ptx::copy_async_16(q_shared + chunk / 8 * (Layout::kGroupRows * 128) + row * 128 + ((chunk ^ row) & 7) * 16,
                       wanted ? from + chunk * 8 : from, wanted);
  }
}
// Until they are there.
__device__ __forceinline__ void wait_for_prefill_queries(int group_index) {
  ptx::copy_async_wait();
  ptx::fence_async_shared();
  ptx::named_barrier(kRowsBarrier + group_index, 128);
}

// Rows `row` and row + 8 of the tile.
template <int kDim, KvType kKv>
__device__ __forceinline__ void store_prefill_rows(const AttentionParams& p, const PrefillTile& tile, int first_row,
                                                   const float (&o)[kDim / 2], const float (&sum)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + h * 8;
    const float total = quad_sum(sum[h]);
    const float inverse = total > 0.0f ? p.value_scale / total : 0.0f;
    if (row >= tile.rows) continue;
    const PackedRow packed(p, tile.first_row + row);
    uint16_t* to =
        p.out + (int64_t{tile.token0 + packed.token} * p.heads + tile.head * p.group + packed.head) * p.head_dim;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const int column = i * 8 + lane % 4 * 2;
      if (column < p.head_dim) {
        *reinterpret_cast<uint32_t*>(to + column) =
            pack_pair<kKv>(o[4 * i + 2 * h] * inverse, o[4 * i + 2 * h + 1] * inverse);
      }
    }
  }
}

// Values behind the context are nobody's and may be no numbers: their weights are zero, but zero times that is not.
template <int kDim>
__device__ __forceinline__ void hide_values(uint32_t values, int hidden_from) {
  using Layout = PrefillLayout<kDim>;
  constexpr int kChunks = kDim / 8;
  for (int i = static_cast<int>(ptx::read_thread()) - 128; i < (Layout::kKeys - hidden_from) * kChunks; i += 256) {
    const int row = hidden_from + i / kChunks, chunk = i % kChunks;
    ptx::store_shared_16(values + chunk / 8 * Layout::kBandBytes + row * 128 + chunk % 8 * 16, make_uint4(0, 0, 0, 0));
  }
  ptx::fence_async_shared();
  ptx::named_barrier(3, 256);
}

template <int kDim, KvType kKv>
__device__ __forceinline__ void multiply_keys(uint32_t q_low, uint32_t keys,
                                              float (&s)[PrefillLayout<kDim>::kKeys / 2]) {
  using Layout = PrefillLayout<kDim>;
  const uint32_t low = ptx::descriptor_low(keys);
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    ptx::AttentionWgmma<Layout::kKeys, kKv == KvType::kBf16>::ss(
        s, ptx::descriptor_128b_from_low(q_low + (i / 4 * (Layout::kGroupRows * 128) + i % 4 * 32) / 16),
        ptx::descriptor_128b_from_low(low + (i / 4 * Layout::kBandBytes + i % 4 * 32) / 16), i == 0 ? 0 : 1);
  }
  ptx::wgmma_commit();
}

// Once the values are there.
template <int kDim, KvType kKv>
__device__ __forceinline__ void multiply_values(const uint32_t (&weights)[PrefillLayout<kDim>::kKeys / 16][4],
                                                uint32_t full, uint32_t parity, uint32_t values, float (&o)[kDim / 2]) {
  using Layout = PrefillLayout<kDim>;
  ptx::mbarrier_wait(full, parity);
  ptx::wgmma_fence();
  const uint64_t descriptor = values_descriptor(values, Layout::kBandBytes);
#pragma unroll
  for (int i = 0; i < Layout::kKeys / 16; ++i)
    ptx::AttentionWgmma<kDim, kKv == KvType::kBf16>::rs_n_major(o, weights[i], descriptor + i * (2048 / 16), 1);
  ptx::wgmma_commit();
}

// Weights of a tile's keys as the operand of the product with its values.
template <int kKeys, KvType kKv>
__device__ __forceinline__ void pack_weights(const float (&s)[kKeys / 2], uint32_t (&weights)[kKeys / 16][4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[i][j] = pack_pair<kKv>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
  }
}

// Positions of the queries that a warpgroup's rows of a tile have.
template <int kRows>
struct RowPositions {
  const AttentionParams& p;
  const PrefillTile& tile;
  int row0;  // of the tile
  int first = of(0), last = of(kRows - 1);

  __device__ __forceinline__ int of(int row) const {
    return tile.position0 + PackedRow(p, tile.first_row + min(row0 + row, tile.rows - 1)).token;
  }
};

// Weights of the keys from `key0` on, of which a row sees those up to its own position.
template <int kKeys, int kRows>
__device__ __forceinline__ void softmax_keys(const RowPositions<kRows>& positions, int key0, float (&s)[kKeys / 2],
                                             float (&largest)[2], float (&sum)[2], float (&scale)[2]) {
  const bool masked = key0 + kKeys - 1 > positions.first || key0 <= positions.last - positions.p.window;
  int limit[2] = {};
  if (masked) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int column0 = key0 + lane % 4 * 2;
    limit[0] = positions.of(row) - column0;
    limit[1] = positions.of(row + 8) - column0;
  }
  softmax_tile<kKeys>(positions.p, s, masked, limit, largest, sum, scale);
}

// One of the two warpgroups with 64 rows each.
template <int kDim, KvType kKv>
__device__ __forceinline__ void consume_prefill(const AttentionParams& p, PrefillTiles tiles, int group_index,
                                                uint32_t q_shared, uint32_t ring) {
  using Layout = PrefillLayout<kDim>;
  constexpr int kKeys = Layout::kKeys, kStages = Layout::kStages;
  const PrefillBarriers& barriers = tiles.barriers;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const auto arrive = [&](uint32_t barrier) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  if (group_index == 1) ptx::named_barrier_arrive(4, 256);  // the first turn is the other's

  const int row0 = group_index * Layout::kGroupRows;  // of a tile
  PrefillTile tile = tiles.read();
  if (tile.sequence < 0) return;
  copy_prefill_queries<kDim>(p, tile, group_index, thread, row0, q_shared);
  int use = 0;
#pragma unroll 1
  for (int done = 0;; ++done) {
    wait_for_prefill_queries(group_index);

    const RowPositions<Layout::kGroupRows> positions{p, tile, row0};
    float o[kDim / 2] = {}, s[kKeys / 2];
    uint32_t weights[kKeys / 16][4];
    float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, scale[2];

    const uint32_t q_low = ptx::descriptor_low(q_shared);
    const auto softmax = [&](int index) {
      softmax_keys<kKeys>(positions, tile.first_key + index * kKeys, s, largest, sum, scale);
    };
    const auto keys_of = [&](int n) { return ring + n % kStages * 2 * Layout::kTileBytes; };
    const auto parity_of = [&](int n) { return static_cast<uint32_t>(n / kStages % 2); };
    const auto wait_for_keys = [&](int n) { ptx::mbarrier_wait(barriers.keys_full(n % kStages), parity_of(n)); };

    int index = tile.key_tiles - 1;
    wait_for_keys(use);
    ptx::wgmma_fence();
    multiply_keys<kDim, kKv>(q_low, keys_of(use), s);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
    arrive(barriers.keys_empty(use % kStages));
    softmax(index);
    pack_weights<kKeys, kKv>(s, weights);
    const int hidden_from = tile.context - (tile.first_key + index * kKeys);
    if (hidden_from < kKeys) {
      ptx::mbarrier_wait(barriers.values_full(use % kStages), parity_of(use));
      hide_values<kDim>(keys_of(use) + Layout::kTileBytes, hidden_from);
    }

    if (index > 0) wait_for_keys(use + 1);
#pragma unroll 1
    for (; index > 0; --index, ++use) {
      const int ahead = use + 1;
      ptx::named_barrier(4 + group_index, 256);
      ptx::wgmma_fence();
      multiply_keys<kDim, kKv>(q_low, keys_of(ahead), s);
      multiply_values<kDim, kKv>(weights, barriers.values_full(use % kStages), parity_of(use),
                                 keys_of(use) + Layout::kTileBytes, o);
      ptx::named_barrier_arrive(4 + (group_index ^ 1), 256);
      ptx::wgmma_wait<1>();
      ptx::pin_registers(s);
      arrive(barriers.keys_empty(ahead % kStages));
      softmax(index - 1);
      // Waiting for the next keys here, and not above, keeps the compiler from moving the wait for the values' product
      // in front of the softmax, which is to run under it.
      if (index > 1) wait_for_keys(ahead + 1);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(o);
      arrive(barriers.values_empty(use % kStages));
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] *= scale[i / 2 % 2];
      pack_weights<kKeys, kKv>(s, weights);
    }
    multiply_values<kDim, kKv>(weights, barriers.values_full(use % kStages), parity_of(use),
                               keys_of(use) + Layout::kTileBytes, o);
    // The next tile's queries come while the last product runs.
    const PrefillTile& following = tiles.read();
    const bool more = following.sequence >= 0;
    if (more) copy_prefill_queries<kDim>(p, following, group_index, thread, row0, q_shared);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    arrive(barriers.values_empty(use % kStages));
    ++use;
    store_prefill_rows<kDim, kKv>(p, tile, row0 + warp * 16 + lane / 4, o, sum);
    tiles.leave(done);
    if (!more) return;
    tile = following;
  }
}

template <int kDim, KvType kKv>
__global__ __launch_bounds__(PrefillLayout<kDim, kKv>::kThreads,
                             1) void prefill_attention(const __grid_constant__ PrefillParams p) {
  using Layout = PrefillLayout<kDim, kKv>;
  constexpr int kProducers = is_e4m3(kKv) ? 4 : 2;  // warps, of a tile of keys or values
  extern __shared__ uint8_t shared[];
  __shared__ __align__(8) uint64_t barrier_words[PrefillBarriers::kCount];
  __shared__ PrefillTile places[PrefillTiles::kPlaces];
  static_assert(Layout::kStages == 2);
  static_assert(Layout::kSharedBytes + sizeof barrier_words + sizeof places <= 227 * 1024);  // what a block can have
  const PrefillBarriers barriers{ptx::shared_address(barrier_words)};
  const PrefillTiles tiles{places, barriers};
  const uint32_t q_shared =
      (ptx::shared_address(shared) + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
  const uint32_t ring = q_shared + 2 * Layout::kGroupQBytes;

  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      ptx::mbarrier_init(barriers.keys_full(stage), kProducers);
      ptx::mbarrier_init(barriers.values_full(stage), kProducers);
      ptx::mbarrier_init(barriers.keys_empty(stage), 8);  // warps
      ptx::mbarrier_init(barriers.values_empty(stage), 8);
    }
    for (int place = 0; place < PrefillTiles::kPlaces; ++place) {
      ptx::mbarrier_init(barriers.tile_full(place), 1);
      ptx::mbarrier_init(barriers.tile_empty(place), 8);
    }
    ptx::mbarrier_init_fence();
    if constexpr (!is_e4m3(kKv)) {
      ptx::prefetch_tensor_map(&p.keys);
      ptx::prefetch_tensor_map(&p.values);
    }
  }
  __syncthreads();
  ptx::dependency_wait();
  const int warpgroup = ptx::warp_uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Layout::kProducerRegisters>();
    if constexpr (is_e4m3(kKv)) {
      produce_prefill_e4m3<kDim>(p, tiles, ring, ring + 2 * Layout::kStages * Layout::kTileBytes);
    } else {
      produce_prefill<kDim>(p, tiles, ring);
    }
  } else {
    ptx::claim_registers<Layout::kConsumerRegisters>();
    consume_prefill<kDim, kKv>(p.a, tiles, warpgroup - 1, q_shared + (warpgroup - 1) * Layout::kGroupQBytes, ring);
  }
}

template <int kDim, KvType kKv>
AttentionKernel describe_prefill() {
  using Layout = PrefillLayout<kDim, kKv>;
  return {reinterpret_cast<const void*>(&prefill_attention<kDim, kKv>), Layout::kThreads,
          static_cast<size_t>(Layout::kSharedBytes)};
}

}  // namespace nfp::cuda
