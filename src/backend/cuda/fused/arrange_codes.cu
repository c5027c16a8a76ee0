#include "backend/cuda/fused/arrange_codes_kernel.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {
namespace {

// Of chunk j of a row's 64 bytes the four that belong into chunk c, at 4 * j.
__device__ __forceinline__ uint32_t piece(const uint4& chunk, int c) {
  const uint32_t low = c < 2 ? chunk.x : chunk.y, high = c < 2 ? chunk.z : chunk.w;
  return __byte_perm(low, high, c % 2 == 0 ? 0x5410 : 0x7632);
}
constexpr bool pieces_agree() {
  for (int k = 0; k < kBlockK; ++k) {
    const int j = k / 16, c = k % 8 / 2, i = k % 16 / 8 * 2 + k % 2;
    if (permuted_byte(k) != 16 * c + 4 * j + i) return false;
  }
  return true;
}
static_assert(pieces_agree());

// 16 codes from `first` on, zeros from k on.
template <bool kAligned>
__device__ __forceinline__ uint4 load_codes(const uint8_t* row, int first, int k) {
  if constexpr (kAligned) {
    return first < k ? *reinterpret_cast<const uint4*>(row + first) : make_uint4(0, 0, 0, 0);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int at = first + w * 4 + b;
        if (at < k) words[w] |= static_cast<uint32_t>(row[at]) << (8 * b);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Four neighbouring lanes have 64 bytes: each loads a chunk of 16 codes and stores one, and in between they exchange
// pieces of four bytes, lane j's piece c for lane c's piece j.
template <bool kAligned>
__global__ __launch_bounds__(kArrangeThreads) void arrange_codes_kernel(const ArrangeCodesParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t token = blockIdx.x;
  const int chunk = static_cast<int>(blockIdx.y * kArrangeThreads + threadIdx.x);
  if (chunk == 0 && p.y_scales != nullptr) p.y_scales[token] = p.scales[p.one_scale ? 0 : token];
  const uint4 codes = load_codes<kAligned>(p.codes + token * p.ld, chunk * 16, p.k);
  const int lane = static_cast<int>(threadIdx.x % 4);
  uint32_t v[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) v[c] = piece(codes, c);
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
  if (chunk < p.chunks)
    *reinterpret_cast<uint4*>(p.y + token * p.ldy + chunk * 16) = make_uint4(v[0], v[1], v[2], v[3]);
}

}  // namespace

const void* arrange_codes_function(bool is_aligned) {
  return is_aligned ? reinterpret_cast<const void*>(&arrange_codes_kernel<true>)
                    : reinterpret_cast<const void*>(&arrange_codes_kernel<false>);
}

}  // namespace nfp::cuda
