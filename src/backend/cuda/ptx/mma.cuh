// Warp matrix instructions with operands in registers, their loads from shared memory, and 16-byte background copies
// (PTX ISA 9.0: "mma.sync.aligned.m16n8k16", "ldmatrix", "movmatrix", "cp.async").
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/l2_policy.cuh"

namespace nfp::cuda::ptx {

// d[16, 8] += a[16, 16] * b[16, 8], FP16 into FP32. With g = lane / 4 and t = lane % 4:
//   d[0..1] row g, columns 2t, 2t+1        d[2..3] row g + 8
//   a[0] row g, k = 2t, 2t+1   a[1] row g + 8   a[2] row g, k + 8   a[3] row g + 8, k + 8
//   b0 k = 2t, 2t+1 of column g            b1 k + 8
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// mma_f16 of BF16 numbers.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8 and gets, of each matrix,
// elements 2t and 2t+1 of row g; transposed, elements g of rows 2t and 2t+1.
__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// An 8x8 matrix of 16-bit elements of which each lane has elements 2t and 2t+1 of row g, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t r) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(r));
  return r;
}

// 16 bytes of global memory to shared memory, past the L1; zeros instead unless `wanted`.
__device__ __forceinline__ void copy_async_16(uint32_t dst, const void* src, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// The same of memory that is read once: the L2 lets go of it first.
__device__ __forceinline__ void copy_async_16_once(uint32_t dst, const void* src, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
               "r"(wanted ? 16 : 0), "l"(kEvictFirst)
               : "memory");
}
__device__ __forceinline__ void copy_async_16_once(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(kEvictFirst)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace nfp::cuda::ptx
