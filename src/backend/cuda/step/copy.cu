#include <cuda_fp16.h>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/step/step_kernels.h"

namespace nfp::cuda {
namespace {

// A thread block a row.
__global__ __launch_bounds__(kCopyThreads) void gather_kernel(const CopyParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const uint4* in = static_cast<const uint4*>(p.x) + p.rows[blockIdx.x] * p.vectors;
  uint4* out = static_cast<uint4*>(p.out) + blockIdx.x * p.vectors;
  for (int64_t i = threadIdx.x; i < p.vectors; i += blockDim.x) out[i] = in[i];
}

__global__ __launch_bounds__(kCopyThreads) void add_kernel(const CopyParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.vectors; i += step) {
    const uint4 a = static_cast<const uint4*>(p.x)[i];
    uint4* place = static_cast<uint4*>(p.out) + i;
    const uint4 b = *place;
    const auto add = [](uint32_t u, uint32_t v) {
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(u));
      const float2 y = __half22float2(reinterpret_cast<const __half2&>(v));
      const __half2 sum = __floats2half2_rn(x.x + y.x, x.y + y.y);
      return reinterpret_cast<const uint32_t&>(sum);
    };
    *place = make_uint4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
  }
}

__global__ __launch_bounds__(kCopyThreads) void soft_cap_kernel(const SoftCapParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.count; i += step) {
    const float x = p.x[i];
    p.x[i] = p.cap * tanhf(x / p.cap) + (x - x);  // what overflowed is no number, not the cap
  }
}

// A word a thread: host memory answers late, so all of it is asked for at once. No kernel begins before this one ends.
__global__ __launch_bounds__(kCopyThreads) void copy_kernel(const CopyCall c) {
  const CopyCall::Piece& piece = c.piece[blockIdx.y];
  const auto words = static_cast<uint32_t>(piece.bytes / 4), rows = static_cast<uint32_t>(piece.rows);
  const uint32_t i = blockIdx.x * kCopyThreads + threadIdx.x;
  if (i >= words * rows) return;
  const uint32_t row = i / words, word = i % words;
  const auto* src = static_cast<const uint32_t*>(piece.src) + row * (piece.src_pitch / 4) + word;
  static_cast<uint32_t*>(piece.dst)[row * (piece.dst_pitch / 4) + word] = __ldcv(src);
}

__global__ void take_mark_kernel(const TakeMarkCall c) {
  ptx::dependency_wait();
  *c.host = *c.device;
  *c.device = -1;
}

}  // namespace

const void* gather_function() { return reinterpret_cast<const void*>(&gather_kernel); }
const void* copy_function() { return reinterpret_cast<const void*>(&copy_kernel); }
const void* soft_cap_function() { return reinterpret_cast<const void*>(&soft_cap_kernel); }
const void* take_mark_function() { return reinterpret_cast<const void*>(&take_mark_kernel); }
const void* add_function() { return reinterpret_cast<const void*>(&add_kernel); }

}  // namespace nfp::cuda
