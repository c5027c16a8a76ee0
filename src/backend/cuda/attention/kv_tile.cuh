// Tiles of keys and values in shared memory as operands of mma.sync, for both cache types.
//
// E4M3 numbers become FP16 between shared memory and the mma, exactly. ldmatrix moves pairs of bytes where it moves one
// FP16 number, which leaves a lane with other columns than the mma wants; so the columns are renamed, of the queries
// and of the output: see query_column and output_column.
#pragma once

#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nfp::cuda {

template <int kDim, bool kE4m3>
struct KvTile {
  static constexpr int kRowBytes = kDim * (kE4m3 ? 1 : 2);
  static constexpr int kChunks = kRowBytes / 16;        // of a row
  static constexpr int kChunkColumns = kE4m3 ? 16 : 8;  // of a chunk

  // Of 16-byte chunk `chunk` of row `row`: the eight rows that one ldmatrix reads lie in different banks.
  static __device__ __forceinline__ uint32_t byte(int row, int chunk) {
    const int swizzle = kRowBytes >= 128 ? row & 7 : row / 2 & 3;
    return static_cast<uint32_t>(row * kRowBytes + (chunk ^ swizzle) * 16);
  }

  // Columns 16 * step to 16 * step + 31 of the 16 keys at `tile`: b[s][2 * n], b[s][2 * n + 1] are the operand of keys
  // 8n to 8n + 7 in step s.
  static __device__ __forceinline__ void load_keys(uint32_t tile, int step, uint32_t (&b)[2][4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kE4m3) {
      uint32_t codes[4];  // of eight keys each: lower, upper, and the next step's
      ptx::load_matrix_x4(tile + byte(lane / 8 % 2 * 8 + lane % 8, step + lane / 16), codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i / 2][i % 2 * 2] = widen(codes[i]);
        b[i / 2][i % 2 * 2 + 1] = widen(codes[i] >> 16);
      }
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s)
        ptx::load_matrix_x4(tile + byte(lane / 16 * 8 + lane % 8, (step + s) * 2 + lane / 8 % 2), b[s]);
    }
  }
  // The same of values: b[s][2 * n], b[s][2 * n + 1] are the operand of the n-th eight columns of step s.
  static __device__ __forceinline__ void load_values(uint32_t tile, int step, uint32_t (&b)[2][4]) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 8 % 2 * 8 + lane % 8;
    if constexpr (kE4m3) {
      uint32_t codes[4];
      ptx::load_matrix_x4_trans(tile + byte(row, step + lane / 16), codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i / 2][i % 2] = widen(__byte_perm(codes[i], 0, 0x4420));
        b[i / 2][2 + i % 2] = widen(__byte_perm(codes[i], 0, 0x4431));
      }
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) ptx::load_matrix_x4_trans(tile + byte(row, (step + s) * 2 + lane / 16), b[s]);
    }
  }

  // First of the two columns of step `step` that the queries' operand has in register a[0] (half 0) or a[2] (half 1).
  static __device__ __forceinline__ int query_column(int step, int half) {
    const int t = threadIdx.x % 4;
    return step * 16 + (kE4m3 ? t * 4 + half * 2 : t * 2 + half * 8);
  }
  // Column of element j (0, 1) of the n-th accumulator.
  static __device__ __forceinline__ int output_column(int n, int j) {
    const int t = threadIdx.x % 4;
    return kE4m3 ? n / 2 * 16 + t * 4 + j * 2 + n % 2 : n * 8 + t * 2 + j;
  }

 private:
  // Two codes, in the low half.
  static __device__ __forceinline__ uint32_t widen(uint32_t codes) {
    uint32_t halves;
    asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    return halves;
  }
};

}  // namespace nfp::cuda
