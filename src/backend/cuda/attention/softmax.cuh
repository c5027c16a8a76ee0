// What the attention kernels share: scores from products, exponentials, sums over a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/attention/attention_kernel.h"

namespace nfp::cuda {

__device__ __forceinline__ float exp2_fast(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

// tanh by way of exp: tanh.approx is good to 11 bits only, and a cap multiplies its error by up to 50 into an exponent.
__device__ __forceinline__ float tanh_fast(float v) {
  const float e = exp2_fast(fabsf(v) * (2.0f * 1.44269504f));
  return copysignf(1.0f - __fdividef(2.0f, e + 1.0f), v);
}

__device__ __forceinline__ float score(const AttentionParams& p, float product) {
  const float v = product * p.score_scale;
  return p.soft_cap > 0.0f ? p.soft_cap * tanh_fast(v) : v;
}

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// As FP16 or, of a BF16 cache's attention, BF16.
template <KvType kKv>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (kKv == KvType::kBf16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    return pack_half2(low, high);
  }
}

// Over the four lanes that share a fragment's row.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Over the eight lanes that share a fragment's column.
__device__ __forceinline__ float column_max(float v) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}
__device__ __forceinline__ float column_sum(float v) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

}  // namespace nfp::cuda
