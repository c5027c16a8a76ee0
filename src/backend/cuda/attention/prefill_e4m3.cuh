// Prefill over an E4M3 cache: the tiles of prefill.cuh, a thread block each, with mma.sync, whose operands can be made
// FP16 on their way from shared memory (FlashAttention-2's loop: Dao, 2023). Each warp has 16 of the rows.
#pragma once

#include "backend/cuda/attention/kv_tile.cuh"
#include "backend/cuda/attention/prefill_tile.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace nfp::cuda {

template <int kDim>
struct PrefillE4m3Layout {
  using Tile = KvTile<kDim, true>;
  static constexpr int kWarps = kPrefillRows / 16;
  static constexpr int kKeys = 64;  // of a tile
  static constexpr int kTileBytes = kKeys * Tile::kRowBytes;
  static constexpr int kSharedBytes = 4 * kTileBytes;  // two stages of keys and values
};

// Zeros in the columns that no copy writes.
template <int kDim>
__device__ __forceinline__ void clear_e4m3_unwritten(uint32_t stages) {
  using Layout = PrefillE4m3Layout<kDim>;
  for (int i = threadIdx.x; i < Layout::kSharedBytes / 16; i += Layout::kWarps * 32)
    ptx::store_shared_16(stages + i * 16, make_uint4(0, 0, 0, 0));
  __syncthreads();
}

// Copies of a tile's keys and values into a stage of shared memory, under way.
template <int kDim>
__device__ __forceinline__ void load_e4m3_tile(const AttentionParams& p, const PrefillTile& tile, const int32_t* table,
                                               int index, uint32_t stages) {
  using Layout = PrefillE4m3Layout<kDim>;
  using Tile = typename Layout::Tile;
  constexpr int kThreads = Layout::kWarps * 32, kKeys = Layout::kKeys;
  const int chunk = threadIdx.x % Tile::kChunks;
  const int key0 = tile.first_key + index * kKeys;
  const uint32_t to = stages + index % 2 * 2 * Layout::kTileBytes;
  if (chunk * Tile::kChunkColumns < p.head_dim) {
#pragma unroll
    for (int i = 0; i < kKeys * Tile::kChunks / kThreads; ++i) {
      const int row = static_cast<int>(threadIdx.x) / Tile::kChunks + i * (kThreads / Tile::kChunks);
      const bool wanted = key0 + row < tile.context;  // behind it may be anything, in the table too
      const int key = min(key0 + row, tile.context - 1);
      const int block = __ldg(table + (key >> p.block_shift));
      const int64_t from =
          (((int64_t{block} * p.kv_heads + tile.head) << p.block_shift) + (key & ((1 << p.block_shift) - 1))) *
              p.head_dim +
          chunk * 16;
      ptx::copy_async_16(to + Tile::byte(row, chunk), p.keys + from, wanted);
      ptx::copy_async_16(to + Layout::kTileBytes + Tile::byte(row, chunk), p.values + from, wanted);
    }
  }
  ptx::copy_async_commit();
}

// The queries of the warp's 16 rows, as operands of mma.sync.
template <int kDim>
__device__ __forceinline__ void load_e4m3_queries(const AttentionParams& p, const PrefillTile& tile, int warp, int lane,
                                                  uint32_t (&q)[kDim / 16][4]) {
  using Tile = typename PrefillE4m3Layout<kDim>::Tile;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    const int packed = tile.first_row + min(row, tile.rows - 1);
    const uint16_t* from = p.q + int64_t{tile.token0 + packed / p.group} * p.q_stride +
                           (tile.head * p.group + packed % p.group) * p.head_dim;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        q[i][half * 2 + h] =
            i * 16 < p.head_dim ? *reinterpret_cast<const uint32_t*>(from + Tile::query_column(i, half)) : 0;
      }
    }
  }
}

// The online softmax of a row's half: weights in place of the scores of one tile. What the sums so far must be
// multiplied by. No key beyond `limit` or out of the window is visible.
template <int kKeys>
__device__ __forceinline__ float weigh_e4m3_row(const AttentionParams& p, float (&s)[kKeys / 8][4], int h, int key0,
                                                int lane, int limit, bool all_visible, float& largest, float& sum) {
  float top = largest;
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& v = s[j][h * 2 + c];
      v = score(p, v);
      if (!all_visible) {
        const int at = key0 + j * 8 + lane % 4 * 2 + c;
        if (at > limit || at <= limit - p.window) v = -INFINITY;
      }
      top = fmaxf(top, v);
    }
  }
  top = quad_max(top);
  const float base = top == -INFINITY ? 0.0f : top;
  const float scale = exp2_fast(largest - base);
  largest = top;
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      s[j][h * 2 + c] = exp2_fast(s[j][h * 2 + c] - base);
      total += s[j][h * 2 + c];
    }
  }
  sum = sum * scale + total;
  return scale;
}

template <int kDim>
__device__ __forceinline__ void store_e4m3_rows(const AttentionParams& p, const PrefillTile& tile, int warp, int lane,
                                                const float (&o)[kDim / 8][4], const float (&sum)[2]) {
  using Tile = typename PrefillE4m3Layout<kDim>::Tile;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    const float total = quad_sum(sum[h]);
    const float inverse = total > 0.0f ? p.value_scale / total : 0.0f;
    if (row >= tile.rows) continue;
    const int packed = tile.first_row + row;
    uint16_t* to =
        p.out +
        (int64_t{tile.token0 + packed / p.group} * p.heads + tile.head * p.group + packed % p.group) * p.head_dim;
#pragma unroll
    for (int i = 0; i < kDim / 8; i += 2) {  // columns 4t to 4t + 3 of sixteen, in two accumulators
      const int column = Tile::output_column(i, 0);
      if (column < p.head_dim) {
        auto* pairs = reinterpret_cast<uint32_t*>(to + column);
        pairs[0] = pack_half2(o[i][h * 2] * inverse, o[i + 1][h * 2] * inverse);
        pairs[1] = pack_half2(o[i][h * 2 + 1] * inverse, o[i + 1][h * 2 + 1] * inverse);
      }
    }
  }
}

template <int kDim>
__global__ __launch_bounds__(kPrefillRows * 2) void prefill_attention_e4m3(const __grid_constant__ AttentionParams p) {
  using Layout = PrefillE4m3Layout<kDim>;
  using Tile = typename Layout::Tile;
  constexpr int kKeys = Layout::kKeys;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = ptx::shared_address(shared);

  ptx::launch_dependents();
  ptx::dependency_wait();
  const PrefillTile tile = find_prefill_tile<kKeys>(p, static_cast<int>(blockIdx.x));
  if (tile.sequence < 0) return;
  const auto position = [&](int row) { return tile.position0 + (tile.first_row + min(row, tile.rows - 1)) / p.group; };
  const int32_t* table = p.block_table + int64_t{tile.sequence} * p.table_width;
  if (p.head_dim < kDim) clear_e4m3_unwritten<kDim>(stages);
  load_e4m3_tile<kDim>(p, tile, table, 0, stages);

  uint32_t q[kDim / 16][4];
  load_e4m3_queries<kDim>(p, tile, warp, lane, q);
  const int limit[2] = {position(warp * 16 + lane / 4), position(warp * 16 + lane / 4 + 8)};
  const int warp_first = position(warp * 16), warp_last = position(warp * 16 + 15);
  float o[kDim / 8][4] = {};
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

#pragma unroll 1
  for (int index = 0; index < tile.key_tiles; ++index) {
    ptx::copy_async_wait_group<0>();
    __syncthreads();
    if (index + 1 < tile.key_tiles) load_e4m3_tile<kDim>(p, tile, table, index + 1, stages);
    const int key0 = tile.first_key + index * kKeys;
    if (key0 > warp_last || key0 + kKeys - 1 <= warp_first - p.window) continue;
    const uint32_t keys = stages + index % 2 * 2 * Layout::kTileBytes;
    const uint32_t values = keys + Layout::kTileBytes;
    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; i += 2) {
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[2][4];
        Tile::load_keys(keys + j * 16 * Tile::kRowBytes, i, b);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          ptx::mma_f16(s[2 * j], q[i + step], b[step][0], b[step][1]);
          ptx::mma_f16(s[2 * j + 1], q[i + step], b[step][2], b[step][3]);
        }
      }
    }

    const bool all_visible = key0 + kKeys - 1 <= warp_first && key0 > warp_last - p.window;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = weigh_e4m3_row<kKeys>(p, s, h, key0, lane, limit[h], all_visible, largest[h], sum[h]);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        o[i][h * 2] *= scale;
        o[i][h * 2 + 1] *= scale;
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const uint32_t a[4] = {pack_half2(s[2 * j][0], s[2 * j][1]), pack_half2(s[2 * j][2], s[2 * j][3]),
                             pack_half2(s[2 * j + 1][0], s[2 * j + 1][1]),
                             pack_half2(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int i = 0; i < kDim / 16; i += 2) {
        uint32_t b[2][4];
        Tile::load_values(values + j * 16 * Tile::kRowBytes, i, b);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          ptx::mma_f16(o[2 * (i + step)], a, b[step][0], b[step][1]);
          ptx::mma_f16(o[2 * (i + step) + 1], a, b[step][2], b[step][3]);
        }
      }
    }
  }
  store_e4m3_rows<kDim>(p, tile, warp, lane, o, sum);
}

template <int kDim>
AttentionKernel describe_prefill_e4m3() {
  return {reinterpret_cast<const void*>(&prefill_attention_e4m3<kDim>), PrefillE4m3Layout<kDim>::kWarps * 32,
          static_cast<size_t>(PrefillE4m3Layout<kDim>::kSharedBytes)};
}

}  // namespace nfp::cuda
