#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/experts/row_sum.cuh"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {
namespace {

// A thread block has a row, or some of its features; a thread eight of them.
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const CombineExpertsArgs p) {
  ptx::launch_dependents();
  if (!p.follows) ptx::dependency_wait();
  const int64_t row = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const RowExperts experts = experts_of(p, row, lane);
  if (p.follows) ptx::dependency_wait();
  const int step = static_cast<int>(gridDim.y * blockDim.x) * 8;
  const int first = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * 8;
  const int lane0 = first - lane * 8;  // all lanes of a warp go round as often
  for (int base = lane0; base < p.hidden; base += step) {
    const int i = base + lane * 8;
    const bool here = i < p.hidden;
    const uint4 sum = sum_of_experts(p, experts, row, i, here);
    if (here) *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + row * p.hidden + i) = sum;
  }
}

}  // namespace

const void* combine_function() { return reinterpret_cast<const void*>(&combine_kernel); }

}  // namespace nfp::cuda
