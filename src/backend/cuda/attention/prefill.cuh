// Attention of sequences with any number of query tokens: a thread block has a tile of 128 query rows of one sequence
// and one KV head, a row being one token and one of the heads of the group, and goes over the keys that its rows see
// (FlashAttention-2's loop: Dao, 2023). Each warp has 16 of the rows.
//
// The grid has a block for every tile that the batch can have; block i takes the i-th tile from the end, found from
// query_start, since the late tiles of a sequence see the most keys.
#pragma once

#include <climits>

#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nfp::cuda {

struct PrefillTile {
  int sequence;
  int first_row;  // of the sequence's query_tokens * group
};

// Tile `index` of the batch, found by every warp for itself (sequences in lanes, in runs); sequence -1 if there are
// fewer.
template <int kRowsOfTile>
__device__ __forceinline__ PrefillTile find_prefill_tile(const AttentionParams& p, int index) {
  const int lane = threadIdx.x % 32;
  const int run = (p.sequences + 31) / 32;
  const int first = min(lane * run, p.sequences), last = min(first + run, p.sequences);
  const auto tiles_of = [&](int s) {
    return ((p.query_start[s + 1] - p.query_start[s]) * p.group + kRowsOfTile - 1) / kRowsOfTile;
  };
  int tiles = 0;
#pragma unroll 4
  for (int s = first; s < last; ++s) tiles += tiles_of(s);
  int before = tiles;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, offset);
    if (lane >= offset) before += other;
  }
  index = __shfl_sync(0xffffffffu, before, 31) - 1 - index;
  if (index < 0) return {-1, 0};
  before -= tiles;
  const uint32_t holders = __ballot_sync(0xffffffffu, before <= index && index < before + tiles);
  const int holder = __ffs(static_cast<int>(holders)) - 1;
  int sequence = __shfl_sync(0xffffffffu, first, holder);
  index -= __shfl_sync(0xffffffffu, before, holder);
  for (; index >= tiles_of(sequence); ++sequence) index -= tiles_of(sequence);
  return {sequence, index * kRowsOfTile};
}

template <int kDim>
struct PrefillLayout {
  static constexpr int kWarps = kPrefillRows / 16;
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;  // of a tile
  static constexpr int kQBytes = kPrefillRows * kDim * 2;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kSharedBytes = kQBytes + 4 * kTileBytes;  // two stages of keys and values
  static constexpr bool kQInRegisters = kDim <= 128;
};

template <int kDim>
__global__ __launch_bounds__(kPrefillRows * 2) void prefill_attention(const __grid_constant__ AttentionParams p) {
  using Layout = PrefillLayout<kDim>;
  constexpr int kThreads = Layout::kWarps * 32, kChunks = kDim / 8, kKeys = Layout::kKeys;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t q_shared = ptx::shared_address(shared), stages = q_shared + Layout::kQBytes;

  ptx::launch_dependents();
  ptx::dependency_wait();
  const int head = static_cast<int>(blockIdx.x) % p.kv_heads;
  const PrefillTile tile = find_prefill_tile<kPrefillRows>(p, static_cast<int>(blockIdx.x) / p.kv_heads);
  if (tile.sequence < 0) return;
  const int token0 = p.query_start[tile.sequence];
  const int tokens = p.query_start[tile.sequence + 1] - token0;
  const int rows = min(kPrefillRows, tokens * p.group - tile.first_row);
  const int position0 = p.context[tile.sequence] - tokens;  // of the sequence's first query
  const auto position = [&](int row) { return position0 + (tile.first_row + min(row, rows - 1)) / p.group; };
  const int32_t* table = p.block_table + int64_t{tile.sequence} * p.table_width;

  // Queries, zeros where there are none.
  for (int i = threadIdx.x; i < kPrefillRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int packed = tile.first_row + min(row, rows - 1);
    const uint16_t* from =
        p.q + int64_t{token0 + packed / p.group} * p.q_stride + (head * p.group + packed % p.group) * p.head_dim;
    const bool wanted = row < rows && chunk * 8 < p.head_dim;
    ptx::copy_async_16(q_shared + tile_byte<kDim>(row, chunk), wanted ? from + chunk * 8 : from, wanted);
  }
  ptx::copy_async_commit();
  if (p.head_dim < kDim) {
    for (int i = threadIdx.x; i < 4 * Layout::kTileBytes / 16; i += kThreads)
      ptx::store_shared_16(stages + i * 16, make_uint4(0, 0, 0, 0));
    __syncthreads();
  }

  const int last_position = position(rows - 1);
  const int first_key = max(0, position(0) - p.window + 1) / kKeys * kKeys;
  const int key_tiles = (last_position - first_key) / kKeys + 1;
  const auto load = [&](int index, int stage) {
    const int chunk = threadIdx.x % kChunks;
    const int key0 = first_key + index * kKeys;
    const uint32_t to = stages + stage * 2 * Layout::kTileBytes;
    if (chunk * 8 < p.head_dim) {
#pragma unroll
      for (int i = 0; i < kKeys * kChunks / kThreads; ++i) {
        const int row = threadIdx.x / kChunks + i * (kThreads / kChunks);
        const int key = key0 + row;
        const bool wanted = key <= last_position;
        // Entries behind the context may be anything.
        const int block = __ldg(table + (min(key, last_position) >> p.block_shift));
        const int64_t from =
            (((int64_t{block} * p.kv_heads + head) << p.block_shift) + (key & ((1 << p.block_shift) - 1))) *
                p.head_dim +
            chunk * 8;
        ptx::copy_async_16(to + tile_byte<kDim>(row, chunk), p.keys + from, wanted);
        ptx::copy_async_16(to + Layout::kTileBytes + tile_byte<kDim>(row, chunk), p.values + from, wanted);
      }
    }
    ptx::copy_async_commit();
  };
  load(0, 0);

  uint32_t q[Layout::kQInRegisters ? kDim / 16 : 1][4];
  const auto load_q = [&](int i, uint32_t(&a)[4]) {
    ptx::load_matrix_x4(q_shared + tile_byte<kDim>(warp * 16 + lane % 16, i * 2 + lane / 16), a);
  };
  if constexpr (Layout::kQInRegisters) {
    ptx::copy_async_wait_group<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) load_q(i, q[i]);
  }
  // Of this lane's two rows, g and g + 8 of the warp's.
  const int limit[2] = {position(warp * 16 + lane / 4), position(warp * 16 + lane / 4 + 8)};
  const int warp_first = position(warp * 16), warp_last = position(warp * 16 + 15);
  float o[kDim / 8][4] = {};
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

#pragma unroll 1
  for (int index = 0; index < key_tiles; ++index) {
    ptx::copy_async_wait_group<0>();
    __syncthreads();
    if (index + 1 < key_tiles) load(index + 1, (index + 1) % 2);
    const int key0 = first_key + index * kKeys;
    if (key0 > warp_last || key0 + kKeys - 1 <= warp_first - p.window) continue;
    const uint32_t keys = stages + index % 2 * 2 * Layout::kTileBytes;
    const uint32_t values = keys + Layout::kTileBytes;

    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t a[4];
      if constexpr (Layout::kQInRegisters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = q[i][j];
      } else {
        load_q(i, a);
      }
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];
        ptx::load_matrix_x4(keys + tile_byte<kDim>(j * 16 + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2), b);
        ptx::mma_f16(s[2 * j], a, b[0], b[1]);
        ptx::mma_f16(s[2 * j + 1], a, b[2], b[3]);
      }
    }

    const bool all_visible = key0 + kKeys - 1 <= warp_first && key0 > warp_last - p.window;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& v = s[j][h * 2 + c];
          v = score(p, v);
          if (!all_visible) {
            const int key = key0 + j * 8 + lane % 4 * 2 + c;
            if (key > limit[h] || key <= limit[h] - p.window) v = -INFINITY;
          }
          top = fmaxf(top, v);
        }
      }
      top = fmaxf(largest[h], quad_max(top));
      const float base = top == -INFINITY ? 0.0f : top;
      const float scale = exp2_fast(largest[h] - base);
      const bool rescale = top != largest[h];
      largest[h] = top;
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[j][h * 2 + c] = exp2_fast(s[j][h * 2 + c] - base);
          total += s[j][h * 2 + c];
        }
      }
      sum[h] = sum[h] * scale + total;
      if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          o[i][h * 2] *= scale;
          o[i][h * 2 + 1] *= scale;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const uint32_t a[4] = {pack_half2(s[2 * j][0], s[2 * j][1]), pack_half2(s[2 * j][2], s[2 * j][3]),
                             pack_half2(s[2 * j + 1][0], s[2 * j + 1][1]),
                             pack_half2(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        uint32_t b[4];
        ptx::load_matrix_x4_trans(values + tile_byte<kDim>(j * 16 + lane / 8 % 2 * 8 + lane % 8, i * 2 + lane / 16), b);
        ptx::mma_f16(o[2 * i], a, b[0], b[1]);
        ptx::mma_f16(o[2 * i + 1], a, b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + h * 8;
    const float total = quad_sum(sum[h]);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    if (row >= rows) continue;
    const int packed = tile.first_row + row;
    uint16_t* to =
        p.out + (int64_t{token0 + packed / p.group} * p.heads + head * p.group + packed % p.group) * p.head_dim;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const int column = i * 8 + lane % 4 * 2;
      if (column < p.head_dim)
        *reinterpret_cast<uint32_t*>(to + column) = pack_half2(o[i][h * 2] * inverse, o[i][h * 2 + 1] * inverse);
    }
  }
}

template <int kDim>
AttentionKernel describe_prefill() {
  return {reinterpret_cast<const void*>(&prefill_attention<kDim>), PrefillLayout<kDim>::kWarps * 32,
          static_cast<size_t>(PrefillLayout<kDim>::kSharedBytes)};
}

}  // namespace nfp::cuda
