// Reading another thread block's shared memory (PTX ISA 9.0: "ld", state space shared::cluster).
#pragma once

#include <cstdint>

namespace nfp::cuda::ptx {

// From an address of map_to_rank(). Volatile: never moved above the barrier that orders it.
__device__ __forceinline__ float2 load_cluster_8(uint32_t remote) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(remote) : "memory");
  return v;
}

}  // namespace nfp::cuda::ptx
