#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {
namespace {

constexpr int kWarps = kAssignThreads / 32;

// kIds neighbours of the ids of a row, by the number of such pieces before them.
template <int kIds, bool kMapped>
struct Ids {
  static constexpr int kNone = kMaxExperts;  // beyond the last
  int expert[kIds];

  __device__ __forceinline__ void load(const AssignParams& p, int index, int end) {
    const int row = row_of(p, min(index, end - 1)), t = min(index, end - 1) - row * (p.routes.top / kIds);
    const int32_t* from = p.ids + int64_t{row} * p.id_stride + t * kIds;
    if constexpr (kIds == 4) {
      const uint4 four = ptx::load_16(from, true);
      const uint32_t of_row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) expert[i] = static_cast<int>(of_row[i]);
    } else {
      expert[0] = *from;
    }
  }
  // Ids to experts: -1 where there is none here. Without branches, which would make each load wait for the one before.
  __device__ __forceinline__ void find(const AssignParams& p, int index, int end) {
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      int at = expert[i];
      if constexpr (kMapped) {
        const bool inside = at >= 0 && at < p.map_size;
        const int mapped = __ldg(p.map + (inside ? at : 0));
        at = inside ? mapped : -1;
      }
      at = at >= 0 && at < p.routes.experts ? at : -1;
      expert[i] = index < end ? at : kNone;
    }
  }
  static __device__ __forceinline__ int row_of(const AssignParams& p, int index) {
    return static_cast<int>(static_cast<uint64_t>(index) * p.pieces_inverse >> kInverseBits);
  }
};

// A block has an expert, a warp a run of the ids: how many of them belong to experts before this one and how many to
// it, and then, read again, where those go, in order of rows.
template <int kIds, bool kMapped>
__global__ __launch_bounds__(kAssignThreads, 1) void assign_kernel(const AssignParams p) {
  constexpr int kAtOnce = 8;  // loads
  using Piece = Ids<kIds, kMapped>;
  __shared__ int2 of_warps[kWarps];
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int expert = static_cast<int>(blockIdx.x), experts = p.routes.experts, top = p.routes.top;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int count = static_cast<int>(p.rows) * (top / kIds);
  const int run = (count + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const int begin = min(warp * run, count), end = min(begin + run, count);
  const auto read = [&](int base, Piece(&ids)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) ids[i].load(p, base + i * 32 + lane, end);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) ids[i].find(p, base + i * 32 + lane, end);
  };
  int before = 0, own = 0;
  bool none = false;
  for (int base = begin; base < end; base += kAtOnce * 32) {
    Piece ids[kAtOnce];
    read(base, ids);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        before += static_cast<uint32_t>(ids[i].expert[j]) < static_cast<uint32_t>(expert);
        own += ids[i].expert[j] == expert;
        none |= ids[i].expert[j] < 0;
      }
    }
  }
  const int warp_before = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(before)));
  const int warp_own = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(own)));
  if (lane == 0) of_warps[warp] = make_int2(warp_before, warp_own);
  __syncthreads();
  int first = 0, next = 0, owns = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int2 of_warp = of_warps[w];
    first += of_warp.x;
    owns += of_warp.y;
    next += w < warp ? of_warp.y : 0;
  }
  next += first;
  if (threadIdx.x == 0) {
    p.routes.start[expert] = first;
    if (expert == experts - 1) p.routes.start[experts] = first + owns;
  }
  if (expert == 0 && __any_sync(0xffffffffu, none)) {
    for (int index = begin + lane; index < end; index += 32) {
      Piece ids;
      ids.load(p, index, end);
      ids.find(p, index, end);
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        if (ids.expert[j] < 0) p.routes.place[index * kIds + j] = -1;
      }
    }
  }
  for (int base = begin; warp_own > 0 && base < end; base += kAtOnce * 32) {
    Piece ids[kAtOnce];
    read(base, ids);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int here = 0;
#pragma unroll
      for (int j = 0; j < kIds; ++j) here += ids[i].expert[j] == expert;
      if (!__any_sync(0xffffffffu, here > 0)) continue;
      const int up_to = warp_scan(here, lane);
      int at = next + up_to - here;
      next += __shfl_sync(0xffffffffu, up_to, 31);
#pragma unroll
      for (int j = 0; j < kIds; ++j) {
        if (ids[i].expert[j] != expert) continue;
        const int id = (base + i * 32 + lane) * kIds + j;
        p.routes.row[at] = Piece::row_of(p, base + i * 32 + lane);
        p.routes.place[id] = at++;
      }
    }
  }
}

}  // namespace

const void* assign_function(bool vectors, bool mapped) {
  if (vectors) {
    return mapped ? reinterpret_cast<const void*>(&assign_kernel<4, true>)
                  : reinterpret_cast<const void*>(&assign_kernel<4, false>);
  }
  return mapped ? reinterpret_cast<const void*>(&assign_kernel<1, true>)
                : reinterpret_cast<const void*>(&assign_kernel<1, false>);
}

}  // namespace nfp::cuda
