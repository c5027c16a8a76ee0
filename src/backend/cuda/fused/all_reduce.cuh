// One thread's share of an AllReduce: eight neighbours of a row of 16-bit numbers at a time.
#pragma once

#include "backend/cuda/fused/all_reduce_kernel.h"
#include "backend/cuda/ptx/system.cuh"

namespace nfp::cuda {

class RankParts {
 public:
  // Behind the wait for the kernel before, which may be of the call before.
  __device__ __forceinline__ void begin(const AllReduceParams& p) { call_ = __ldcg(&header(p)->calls); }

  // To rank `only`, or kAll others. `offset`: bytes from the beginning of a part.
  static constexpr int kAll = -1;
  __device__ __forceinline__ void send(const AllReduceParams& p, int only, uint32_t offset, const uint4& own) const {
    const uint4 v = make_uint4(filled(own.x), filled(own.y), filled(own.z), filled(own.w));
#pragma unroll 1
    for (int to = 0; to < p.ranks; ++to) {
      if (to != p.rank && (only == kAll || to == only)) ptx::store_system_16(part(p, to, p.rank) + offset, v);
    }
  }
  // Waits for it.
  __device__ __forceinline__ uint4 receive(const AllReduceParams& p, int from, uint32_t offset) const {
    uint8_t* const at = part(p, p.rank, from) + offset;
    uint4 v;
    do {
      v = ptx::load_system_16(at);
    } while (v.x == kAllReduceEmpty || v.y == kAllReduceEmpty || v.z == kAllReduceEmpty || v.w == kAllReduceEmpty);
    *reinterpret_cast<uint4*>(at) = make_uint4(kAllReduceEmpty, kAllReduceEmpty, kAllReduceEmpty, kAllReduceEmpty);
    return v;
  }

  // One thread of each block, when its block has received everything.
  __device__ __forceinline__ void end(const AllReduceParams& p) const {
    AllReduceHeader* const h = header(p);
    if (atomicAdd(&h->blocks_ended, 1) + 1 < gridDim.x) return;
    h->blocks_ended = 0;
    h->calls = call_ + 1;
  }

 private:
  static __device__ __forceinline__ uint32_t filled(uint32_t word) {
    return word == kAllReduceEmpty ? kAllReduceNans : word;
  }
  static __device__ __forceinline__ AllReduceHeader* header(const AllReduceParams& p) {
    return reinterpret_cast<AllReduceHeader*>(p.buffers[p.rank]);
  }
  // What `from` stored in the buffer of `at`.
  __device__ __forceinline__ uint8_t* part(const AllReduceParams& p, int at, int from) const {
    const int64_t number =
        static_cast<int64_t>(call_ % kAllReduceSlots) * (p.ranks - 1) + (from < at ? from : from - 1);
    return p.buffers[at] + kAllReduceHeader + number * p.part_bytes;
  }

  uint32_t call_ = 0;
};

}  // namespace nfp::cuda
