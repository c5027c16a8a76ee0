// Sums the parts of a tile whose k was cut, through global memory.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel_params.h"
#include "backend/cuda/gemm/work.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace nfp::cuda {

// Adds up the parts of a cut tile. True in the warpgroup that came last: acc then holds the whole sum.
template <int kCount>
__device__ __forceinline__ bool join_parts(const KernelParams& p, float (&acc)[kCount], const Work& work,
                                           int slot_block, int slot_blocks, uint32_t* counter, uint32_t flag,
                                           int warpgroup) {
  static_assert(kCount % 4 == 0);
  const int thread = threadIdx.x % 128;
  const int tile_begin = work.tile * p.k_iterations;
  const int first = p.length.of(tile_begin);
  const int last = p.length.of(tile_begin + p.k_iterations - 1);
  // A share meets at most two tiles that it does not cover whole. Of a tile's shares only the first can have met
  // another before.
  const int first_slot = 2 * first + (p.length.begin(first) < tile_begin ? 1 : 0);
  const auto part = [&](int share) {
    const int index = (share == first ? first_slot : 2 * share) * slot_blocks + slot_block;
    return reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(index) * (kCount / 4 * 128) + thread;
  };
  const auto write_part = [&] {
    float4* out = part(work.share);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      __stcg(out + i * 128, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
    ptx::named_barrier(1 + warpgroup, 128);
  };
  const auto add_part = [&](int share) {
    const float4* in = part(share);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 v = ptx::load_global_cg(in + i * 128);
      acc[4 * i] += v.x;
      acc[4 * i + 1] += v.y;
      acc[4 * i + 2] += v.z;
      acc[4 * i + 3] += v.w;
    }
  };
  // Thread 0 adds to the tile's counter and tells the others what it held.
  const auto count = [&](uint32_t add) {
    if (thread == 0) {
      __threadfence();
      const uint32_t before = atomicAdd(counter, add);
      __threadfence();
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
    }
    ptx::named_barrier(1 + warpgroup, 128);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
    ptx::named_barrier(1 + warpgroup, 128);  // the flag may be written again
    return before;
  };
  if (last - first == 1) {
    // Two parts: whoever comes second keeps its own in registers and waits for the first, which is already running and
    // waits for nobody. a + b = b + a, so the order is no matter.
    if (count(1) == 0) {
      write_part();
      if (thread == 0) {
        __threadfence();
        atomicAdd(counter, 1u << 16);
      }
      return false;
    }
    if (thread == 0) {
      while (*static_cast<volatile uint32_t*>(counter) < (1u << 16)) __nanosleep(64);
      __threadfence();
      *counter = 0;  // ready for the next launch
    }
    ptx::named_barrier(1 + warpgroup, 128);
    add_part(work.share == first ? last : first);
    return true;
  }
  write_part();
  if (count(1) != static_cast<uint32_t>(last - first)) return false;
  if (thread == 0) *counter = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = 0.0f;
#pragma unroll 1
  for (int share = first; share <= last; ++share) add_part(share);
  return true;
}

}  // namespace nfp::cuda
