// A row of numbers in the shared memory of a cluster of thread blocks, and what the blocks tell each other about it.
//
// Logits are kept as keys: unsigned integers in the logits' order. Sums run in an order that depends on the shape only.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/warp.cuh"
#include "backend/cuda/sampling/sampling_kernels.h"

namespace nfp::cuda {

inline constexpr uint32_t kPaddingKey = 0;  // past the vocabulary
inline constexpr uint32_t kNaNKey = 1;
inline constexpr uint32_t kMinusInfinityKey = 0x007fffffu;
inline constexpr int kListSize = 1024;  // candidates that one block takes: two a thread
inline constexpr int kMaxValues = 8;    // of one exchange

__device__ __forceinline__ uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 = 0
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return logit != logit ? kNaNKey : key;
}
__device__ __forceinline__ bool is_finite_key(uint32_t key) {
  return key > kMinusInfinityKey && key < 0xff800000u;  // +infinity's
}
// NaN for NaN and padding.
__device__ __forceinline__ float logit_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

struct alignas(16) RowShared {
  SamplingRow row;
  uint64_t parts[kSampleWarps][kMaxValues];
  uint64_t mail[2][kSampleBlocks][kMaxValues];
  uint64_t table[2][kSampleBlocks * kSampleWarps];  // a value of each warp of the cluster
  uint64_t sorted[kListSize];                       // key << 32 | ~place in the list
  uint32_t list_key[kListSize];                     // candidates in order of id, in the cluster's first block
  int32_t list_id[kListSize];
  double scan[kSampleWarps];
  int32_t lowest, highest;  // for searches of one block
  int32_t token;
  int32_t is_last;
};

__device__ __forceinline__ void store_remote(const void* place, uint32_t rank, uint64_t value) {
  asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(ptx::map_to_rank(ptx::shared_address(place), rank)), "l"(value)
               : "memory");
}
__device__ __forceinline__ void store_remote(const void* place, uint32_t rank, uint32_t value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(ptx::map_to_rank(ptx::shared_address(place), rank)), "r"(value)
               : "memory");
}

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

struct ClusterRow {
  RowShared& shared;
  uint32_t* keys;  // [kSampleWarps * segment], this block's
  int32_t vocab;
  int segment;
  uint32_t blocks;
  uint32_t rank;  // of this block
  uint32_t warp;
  uint32_t lane;
  int parity = 0;  // of the mail: who is two exchanges on knows that the others are one on

  __device__ int32_t first_id() const { return static_cast<int32_t>((rank * kSampleWarps + warp) * segment); }
  __device__ uint32_t* warp_keys() const { return keys + warp * segment; }
  __device__ bool leads() const { return rank == 0; }

  // f(keys of four neighbours, id of the first) for all of this warp's ids; a warp's lanes have neighbouring fours.
  template <int kUnroll = 1, typename F>
  __device__ __forceinline__ void for_each_four(F f) const {
    const uint4* mine = reinterpret_cast<const uint4*>(warp_keys()) + lane;
    const int32_t first = first_id() + static_cast<int32_t>(lane) * 4;
#pragma unroll kUnroll
    for (int i = 0; i < segment; i += kStretch) f(mine[i / 4], first + i);
  }

  // Every thread of the cluster gets the sums over all. The first kOfWarp values are a warp's sum already.
  template <int kOfWarp = 0, int kCount>
  __device__ __forceinline__ void add_up(double (&v)[kCount]) {
    static_assert(kCount <= kMaxValues);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (n >= kOfWarp) v[n] = warp_sum(v[n]);
      if (lane == 0) shared.parts[warp][n] = static_cast<uint64_t>(__double_as_longlong(v[n]));
    }
    __syncthreads();
    if (threadIdx.x < kCount * blocks) {
      const uint32_t n = threadIdx.x / blocks;
      double four[4] = {};  // four short chains of additions, not a long one
#pragma unroll
      for (int w = 0; w < kSampleWarps; ++w)
        four[w % 4] += __longlong_as_double(static_cast<int64_t>(shared.parts[w][n]));
      const double sum = (four[0] + four[1]) + (four[2] + four[3]);
      store_remote(&shared.mail[parity][rank][n], threadIdx.x % blocks,
                   static_cast<uint64_t>(__double_as_longlong(sum)));
    }
    ptx::cluster_sync();
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      v[n] = 0;
      for (uint32_t b = 0; b < blocks; ++b)
        v[n] += __longlong_as_double(static_cast<int64_t>(shared.mail[parity][b][n]));
    }
    parity ^= 1;
  }

  // The same for counts.
  template <int kCount>
  __device__ __forceinline__ void add_up(uint32_t (&v)[kCount]) {
    static_assert(kCount <= kMaxValues);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      v[n] = __reduce_add_sync(0xffffffffu, v[n]);
      if (lane == 0) shared.parts[warp][n] = v[n];
    }
    __syncthreads();
    if (threadIdx.x < kCount * blocks) {
      const uint32_t n = threadIdx.x / blocks;
      uint32_t sum = 0;
#pragma unroll
      for (int w = 0; w < kSampleWarps; ++w) sum += static_cast<uint32_t>(shared.parts[w][n]);
      store_remote(&shared.mail[parity][rank][n], threadIdx.x % blocks, uint64_t{sum});
    }
    ptx::cluster_sync();
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      v[n] = 0;
      for (uint32_t b = 0; b < blocks; ++b) v[n] += static_cast<uint32_t>(shared.mail[parity][b][n]);
    }
    parity ^= 1;
  }

  // The largest key and the lowest id that has it.
  __device__ __forceinline__ uint64_t largest(uint32_t key, int32_t id) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, key);
    const uint32_t lowest = __reduce_min_sync(0xffffffffu, key == most ? static_cast<uint32_t>(id) : 0xffffffffu);
    if (lane == 0) shared.parts[warp][0] = uint64_t{most} << 32 | ~lowest;
    __syncthreads();
    if (threadIdx.x < blocks) {
      uint64_t best = 0;
#pragma unroll
      for (int w = 0; w < kSampleWarps; ++w) best = max(best, shared.parts[w][0]);
      store_remote(&shared.mail[parity][rank][0], threadIdx.x, best);
    }
    ptx::cluster_sync();
    uint64_t best = 0;
    for (uint32_t b = 0; b < blocks; ++b) best = max(best, shared.mail[parity][b][0]);
    parity ^= 1;
    return best;
  }

  // Every thread gets one value of each warp of the cluster, in order of their ids.
  __device__ __forceinline__ const uint64_t* tell(uint64_t value) {
    if (lane < blocks) store_remote(&shared.table[parity][rank * kSampleWarps + warp], lane, value);
    ptx::cluster_sync();
    const uint64_t* all = shared.table[parity];
    parity ^= 1;
    return all;
  }
};

}  // namespace nfp::cuda
