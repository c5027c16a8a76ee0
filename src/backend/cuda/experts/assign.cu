#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {
namespace {

constexpr int kWarps = kAssignThreads / 32;

// Sum of the threads before this one, and of all.
__device__ __forceinline__ int2 scan(int value, int (&of_warps)[kWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int sum = warp_scan(value, lane);
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = sum - value, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warps[w];
    all += of_warps[w];
  }
  __syncthreads();
  return make_int2(before, all);
}

// A block has an expert, a thread a run of ids: how many belong to experts before this one and how many to it, and then
// where they go, in order of rows.
__global__ __launch_bounds__(kAssignThreads) void assign_kernel(const AssignArgs p) {
  __shared__ int of_warps[kWarps];
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int expert = static_cast<int>(blockIdx.x), experts = p.routes.experts;
  const auto top = static_cast<uint32_t>(p.routes.top);
  const uint32_t total = static_cast<uint32_t>(p.rows) * top;
  const uint32_t run = (total + kAssignThreads - 1) / kAssignThreads;
  const uint32_t begin = min(threadIdx.x * run, total), end = min(begin + run, total);
  const auto expert_of = [&](uint32_t i) {  // -1: none here
    const uint32_t row = i / top;
    int id = p.ids[int64_t{row} * p.id_stride + (i - row * top)];
    if (p.map != nullptr) id = id >= 0 && id < p.map_size ? __ldg(p.map + id) : -1;
    return id < experts ? max(id, -1) : -1;
  };
  int before = 0, own = 0;
#pragma unroll 2
  for (uint32_t i = begin; i < end; ++i) {
    const int at = expert_of(i);
    before += at >= 0 && at < expert;
    own += at == expert;
    if (expert == 0 && at < 0) p.routes.place[i] = -1;
  }
  const int first = scan(before, of_warps).y;
  const int2 owns = scan(own, of_warps);
  if (threadIdx.x == 0) {
    p.routes.start[expert] = first;
    if (expert == experts - 1) p.routes.start[experts] = first + owns.y;
  }
  int next = first + owns.x;
  for (uint32_t i = begin; i < end; ++i) {
    if (expert_of(i) != expert) continue;
    p.routes.row[next] = static_cast<int32_t>(i / top);
    p.routes.place[i] = next++;
  }
  if (p.gathered == nullptr || owns.y == 0) return;
  __syncthreads();  // the rows are written
  const int pieces = static_cast<int>(p.row_bytes / 16);
#pragma unroll 1
  for (int a = first; a < first + owns.y; ++a) {
    const uint4* from = static_cast<const uint4*>(p.x) + int64_t{p.routes.row[a]} * pieces;
    uint4* to = static_cast<uint4*>(p.gathered) + int64_t{a} * pieces;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kAssignThreads) to[i] = from[i];
  }
}

}  // namespace

const void* assign_function() { return reinterpret_cast<const void*>(&assign_kernel); }

}  // namespace nfp::cuda
