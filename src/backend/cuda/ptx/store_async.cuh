// Stores into the shared memory of another block of the cluster, whose mbarrier counts their bytes (PTX ISA 9.0:
// "st.async"): who waits for that sees them. Unlike a cluster barrier that orders plain stores, this needs no fence
// (barrier.cluster.arrive.release becomes MEMBAR.ALL.GPU).
#pragma once

#include <cstdint>

namespace nfp::cuda::ptx {

__device__ __forceinline__ void store_async_8(uint32_t remote, uint32_t remote_bar, uint64_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote), "l"(value),
               "r"(remote_bar)
               : "memory");
}
__device__ __forceinline__ void store_async_16(uint32_t remote, uint32_t remote_bar, uint64_t a, uint64_t b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(remote),
               "l"(a), "l"(b), "r"(remote_bar)
               : "memory");
}
__device__ __forceinline__ void store_async_16(uint32_t remote, uint32_t remote_bar, float a, float b, float c,
                                               float d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(remote_bar)
      : "memory");
}

}  // namespace nfp::cuda::ptx
