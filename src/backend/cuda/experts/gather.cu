#include "backend/cuda/experts/grouped_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/load.cuh"

namespace nfp::cuda {
namespace {

// A thread block has a row, which it reads once and writes to each of its assignments' places (or, of few rows, to one
// of them).
__global__ __launch_bounds__(kGatherThreads) void gather_kernel(const GatherParams p) {
  constexpr int kAtOnce = 4;  // pieces of 16 bytes a thread
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t row = blockIdx.x;
  // Lane t has the row's t-th place: one wait for all of them.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int place = lane < p.top ? p.place[row * p.top + lane] : -1;
  for (int first = 0; first < p.pieces; first += kAtOnce * kGatherThreads) {  // all lanes of a warp go round as often
    const int base = first + static_cast<int>(threadIdx.x);
    uint4 piece[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = base + i * kGatherThreads;
      piece[i] = ptx::load_16(p.x + row * p.pieces + at, at < p.pieces);
    }
    for (int t = static_cast<int>(blockIdx.y); t < p.top; t += static_cast<int>(gridDim.y)) {
      const int to = __shfl_sync(0xffffffffu, place, t);
      if (to < 0) continue;  // of an expert that is not here
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * kGatherThreads;
        if (at < p.pieces) p.out[int64_t{to} * p.pieces + at] = piece[i];
      }
    }
  }
}

}  // namespace

const void* gather_tokens_function() { return reinterpret_cast<const void*>(&gather_kernel); }

}  // namespace nfp::cuda
