// Tiles of keys and values in shared memory as operands of mma.sync, for both cache types.
//
// E4M3 numbers become FP16 between shared memory and the mma, exactly. ldmatrix moves pairs of bytes where it moves one
// FP16 number, which leaves a lane with other columns than the mma wants; so the columns are renamed, of the queries
// and of the output: see query_column and value_column.
#pragma once

#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nfp::cuda {

// Four E4M3 codes as FP16: the lower two and the upper two.
__device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t& lower, uint32_t& upper) {
  asm volatile(
      "{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(lower), "=r"(upper)
      : "r"(codes));
}

// d += a b of a cache's 16-bit numbers: ptx/mma.cuh.
template <KvType kKv>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kKv == KvType::kBf16) {
    ptx::mma_bf16(d, a, b0, b1);
  } else {
    ptx::mma_f16(d, a, b0, b1);
  }
}

template <int kDim, KvType kKv>
struct KvTile {
  static constexpr int kRowBytes = kDim * (is_e4m3(kKv) ? 1 : 2);
  static constexpr int kChunks = kRowBytes / 16;               // of a row
  static constexpr int kChunkColumns = is_e4m3(kKv) ? 16 : 8;  // of a chunk

  // Of 16-byte chunk `chunk` of row `row`: the eight rows that one ldmatrix reads lie in different banks.
  static __device__ __forceinline__ uint32_t byte(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes) + (static_cast<uint32_t>(chunk) ^ swizzle(row)) * 16;
  }
  static __device__ __forceinline__ constexpr uint32_t swizzle(int row) {
    return kRowBytes >= 128 ? row & 7 : row / 2 & 3;
  }

  // Steps of 16 columns that are loaded at once: two, but where registers are few.
  static constexpr int kSteps = kDim == 256 && !is_e4m3(kKv) ? 1 : 2;

  // The address that this lane gives to ldmatrix for the codes of step `step`, which is even, and of the next.
  static __device__ __forceinline__ uint32_t codes_address(uint32_t tile, int step) {
    const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8;
    if constexpr (kDim == 256) {
      // The same number, as a tile begins at a multiple of 128, but not kept in registers from the keys to the values,
      // which lie in their tile alike.
      return ((tile + byte(row, lane / 16)) ^ (step % 8 * 16)) + step / 8 * 128;
    } else {
      return tile + byte(row, step + lane / 16);
    }
  }

  // The 16 keys at `tile` as the rows of an mma: a[s] is the operand of step `step` + s.
  static __device__ __forceinline__ void keys_as_rows(uint32_t tile, int step, uint32_t (&a)[kSteps][4]) {
    if constexpr (is_e4m3(kKv)) {
      uint32_t codes[4];  // of eight keys each: lower, upper, and the next step's
      ptx::load_matrix_x4(codes_address(tile, step), codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) widen_codes(codes[i], a[i / 2][i % 2], a[i / 2][2 + i % 2]);
    } else {
      const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) ptx::load_matrix_x4(tile + byte(row, (step + s) * 2 + lane / 16), a[s]);
    }
  }
  // The values at `tile` transposed, columns as rows: see value_column.
  static __device__ __forceinline__ void values_as_columns(uint32_t tile, int step, uint32_t (&a)[kSteps][4]) {
    if constexpr (is_e4m3(kKv)) {
      uint32_t codes[4];  // as of keys
      ptx::load_matrix_x4_trans(codes_address(tile, step), codes);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        widen_codes(__byte_perm(codes[i], 0, 0x3120), a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
    } else {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        ptx::load_matrix_x4_trans(tile + byte(lane / 16 * 8 + lane % 8, (step + s) * 2 + lane / 8 % 2), a[s]);
    }
  }
  // The column that row g (half 0) or g + 8 (half 1) of the transposed values of a step is.
  static __device__ __forceinline__ int value_column(int step, int half) {
    const int g = threadIdx.x % 32 / 4;
    return step * 16 + (is_e4m3(kKv) ? g * 2 + half : g + half * 8);
  }

  // First of the two columns of step `step` that a query's operand has in its first (half 0) or second (half 1)
  // register: those that keys have there.
  static __device__ __forceinline__ int query_column(int step, int half) {
    const int t = threadIdx.x % 4;
    return step * 16 + (is_e4m3(kKv) ? t * 4 + half * 2 : t * 2 + half * 8);
  }
};

}  // namespace nfp::cuda
