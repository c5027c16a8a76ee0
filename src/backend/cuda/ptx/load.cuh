// Loads of a loop that are on their way at the same time (PTX ISA 9.0: "ld"). The compiler may put its own ones one
// behind the other where that saves registers. (Both it and the assembler move loads of constant memory behind a wait
// for the kernel before: what is to be asked for earlier is copied to shared memory, see copy.cuh.) Zeros where not
// `wanted`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nfp::cuda::ptx {

__device__ __forceinline__ uint2 load_8(const void* from, bool wanted) {
  uint2 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_16(const void* from, bool wanted) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}

}  // namespace nfp::cuda::ptx
