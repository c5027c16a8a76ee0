#include "backend/cuda/experts/grouped_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {
namespace {

// Rows in order of their assignments, 16 bytes a thread at a time; a thread block has an assignment.
__global__ __launch_bounds__(kGatherThreads) void gather_kernel(const GatherParams p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int assignment = static_cast<int>(blockIdx.x);
  if (assignment >= p.start[p.experts]) return;
  const int64_t row = p.row[assignment];
  const uint4* from = p.x + row * p.pieces;
  uint4* to = p.out + int64_t{assignment} * p.pieces;
  for (int i = static_cast<int>(threadIdx.x); i < p.pieces; i += kGatherThreads) to[i] = from[i];
  if (p.scale != nullptr && threadIdx.x == 0) p.out_scale[assignment] = p.scale[row];
}

}  // namespace

const void* gather_tokens_function() { return reinterpret_cast<const void*>(&gather_kernel); }

}  // namespace nfp::cuda
