#include "backend/cuda/fused/arrange_codes_kernel.h"
#include "backend/cuda/fused/gemm_order.cuh"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {
namespace {

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

template <bool kAligned>
__global__ __launch_bounds__(kArrangeThreads) void arrange_codes_kernel(const ArrangeCodesParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t token = blockIdx.x;
  const int chunk = static_cast<int>(blockIdx.y * kArrangeThreads + threadIdx.x);
  if (chunk == 0 && p.y_scales != nullptr) p.y_scales[token] = p.scales[p.one_scale ? 0 : token];
  const uint4 codes = load_codes<kAligned>(p.codes + token * p.ld, chunk * 16, p.k);
  const uint4 arranged = to_gemm_order(codes);
  if (chunk < p.chunks) *reinterpret_cast<uint4*>(p.y + token * p.ldy + chunk * 16) = arranged;
}

}  // namespace

const void* arrange_codes_function(bool is_aligned) {
  return is_aligned ? reinterpret_cast<const void*>(&arrange_codes_kernel<true>)
                    : reinterpret_cast<const void*>(&arrange_codes_kernel<false>);
}

}  // namespace nfp::cuda
