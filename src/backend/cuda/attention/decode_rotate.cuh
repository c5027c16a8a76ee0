// Rotation inside the decode kernels (AttentionCall::Rotation): a row's queries turn in registers, and its new key and
// value go to the cache and to the tile that is being filled by one warp, the one that loads the row's last tile.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backend/cuda/attention/decode_walk.cuh"
#include "backend/cuda/attention/kv_tile.cuh"
#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace nfp::cuda {

__device__ __forceinline__ float2 unpack_half2(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ __forceinline__ void scale_pair(float2& v, float factor, const float* weight) {
  const float2 w = *reinterpret_cast<const float2*>(weight);
  v.x *= factor * w.x;
  v.y *= factor * w.y;
}
// Features i and i + kDim / 2, two of each.
__device__ __forceinline__ void rotate_pairs(float2& a, float2& b, float2 cosine, float2 sine) {
  const float2 first = make_float2(a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y);
  b = make_float2(b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y);
  a = first;
}

// The table's row for a sequence's new token, asked for before it is needed.
template <int kDim>
__device__ __forceinline__ void prefetch_rotation(const DecodeParams& p, int context) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  if (lane * 32 >= kDim || context <= 0) return;
  ptx::prefetch_l1(p.rotation.cos_sin + int64_t{context - 1} * kDim + lane * 32);
}

// The queries of a row, as DecodeState has them. All lanes take part. An infinite query may hide all keys from itself,
// and then its output is zeros: so queries are looked at as keys and values are, but for what pads a step (context 0).
template <int kDim, int kHalves, KvType kKv>
__device__ __forceinline__ void rotate_queries(const DecodeParams& p, int context,
                                               uint32_t (&q)[kDim / 16][2 * kHalves]) {
  constexpr int kHalfSteps = kDim / 32;
  const DecodeRotation& r = p.rotation;
  const float* const table = r.cos_sin + int64_t{max(0, context - 1)} * kDim;
  const __half2 zero = __float2half2_rn(0.0f);
  __half2 times_zero = zero;  // no number where any is infinite or no number
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    float factor = 1.0f;
    if (r.q_norm != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 v = unpack_half2(q[i][half * kHalves + h]);
          sum += v.x * v.x + v.y * v.y;
        }
      }
      factor = rsqrtf(quad_sum(sum) / kDim + r.norm_eps);
    }
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t& first = q[i][half * kHalves + h];
        uint32_t& second = q[i + kHalfSteps][half * kHalves + h];
        const int column = KvTile<kDim, kKv>::query_column(i, half);
        float2 a = unpack_half2(first), b = unpack_half2(second);
        if (r.q_norm != nullptr) {
          scale_pair(a, factor, r.q_norm + column);
          scale_pair(b, factor, r.q_norm + kDim / 2 + column);
        }
        rotate_pairs(a, b, *reinterpret_cast<const float2*>(table + column),
                     *reinterpret_cast<const float2*>(table + kDim / 2 + column));
        first = pack_half2(a.x, a.y);
        second = pack_half2(b.x, b.y);
        times_zero = __hfma2(*reinterpret_cast<const __half2*>(&first), zero, times_zero);
        times_zero = __hfma2(*reinterpret_cast<const __half2*>(&second), zero, times_zero);
      }
    }
  }
  const float2 zeros = __half22float2(times_zero);
  if (zeros.x + zeros.y != 0.0f && context > 0 && r.overflowed_layer != nullptr) *r.overflowed_layer = r.layer;
}

// Columns `column` and the next of the new token, as the cache holds them, to the cache and to its row of a tile.
template <int kDim, KvType kKv>
__device__ __forceinline__ void append_pair(uint8_t* cache, uint32_t tile, int row, int column, float2 v,
                                            bool& overflows) {
  using Tile = KvTile<kDim, kKv>;
  const uint32_t to = tile + Tile::byte(row, column / Tile::kChunkColumns);
  if constexpr (is_e4m3(kKv)) {  // as step/rope.cu: beyond 448 becomes 448
    overflows |= !isfinite(v.x) || !isfinite(v.y);
    const uint16_t codes = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3);
    *reinterpret_cast<uint16_t*>(cache + column) = codes;
    ptx::store_shared_2(to + column % Tile::kChunkColumns, codes);
  } else {
    const uint32_t halves = pack_half2(v.x, v.y);
    overflows |= __vcmpeq2(halves & 0x7c007c00u, 0x7c007c00u) != 0;
    *reinterpret_cast<uint32_t*>(cache + column * 2) = halves;
    ptx::store_shared_4(to + column % Tile::kChunkColumns * 2, halves);
  }
}

// Where a row's new token is: among the queries, its KV head, the context that it ends, and the cache block.
struct NewRow {
  int token, head, context, block;
};

// A row's new key and value as the product left them, a few columns a lane: fetched when a warp comes to the row, used
// when it comes to the row's last tile.
template <int kDim, KvType kKv>
struct NewToken {
  using Tile = KvTile<kDim, kKv>;
  static constexpr int kPairs = kDim / 4;  // of a half
  static constexpr int kEach = (kPairs + 31) / 32;
  uint32_t k[2][kEach], v[2][kEach];  // of the lower and the upper half

  static __device__ __forceinline__ int column(int i) { return (static_cast<int>(threadIdx.x) % 32 + 32 * i) * 2; }

  __device__ __forceinline__ void fetch(const DecodeParams& p, int token, int head) {
    const uint16_t* const key = p.a.q + int64_t{token} * p.a.q_stride + (p.a.heads + head) * kDim;
    const uint16_t* const value = key + p.a.kv_heads * kDim;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = column(i) < kDim / 2;
        const int at = column(i) + half * kDim / 2;
        k[half][i] = there ? *reinterpret_cast<const uint32_t*>(key + at) : 0;
        v[half][i] = there ? *reinterpret_cast<const uint32_t*>(value + at) : 0;
      }
    }
  }

  // To the cache, and to `stage`, which its tile is being loaded into. All lanes of a warp.
  __device__ __forceinline__ void append(const DecodeParams& p, const NewRow& to, uint32_t stage) const {
    const DecodeRotation& r = p.rotation;
    const int position = to.context - 1;
    const float* const table = r.cos_sin + int64_t{position} * kDim;
    const int64_t place = (((int64_t{to.block} * p.a.block_heads + to.head) << p.a.block_shift) +
                           (position & ((1 << p.a.block_shift) - 1))) *
                          Tile::kRowBytes;
    float factor = 1.0f;
    if (r.k_norm != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float2 a = unpack_half2(k[0][i]), b = unpack_half2(k[1][i]);
        sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      factor = rsqrtf(sum / kDim + r.norm_eps);
    }
    const int row = position % kDecodeTile;
    const uint32_t value_tile = stage + kDecodeTile * Tile::kRowBytes;
    bool overflows = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int low = column(i), high = low + kDim / 2;
      if (low >= kDim / 2) continue;
      float2 a = unpack_half2(k[0][i]), b = unpack_half2(k[1][i]);
      if (r.k_norm != nullptr) {
        scale_pair(a, factor, r.k_norm + low);
        scale_pair(b, factor, r.k_norm + high);
      }
      rotate_pairs(a, b, *reinterpret_cast<const float2*>(table + low), *reinterpret_cast<const float2*>(table + high));
      append_pair<kDim, kKv>(r.keys + place, stage, row, low, a, overflows);
      append_pair<kDim, kKv>(r.keys + place, stage, row, high, b, overflows);
      append_pair<kDim, kKv>(r.values + place, value_tile, row, low, unpack_half2(v[0][i]), overflows);
      append_pair<kDim, kKv>(r.values + place, value_tile, row, high, unpack_half2(v[1][i]), overflows);
    }
    if (overflows && r.overflowed_layer != nullptr) *r.overflowed_layer = r.layer;
  }
};

}  // namespace nfp::cuda
