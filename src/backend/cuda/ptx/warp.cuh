// What the lanes of a warp find together.
#pragma once

#include <cstdint>

namespace nfp::cuda {

// Sum over this lane and those before it. By a whole warp.
template <typename T>
__device__ __forceinline__ T warp_scan(T v, uint32_t lane) {
#pragma unroll
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, v, offset);
    if (lane >= offset) v += other;
  }
  return v;
}

}  // namespace nfp::cuda
