#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {
namespace {

constexpr int kMine = kPlacedAtOnce / kPlaceThreads;  // ids of a thread

// A few assignments: a block has one, finds its place by counting who comes before it, and puts its row there. The last
// block has none, and finds where each expert's begin.
template <bool kMapped>
__global__ __launch_bounds__(kPlaceThreads) void place_kernel(const AssignParams p) {
  constexpr int kAtOnce = 4;  // pieces of 16 bytes a thread
  __shared__ int32_t counts[kMaxExperts];
  __shared__ int32_t of_warps[kPlaceThreads / 32];
  ptx::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int top = p.routes.top, experts = p.routes.experts, count = static_cast<int>(p.rows) * top;
  const int index = static_cast<int>(blockIdx.x), row = index / top;
  const bool has_one = index < count;
  if (!has_one) {
    for (int e = thread; e < experts; e += kPlaceThreads) counts[e] = 0;
  }
  ptx::dependency_wait();
  const auto id_at = [&](int at) {
    const int of = static_cast<int>(static_cast<uint64_t>(at) * p.pieces_inverse >> kInverseBits);
    return p.ids + int64_t{of} * p.id_stride + (at - of * top);
  };
  // Without branches, so that all loads are on their way together.
  int ids[kMine + 1];  // the last one is the block's own
#pragma unroll
  for (int i = 0; i <= kMine; ++i)
    ids[i] = __ldcg(id_at(min(i < kMine ? i * kPlaceThreads + thread : index, count - 1)));
  const int pieces = p.gathered != nullptr && has_one ? static_cast<int>(p.row_bytes / 16) : 0;
  const uint4* from = static_cast<const uint4*>(p.x) + int64_t{row} * pieces;
  uint4 piece[kAtOnce];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = base + i * kPlaceThreads + thread;
      piece[i] = ptx::load_16(from + at, at < pieces);
    }
  };
  load(0);
#pragma unroll
  for (int i = 0; i <= kMine; ++i) {  // ids to experts, -1 where there is none here
    int at = ids[i];
    if constexpr (kMapped) {
      const bool inside = at >= 0 && at < p.map_size;
      const int mapped = __ldg(p.map + (inside ? at : 0));
      at = inside ? mapped : -1;
    }
    ids[i] = at >= 0 && at < experts && (i == kMine || i * kPlaceThreads + thread < count) ? at : -1;
  }
  if (!has_one) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (ids[i] >= 0) atomicAdd(&counts[ids[i]], 1);
    }
    __syncthreads();
    int before = 0;
    for (int first = 0; first < experts; first += kPlaceThreads) {
      const int e = first + thread, own = e < experts ? counts[e] : 0;
      int up_to = warp_scan(own, lane);
      if (lane == 31) of_warps[warp] = up_to;
      __syncthreads();
      for (int w = 0; w < warp; ++w) up_to += of_warps[w];
      if (e < experts) p.routes.start[e] = before + up_to - own;
      if (e == experts - 1) p.routes.start[experts] = before + up_to;
      for (int w = 0; w < kPlaceThreads / 32; ++w) before += of_warps[w];
      __syncthreads();  // the sums have been read
    }
    return;
  }
  const int expert = ids[kMine];
  int before = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const bool earlier = ids[i] < expert || (ids[i] == expert && i * kPlaceThreads + thread < index);
    before += ids[i] >= 0 && earlier;
  }
  before = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<uint32_t>(before)));
  if (lane == 0) of_warps[warp] = before;
  __syncthreads();
  int place = 0;
#pragma unroll
  for (int w = 0; w < kPlaceThreads / 32; ++w) place += of_warps[w];
  if (expert < 0) place = -1;
  if (thread == 0) p.routes.place[index] = place;
  if (place < 0) return;
  if (thread == 0) p.routes.row[place] = row;
  uint4* to = static_cast<uint4*>(p.gathered) + int64_t{place} * pieces;
  for (int base = 0; base < pieces; base += kAtOnce * kPlaceThreads) {
    if (base > 0) load(base);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = base + i * kPlaceThreads + thread;
      if (at < pieces) to[at] = piece[i];
    }
  }
}

}  // namespace

const void* place_function(bool mapped) {
  return mapped ? reinterpret_cast<const void*>(&place_kernel<true>)
                : reinterpret_cast<const void*>(&place_kernel<false>);
}

}  // namespace nfp::cuda
