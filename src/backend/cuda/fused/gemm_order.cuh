// Row-major E4M3 codes to the order of FP8 mode's GEMM (gemm/plan/layout.h), in registers.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/plan/layout.h"

namespace nfp::cuda {

// Of chunk j of a row's 64 bytes the four that belong into chunk c, at 4 * j.
__device__ __forceinline__ uint32_t gemm_order_piece(const uint4& chunk, int c) {
  const uint32_t low = c < 2 ? chunk.x : chunk.y, high = c < 2 ? chunk.z : chunk.w;
  return __byte_perm(low, high, c % 2 == 0 ? 0x5410 : 0x7632);
}
constexpr bool gemm_order_pieces_agree() {
  for (int k = 0; k < kBlockK; ++k) {
    const int j = k / 16, c = k % 8 / 2, i = k % 16 / 8 * 2 + k % 2;
    if (permuted_byte(k) != 16 * c + 4 * j + i) return false;
  }
  return true;
}
static_assert(gemm_order_pieces_agree());

// Four neighbouring lanes have 64 bytes, each a chunk of 16 codes, and get a chunk each: they exchange pieces of four
// bytes, lane j's piece c for lane c's piece j. Of all lanes of a warp.
__device__ __forceinline__ uint4 to_gemm_order(const uint4& codes) {
  const int lane = static_cast<int>(threadIdx.x % 4);
  uint32_t v[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) v[c] = gemm_order_piece(codes, c);
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if ((c & bit) != 0) continue;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? v[c] : v[c | bit], bit);
      if (upper) {
        v[c] = other;
      } else {
        v[c | bit] = other;
      }
    }
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

}  // namespace nfp::cuda
