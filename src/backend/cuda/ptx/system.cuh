// Memory that other GPUs write to, or that is theirs (PTX ISA 9.0: "ld", "st", .relaxed.sys): each 32-bit word is
// whole, old or new, and in no order with others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nfp::cuda::ptx {

__device__ __forceinline__ uint4 load_system_16(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_system_16(void* to, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace nfp::cuda::ptx
