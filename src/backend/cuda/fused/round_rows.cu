#include <cuda_fp8.h>

#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/fused/gemm_order.cuh"
#include "backend/cuda/fused/round_rows_kernel.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/pairs.cuh"
#include "backend/cuda/row_peaks.h"

namespace nfp::cuda {
namespace {

// The row's of RowPeaks, to every lane.
__device__ __forceinline__ float largest_of(uint32_t slot) {
#pragma unroll
  for (int offset = RowPeaks::kSlots / 2; offset > 0; offset /= 2)
    slot = max(slot, __shfl_xor_sync(0xffffffffu, slot, offset));
  return unpack_pair(slot, false).x;
}

// Four codes of two pairs of FP16 numbers.
__device__ __forceinline__ uint32_t round_four(uint32_t low, uint32_t high, float inverse) {
  const float2 a = unpack_pair(low, false), b = unpack_pair(high, false);
  const uint32_t first = __nv_cvt_float2_to_fp8x2(make_float2(a.x * inverse, a.y * inverse), __NV_SATFINITE, __NV_E4M3);
  const uint32_t second =
      __nv_cvt_float2_to_fp8x2(make_float2(b.x * inverse, b.y * inverse), __NV_SATFINITE, __NV_E4M3);
  return first | second << 16;
}

__global__ __launch_bounds__(kRoundRowsThreads) void round_rows_kernel(const RoundRowsParams p) {
  ptx::launch_dependents();
  const int rank = static_cast<int>(blockIdx.x) % p.blocks;
  const int64_t row = static_cast<int>(blockIdx.x) / p.blocks;
  const int chunk = rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  const uint16_t* const x = p.x + row * p.ldx + chunk * 16;
  uint8_t* const y = p.y + row * p.ldy + chunk * 16;
  uint32_t* const peak = p.peaks + threadIdx.x % RowPeaks::kSlots * RowPeaks::kRows + row;
#pragma unroll 1
  for (bool real = !p.rehearses;; real = true) {
    if (real) ptx::dependency_wait();
    const uint4 a = ptx::load_16(x, real && chunk * 16 < p.k), b = ptx::load_16(x + 8, real && chunk * 16 + 8 < p.k);
    const float largest = largest_of(real ? __ldcg(peak) : 0);
    const float scale = e4m3_scale(largest);
    const float inverse = 1.0f / scale;
    const uint4 codes = make_uint4(round_four(a.x, a.y, inverse), round_four(a.z, a.w, inverse),
                                   round_four(b.x, b.y, inverse), round_four(b.z, b.w, inverse));
    const uint4 arranged = to_gemm_order(codes);
    if (!real) continue;
    if (chunk < p.chunks) *reinterpret_cast<uint4*>(y) = arranged;
    // What was stored came from the peaks, so they have been read.
    ptx::cluster_arrive_relaxed();
    if (chunk == 0) p.scales[row] = scale;
    ptx::cluster_wait();
    if (chunk < RowPeaks::kSlots) *peak = 0;
    return;
  }
}

}  // namespace

const void* round_rows_function() { return reinterpret_cast<const void*>(&round_rows_kernel); }

}  // namespace nfp::cuda
