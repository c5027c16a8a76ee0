#include <cuda_fp16.h>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/step/step_kernels.h"

namespace nfp::cuda {
namespace {

__device__ __forceinline__ uint32_t scaled_pair(uint16_t a, uint16_t b, float scale) {
  const __half low = __float2half_rn(__half2float(__ushort_as_half(a)) * scale);
  const __half high = __float2half_rn(__half2float(__ushort_as_half(b)) * scale);
  return __half_as_ushort(low) | static_cast<uint32_t>(__half_as_ushort(high)) << 16;
}
__device__ __forceinline__ uint32_t pick(const uint32_t (&v)[4], uint32_t index) {
  return index == 0 ? v[0] : index == 1 ? v[1] : index == 2 ? v[2] : v[3];
}

// Four lanes have the four 16-byte chunks of a group of 64 numbers: lane c the pairs {2c, 2c + 1} and {2c + 8, 2c + 9}
// of each 16 (layout.h). They exchange them so that lane c stores numbers 16c .. 16c + 15.
__device__ __forceinline__ void embed_group(const uint32_t (&upper)[4], const uint32_t (&lower)[4], Join join,
                                            float scale, uint32_t c, uint4 (&out)[2]) {
  uint32_t pairs[2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto bits = [&](int i) {
        const auto u = static_cast<uint8_t>(upper[j] >> (8 * (2 * h + i)));
        const auto l = static_cast<uint8_t>(lower[j] >> (8 * (2 * h + i)));
        return join == Join::kBiased ? join_fp16(Join::kBiased, u, l) : join_fp16(Join::kFree, u, l);
      };
      pairs[h][j] = scaled_pair(bits(0), bits(1), scale);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t mine[4];
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const uint32_t from = c ^ s;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, pick(pairs[h], from), s);
#pragma unroll
      for (uint32_t q = 0; q < 4; ++q) mine[q] = from == q ? got : mine[q];
    }
    out[h] = make_uint4(mine[0], mine[1], mine[2], mine[3]);
  }
}

__device__ __forceinline__ int64_t token_of(const TokenSource& tokens, int64_t row) {
  const int32_t source = tokens.source != nullptr ? tokens.source[row] : -1;
  return source < 0 ? tokens.ids[row] : tokens.previous[source].token;
}

// Eight FP16 numbers from `k` on of a row, times scale where they are widened (else they are already).
template <bool kF32>
__device__ __forceinline__ void store_eight(void* row, int k, const uint4& v, float scale) {
  if constexpr (kF32) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float wide[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      wide[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)))) * scale;
    }
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(row) + k);
    to[0] = make_float4(wide[0], wide[1], wide[2], wide[3]);
    to[1] = make_float4(wide[4], wide[5], wide[6], wide[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(row) + k) = v;
  }
}

// A thread block a row.
template <bool kNested, bool kF32>
__global__ __launch_bounds__(kEmbedThreads) void embed_kernel(const EmbedParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t row = blockIdx.x;
  const int64_t token = token_of(p.tokens, row);
  const int hidden = static_cast<int>(p.table.hidden);
  char* out = static_cast<char*>(p.out) + row * hidden * (kF32 ? 4 : 2);
  const float factor = p.scale * (p.table.row_scale != nullptr ? p.table.row_scale[token] : 1.0f);
  const float scale = kF32 ? 1.0f : factor;  // of what is rounded to FP16
  if constexpr (kNested) {
    const auto r = static_cast<uint32_t>(token % kBlockRows);
    const int64_t base = token / kBlockRows * p.slab_bytes + r * kBlockK;
    const int chunks = (hidden + kBlockK - 1) / kBlockK * 4;
    const int chunks_of_warps = (chunks + 31) / 32 * 32;  // the lanes of a warp stay together for the exchange
    for (int i = threadIdx.x; i < chunks_of_warps; i += blockDim.x) {
      const auto c = static_cast<uint32_t>(i % 4);
      const int64_t at = base + int64_t{i / 4} * kBlockBytes + (c ^ ((r / 2) % 4)) * 16;
      uint4 u = make_uint4(0, 0, 0, 0), l = u;
      if (i < chunks) {
        u = *reinterpret_cast<const uint4*>(p.table.upper + at);
        l = *reinterpret_cast<const uint4*>(p.table.lower + at);
      }
      uint4 v[2];
      embed_group({u.x, u.y, u.z, u.w}, {l.x, l.y, l.z, l.w}, p.table.join, scale, c, v);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = i * 16 + h * 8;
        if (k < hidden) store_eight<kF32>(out, k, v[h], factor);
      }
    }
  } else {
    const uint16_t* in = p.table.dense + token * hidden;
    for (int k = static_cast<int>(threadIdx.x) * 8; k < hidden; k += static_cast<int>(blockDim.x) * 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(in + k);
      uint32_t words[4] = {v.x, v.y, v.z, v.w};
      if constexpr (!kF32) {
#pragma unroll
        for (uint32_t& word : words)
          word = scaled_pair(static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16), scale);
      }
      store_eight<kF32>(out, k, make_uint4(words[0], words[1], words[2], words[3]), factor);
    }
  }
}

}  // namespace

const void* embed_function(bool nested, bool out_is_f32) {
  if (out_is_f32) {
    return nested ? reinterpret_cast<const void*>(&embed_kernel<true, true>)
                  : reinterpret_cast<const void*>(&embed_kernel<false, true>);
  }
  return nested ? reinterpret_cast<const void*>(&embed_kernel<true, false>)
                : reinterpret_cast<const void*>(&embed_kernel<false, false>);
}

}  // namespace nfp::cuda
