// Two 16-bit numbers in a register, FP16 or BF16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace nfp::cuda {

__device__ __forceinline__ uint32_t pack_pair(float a, float b, bool bf16) {
  if (bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack_pair(uint32_t bits, bool bf16) {
  return bf16 ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits))
              : __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
// FP16 to BF16: exact for FP16 weights that are BF16 numbers, and for E4M3 ones.
__device__ __forceinline__ uint32_t to_bf16_pair(uint32_t f16) {
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&f16));
  const __nv_bfloat162 out = __float22bfloat162_rn(wide);
  return *reinterpret_cast<const uint32_t*>(&out);
}

}  // namespace nfp::cuda
