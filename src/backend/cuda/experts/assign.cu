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

__device__ __forceinline__ int expert_of(const AssignArgs& p, int id) {  // -1: none here
  if (p.map != nullptr) id = id >= 0 && id < p.map_size ? __ldg(p.map + id) : -1;
  return id < p.routes.experts ? max(id, -1) : -1;
}

// Calls seen(row, t, expert) for rows [first, end), four rows' next four ids at a time: in one block of few threads
// only what is on its way at once makes up for the way.
template <bool kVectors, typename Seen>
__device__ __forceinline__ void walk(const AssignArgs& p, int first, int end, Seen seen) {
  constexpr int kRows = 4;
#pragma unroll 1
  for (int row = first; row < end; row += kRows) {
#pragma unroll 1
    for (int t = 0; t < p.routes.top; t += 4) {
      int4 ids[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t* from = p.ids + int64_t{min(row + i, end - 1)} * p.id_stride + t;
        if constexpr (kVectors) {
          ids[i] = *reinterpret_cast<const int4*>(from);
        } else {
          const int last = p.routes.top - 1 - t;
          ids[i] = make_int4(from[0], from[min(1, last)], from[min(2, last)], from[min(3, last)]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int of_row[4] = {ids[i].x, ids[i].y, ids[i].z, ids[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (row + i < end && t + j < p.routes.top) seen(row + i, t + j, expert_of(p, of_row[j]));
        }
      }
    }
  }
}

// A block has an expert, a thread a run of rows: how many of their ids belong to experts before this one and how many
// to it, and then where those go, in order of rows.
template <bool kVectors>
__global__ __launch_bounds__(kAssignThreads, 1) void assign_kernel(const AssignArgs p) {
  __shared__ int of_warps[kWarps];
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int expert = static_cast<int>(blockIdx.x), experts = p.routes.experts, top = p.routes.top;
  const int rows = static_cast<int>(p.rows), run = (rows + kAssignThreads - 1) / kAssignThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * run, rows), end = min(begin + run, rows);
  const int part = (run + 31) / 32;  // rows that share a bit of `parts`
  uint32_t parts = 0;                // where this expert's are
  int before = 0, own = 0;
  bool none = false;
  walk<kVectors>(p, begin, end, [&](int row, int, int at) {
    before += static_cast<uint32_t>(at) < static_cast<uint32_t>(expert);
    own += at == expert;
    parts |= static_cast<uint32_t>(at == expert) << (row - begin) / part;
    none |= at < 0;
  });
  if (expert == 0 && none) {
    walk<kVectors>(p, begin, end, [&](int row, int t, int at) {
      if (at < 0) p.routes.place[int64_t{row} * top + t] = -1;
    });
  }
  const int first = scan(before, of_warps).y;
  const int2 owns = scan(own, of_warps);
  if (threadIdx.x == 0) {
    p.routes.start[expert] = first;
    if (expert == experts - 1) p.routes.start[experts] = first + owns.y;
  }
  int next = first + owns.x;
  for (; parts != 0; parts &= parts - 1) {
    const int row0 = begin + (__ffs(static_cast<int>(parts)) - 1) * part;
    for (int one = row0; one < min(row0 + part, end); ++one) {
      walk<kVectors>(p, one, one + 1, [&](int row, int t, int at) {
        if (at != expert) return;
        p.routes.row[next] = row;
        p.routes.place[int64_t{row} * top + t] = next++;
      });
    }
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

const void* assign_function(bool vectors) {
  return vectors ? reinterpret_cast<const void*>(&assign_kernel<true>)
                 : reinterpret_cast<const void*>(&assign_kernel<false>);
}

}  // namespace nfp::cuda
