// Greedy sampling where the product of the logits has found their largest (row_largest.h).
#include "backend/cuda/logit_key.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/row_largest.h"
#include "backend/cuda/sampling/sampled.cuh"
#include "backend/cuda/sampling/sampling_kernels.h"

namespace nfp::cuda {
namespace {

constexpr int kRows = RowLargest::kRows, kWarps = kLargestThreads / 32;

// The larger candidates of two lanes' pairs of rows.
__device__ __forceinline__ void join(ulonglong2& mine, int offset) {
  mine.x = max(mine.x, __shfl_xor_sync(0xffffffffu, mine.x, offset));
  mine.y = max(mine.y, __shfl_xor_sync(0xffffffffu, mine.y, offset));
}

// A block has kRows rows, and a thread two of them, in every 512th group of columns.
__global__ __launch_bounds__(kLargestThreads, 1) void largest_kernel(const LargestCall call) {
  __shared__ ulonglong2 of_warp[kWarps][kRows / 2];
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t pairs = RowLargest::groups(call.vocab) * (kRows / 2);
  const auto* from = reinterpret_cast<const ulonglong2*>(call.candidates) + blockIdx.x * pairs;
  ulonglong2 best = make_ulonglong2(0, 0);
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < pairs; i += kLargestThreads) {
    const ulonglong2 v = __ldcs(from + i);
    best.x = max(best.x, v.x);
    best.y = max(best.y, v.y);
  }
#pragma unroll
  for (int offset = kRows / 2; offset < 32; offset *= 2) join(best, offset);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < kRows / 2) of_warp[warp][lane] = best;
  __syncthreads();
  if (warp >= kRows / 2) return;
  best = of_warp[lane][warp];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) join(best, offset);
  const int row = static_cast<int>(blockIdx.x) * kRows + warp * 2 + lane;
  if (lane < 2 && row < call.rows) call.out[row] = sampled(lane == 0 ? best.x : best.y);
}

}  // namespace

const void* largest_function() { return reinterpret_cast<const void*>(&largest_kernel); }

}  // namespace nfp::cuda
