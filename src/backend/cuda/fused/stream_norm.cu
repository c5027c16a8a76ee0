#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/fused/stream_norm_kernel.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {
namespace {

__device__ __forceinline__ float4 load4(const float* p, int i) { return *reinterpret_cast<const float4*>(p + i); }

// Of all threads, in a fixed order.
__device__ __forceinline__ float2 sum_and_largest(float sum, float largest) {
  __shared__ float2 warps[32];
  const auto across = [&] {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
  };
  across();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(sum, largest);
  __syncthreads();
  const float2 other = threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : make_float2(0.0f, 0.0f);
  sum = other.x;
  largest = other.y;
  across();
  return make_float2(sum, largest);
}

// A thread block a row, which is read twice: the second time from the L2, by the thread that wrote it.
__global__ __launch_bounds__(kStreamNormThreads) void stream_norm_kernel(const StreamNormParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t row = blockIdx.x;
  const float* x = p.x + row * p.columns;
  float* residual = p.residual != nullptr ? p.residual + row * p.columns : nullptr;
  const int first = static_cast<int>(threadIdx.x) * 4, step = static_cast<int>(blockDim.x) * 4;
  float sum = 0.0f, largest = 0.0f;
  for (int i = first; i < p.columns; i += step) {
    float4 h = load4(x, i);
    if (residual != nullptr) {
      const float4 r = load4(residual, i);
      h = make_float4(h.x + r.x, h.y + r.y, h.z + r.z, h.w + r.w);
      *reinterpret_cast<float4*>(residual + i) = h;
    }
    if (p.weight == nullptr) continue;
    const float4 w = load4(p.weight, i);
    sum += h.x * h.x + h.y * h.y + h.z * h.z + h.w * h.w;
    largest =
        fmaxf(fmaxf(largest, fmaxf(fabsf(h.x * w.x), fabsf(h.y * w.y))), fmaxf(fabsf(h.z * w.z), fabsf(h.w * w.w)));
  }
  if (p.weight == nullptr) return;
  const float2 totals = sum_and_largest(sum, largest);
  // Squares that overflow make no zeros, but no numbers.
  const float factor = rsqrtf(totals.x / static_cast<float>(p.columns) + p.epsilon) + (totals.x - totals.x);
  largest = totals.y * factor;
  const float scale = e4m3_scale(largest);
  const float by = p.y_e4m3 != nullptr ? factor * (1.0f / scale) : factor;
  if (p.y_e4m3 != nullptr && threadIdx.x == 0) p.scales[row] = scale;
  const int end = p.y_e4m3 != nullptr ? p.padded_columns : p.columns;
  for (int i = first; i < end; i += step) {
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < p.columns) {
      const float4 h = load4(residual != nullptr ? residual : x, i);
      const float4 w = load4(p.weight, i);
      y = make_float4(h.x * w.x * by, h.y * w.y * by, h.z * w.z * by, h.w * w.w * by);
    }
    if (p.y_f32 != nullptr) {
      *reinterpret_cast<float4*>(p.y_f32 + row * p.columns + i) = y;
    } else if (p.y_f16 != nullptr) {
      const __half2 pairs[2] = {__floats2half2_rn(y.x, y.y), __floats2half2_rn(y.z, y.w)};
      *reinterpret_cast<uint2*>(p.y_f16 + row * p.columns + i) = *reinterpret_cast<const uint2*>(pairs);
    } else {
      // Even k and its neighbour stay neighbours.
      uint8_t* out = p.y_e4m3 + row * p.padded_columns;
      const auto store = [&](int k, float2 pair) {
        *reinterpret_cast<uint16_t*>(out + activation_byte(k)) =
            __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      };
      store(i, make_float2(y.x, y.y));
      store(i + 2, make_float2(y.z, y.w));
    }
  }
}

}  // namespace

const void* stream_norm_function() { return reinterpret_cast<const void*>(&stream_norm_kernel); }

}  // namespace nfp::cuda
