#include <cuda_fp8.h>

#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/fused/quantise_rows.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/pairs.cuh"

namespace nfp::cuda {
namespace {

// Where pair `j` of a lane's eight columns goes among those of its warp: activation_byte(), in few instructions.
constexpr __host__ __device__ int pair_place(int lane, int j) { return lane / 8 * 64 + j * 16 + lane % 8 * 2; }
constexpr bool places_agree() {
  for (int lane = 0; lane < 32; ++lane) {
    for (int j = 0; j < 4; ++j) {
      if (pair_place(lane, j) != activation_byte(lane * 8 + j * 2)) return false;
    }
  }
  return true;
}
static_assert(places_agree());

// Short rows have a warp each: nobody waits for another warp, and a block is not begun and ended for each of them.
template <bool kBf16, int kVectors, bool kShort>  // groups of eight columns a lane
__global__ __launch_bounds__(kShort ? kQuantiseWarps * 32 : 512) void quantise_rows_kernel(const QuantiseRowsParams p) {
  extern __shared__ __align__(16) uint8_t memory[];  // of each warp its codes, in the GEMM's order
  __shared__ float of_warps[32];
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t token = kShort ? int64_t{blockIdx.x} * kQuantiseWarps + warp : int64_t{blockIdx.x};
  if (token >= p.m) return;
  const int first = kShort ? 0 : warp * kQuantiseColumns;
  const int width = min(p.padded_k - first, kQuantiseColumns);  // of this warp's columns, padding included
  const uint16_t* x = p.x + token * p.ldx + first;
  uint8_t* codes = memory + (kShort ? warp * p.padded_k : first);
  uint4 raw[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * 32 + lane) * 8;
    raw[i] = ptx::load_16(x + column, first + column < p.k);
  }
  // Lane i has the row's i-th place: one wait for all of them.
  const int place = p.place == nullptr ? static_cast<int>(token) : p.place[token * p.copies + min(lane, p.copies - 1)];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    for (const uint32_t word : {raw[i].x, raw[i].y, raw[i].z, raw[i].w}) {
      const float2 pair = unpack_pair(word, kBf16);
      largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  }
  const auto of_lanes = [](float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
  };
  largest = of_lanes(largest);
  if constexpr (!kShort) {
    if (lane == 0) of_warps[warp] = largest;
    __syncthreads();
    largest = of_lanes(lane < static_cast<int>(blockDim.x) / 32 ? of_warps[lane] : 0.0f);
  }
  const float scale = e4m3_scale(largest);
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * 32 + lane) * 8;
    if (column >= width) continue;
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack_pair(words[j], kBf16);
      *reinterpret_cast<uint16_t*>(codes + i * 256 + pair_place(lane, j)) =
          __nv_cvt_float2_to_fp8x2(make_float2(pair.x * inverse, pair.y * inverse), __NV_SATFINITE, __NV_E4M3);
    }
  }
  __syncwarp();
  constexpr int kPieces = (kVectors + 1) / 2;
  uint4 out[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int at = (i * 32 + lane) * 16;
    if (at < width) out[i] = *reinterpret_cast<const uint4*>(codes + at);
  }
#pragma unroll 1
  for (int copy = 0; copy < p.copies; ++copy) {
    const int64_t row = __shfl_sync(0xffffffffu, place, copy);
    if (row < 0) continue;
    if (lane == 0 && first == 0) p.scales[row] = scale;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = (i * 32 + lane) * 16;
      if (at < width) *reinterpret_cast<uint4*>(p.codes + row * p.ld_codes + first + at) = out[i];
    }
  }
}

template <bool kBf16>
const void* function_for(int padded_k) {
  if (padded_k <= 512) return reinterpret_cast<const void*>(&quantise_rows_kernel<kBf16, 2, true>);
  if (padded_k <= 1024) return reinterpret_cast<const void*>(&quantise_rows_kernel<kBf16, 4, true>);
  if (padded_k <= kQuantiseColumns) return reinterpret_cast<const void*>(&quantise_rows_kernel<kBf16, 8, true>);
  return reinterpret_cast<const void*>(&quantise_rows_kernel<kBf16, 8, false>);
}

}  // namespace

const void* quantise_rows_function(bool bf16, int padded_k) {
  return bf16 ? function_for<true>(padded_k) : function_for<false>(padded_k);
}

}  // namespace nfp::cuda
