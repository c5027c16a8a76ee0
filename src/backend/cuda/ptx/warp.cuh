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

namespace ptx {

// threadIdx.x, but not kept in registers from its last use to this one.
__device__ __forceinline__ uint32_t read_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// What every lane of a warp has, so that the compiler knows it too. Loops whose bounds are known to be a warp's, and at
// whose ends the warp is known to be together again (__syncwarp), keep addresses and descriptors in uniform registers;
// elsewhere each descriptor of a product goes through ordinary ones (R2UR), which holds the product up
// (docs/kernels.md, "Uniform registers").
template <typename T>
__device__ __forceinline__ T warp_uniform(T v) {
  return __shfl_sync(0xffffffffu, v, 0);
}

}  // namespace ptx
}  // namespace nfp::cuda
