// A router's FP32 weights for tensor cores.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace nfp::cuda {

inline constexpr float kRouteRestScale = 2048.0f;

// Two weights as two FP16 numbers each: the nearest, and 2^11 times what is left, which leave 2^-22 of it.
struct SplitPair {
  uint32_t most, rest;
};
__device__ __forceinline__ SplitPair split(float first, float second) {
  const __half2 most = __floats2half2_rn(first, second);
  const float2 back = __half22float2(most);
  const __half2 rest = __floats2half2_rn((first - back.x) * kRouteRestScale, (second - back.y) * kRouteRestScale);
  return {reinterpret_cast<const uint32_t&>(most), reinterpret_cast<const uint32_t&>(rest)};
}

}  // namespace nfp::cuda
