// A row of numbers in the shared memory of a cluster of thread blocks, and what the blocks tell each other about it.
//
// Logits are kept as keys: unsigned integers in the logits' order. Sums run in an order that depends on the shape only.
#pragma once

#include <cstdint>

#include "backend/cuda/logit_key.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/store_async.cuh"
#include "backend/cuda/ptx/warp.cuh"
#include "backend/cuda/sampling/sampling_kernels.h"

namespace nfp::cuda {

inline constexpr int kListSize = 1024;                                // candidates that one block takes: two a thread
inline constexpr int kMaxValues = 8;                                  // of one exchange
inline constexpr uint32_t kTold = kSampleBlocks * kSampleWarps / 32;  // warps' words a lane

// What a warp tells the cluster.
struct alignas(16) Told {
  uint64_t word;
  double sum;
};

// Tokens that are kept: keys above `key`, and of those with it the first `ties` in order of id.
struct Kept {
  static constexpr uint32_t kAll = 0xffffffffu;
  uint32_t key = kNaNKey;
  uint32_t ties = kAll;
};

// Keys from `low` on are enough to be as many tokens as are wanted; keys from `high` on are not; how many they are.
// `ties` as in Kept, of the key `low`. `mine`: how many of them this warp has.
struct Bracket {
  static constexpr uint32_t kUnknown = 0xffffffffu;
  uint32_t low, high;
  uint32_t count_low, count_high;
  uint32_t ties;
  uint32_t mine_low, mine_high;
  uint32_t best;  // the row's
  uint32_t wanted;
  // Up to the best.
  __device__ static Bracket of(uint32_t wanted, uint32_t low, uint32_t best, uint32_t count) {
    return {low, best + 1, count, 0, Kept::kAll, kUnknown, 0, best, wanted};
  }
  __device__ bool is_closed() const { return high - low <= 1; }
  __device__ bool fits_list() const { return count_low <= kListSize; }
  __device__ bool is_narrow() const { return count_low - count_high <= kListSize; }
};

// Whole lines of shared memory, so that the row's keys begin on one: 80 bytes off, 64 rows took 4 to 8 % longer.
struct alignas(128) RowShared {
  SamplingRow row;
  Bracket bracket[kSampleWarps];  // of each warp, all the same but for `mine`; kept here for want of registers
  uint64_t parts[kSampleWarps][kMaxValues];
  uint64_t mail[2][kSampleBlocks][kMaxValues];
  Told table[2][kSampleBlocks * kSampleWarps];  // of each warp of the cluster
  alignas(16) uint64_t sorted[kListSize];       // key << 32 | ~place in the list
  alignas(16) uint64_t list[kListSize];         // key << 32 | id, in order of id, in the cluster's first block
  uint64_t arrived[2], list_arrived;            // mbarriers: of mail or table, of the list
  double scan[kSampleWarps];
  int32_t lowest;                  // for searches of one block
  uint32_t bound[2];               // of nth_largest()
  uint32_t largest[kSampleWarps];  // keys
  double target;  // kept here, and not in registers, while a search runs: top-p's weight; of the loaded row the
  uint32_t best;  //   largest key, whether there were adjustments, and which it is
  bool is_adjusted;
  uint32_t kept;  // of sum_up()
  int32_t index;
  int32_t is_last;

  __device__ uint32_t list_key(int i) const { return static_cast<uint32_t>(list[i] >> 32); }
  __device__ int32_t list_id(int i) const { return static_cast<int32_t>(static_cast<uint32_t>(list[i])); }
};

__device__ __forceinline__ uint32_t address_in(uint32_t rank, const void* place) {
  return ptx::map_to_rank(ptx::shared_address(place), rank);
}

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// The warp of the cluster where the running sum of the warps, sum(i) of kTold a lane, passes a number.
struct Passed {
  uint32_t warp = 0xffffffffu;
  double left = 0;  // for that warp
  __device__ bool is_passed() const { return warp != 0xffffffffu; }
};
template <typename F>
__device__ __forceinline__ Passed where_passed(const F& sum, double number, uint32_t lane) {
  double of_lane = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTold; ++i) of_lane += sum(i);
  const double until = warp_scan(of_lane, lane);
  Passed p;
  double before = __shfl_up_sync(0xffffffffu, until, 1);
  if (lane == 0) before = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTold; ++i) {
    const double of_warp = sum(i);
    if (!p.is_passed() && of_warp > 0 && before + of_warp > number) {
      p.warp = lane * kTold + i;
      p.left = number - before;
    }
    before += of_warp;
  }
  p.warp = __reduce_min_sync(0xffffffffu, p.warp);
  p.left = __shfl_sync(0xffffffffu, p.left, (p.is_passed() ? p.warp / kTold : 0) & 31);
  return p;
}

struct ClusterRow {
  RowShared& shared;
  uint32_t* keys;  // [kSampleWarps * segment], this block's, after `shared` (none in greedy rows)
  int32_t vocab;
  int segment;
  uint32_t blocks;
  uint32_t warp;
  uint32_t lane;
  // Every warp has its part in each: who is two on knows that all have read the first. In the upper half, lists.
  uint32_t exchanges = 0;

  __device__ RowCut cut() const { return {static_cast<int>(blocks), segment}; }
  __device__ uint32_t rank() const { return ptx::cluster_rank(); }  // of this block

  __device__ int32_t first_id() const { return static_cast<int32_t>(me()) * segment; }
  __device__ uint32_t* warp_keys() const { return keys + warp * segment; }
  __device__ bool leads() const { return rank() == 0; }
  __device__ uint32_t me() const { return rank() * kSampleWarps + warp; }  // of the cluster's warps, in order of id
  __device__ uint32_t warps() const { return blocks * kSampleWarps; }      // of the cluster

  // f(keys of four neighbours, id of the first) for all of this warp's ids; a warp's lanes have neighbouring fours.
  template <int kUnroll = 1, typename F>
  __device__ __forceinline__ void for_each_four(F f) const {
    const uint4* mine = reinterpret_cast<const uint4*>(warp_keys()) + lane;
    const int32_t first = first_id() + static_cast<int32_t>(lane) * 4;
#pragma unroll kUnroll
    for (int i = 0; i < segment; i += kStretch) f(mine[i / 4], first + i);
  }

  // This warp's largest key, of which the row's other functions ask.
  __device__ __forceinline__ uint32_t set_largest(uint32_t of_thread) const {
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, of_thread);
    if (lane == 0) shared.largest[ptx::read_thread() / 32] = of_warp;
    __syncwarp();
    return of_warp;
  }
  __device__ __forceinline__ bool reaches(uint32_t key) const { return shared.largest[ptx::read_thread() / 32] >= key; }
  // The warp's bracket is not in registers while a search runs.
  __device__ __forceinline__ Bracket bracket() const { return shared.bracket[ptx::read_thread() / 32]; }
  __device__ __forceinline__ void keep(const Bracket& b) const {
    __syncwarp();
    if (lane == 0) shared.bracket[ptx::read_thread() / 32] = b;
    __syncwarp();
  }

  // Before anything else: the blocks' shared memory and mbarriers are there.
  __device__ __forceinline__ void meet() const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&shared.arrived[0]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.arrived[1]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.list_arrived), 1);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }

  // This exchange's half of mail and table.
  __device__ uint32_t half() const { return exchanges & 1; }
  __device__ __forceinline__ void expect(uint32_t bytes) const {
    if (threadIdx.x == 0) ptx::mbarrier_expect(ptx::shared_address(&shared.arrived[half()]), bytes);
  }
  __device__ __forceinline__ void wait() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.arrived[half()]), (exchanges >> 1) & 1);
    exchanges = (exchanges & 0xffff0000u) | ((exchanges + 1) & 3);
  }
  __device__ __forceinline__ void send(uint32_t to, const uint64_t* place, uint64_t value) const {
    ptx::store_async_8(address_in(to, place), address_in(to, &shared.arrived[half()]), value);
  }
  __device__ __forceinline__ void send_four(uint32_t to, const void* place, uint4 v) const {
    ptx::store_async_16(address_in(to, place), address_in(to, &shared.arrived[half()]), uint64_t{v.y} << 32 | v.x,
                        uint64_t{v.w} << 32 | v.z);
  }

  // The sums over all warps of kCount parts each: lane n of every warp of the cluster gets that of part n.
  __device__ __forceinline__ void set_part(int n, uint32_t value) const {
    if (lane == 0) shared.parts[warp][n] = value;
  }
  template <int kCount>
  __device__ __forceinline__ uint32_t add_up_parts() {
    static_assert(kCount <= kMaxValues);
    __syncthreads();
    const uint32_t thread = ptx::read_thread();  // or it is divided beforehand and kept
    if (thread < kCount * blocks) {
      const uint32_t n = thread / blocks;
      uint64_t sum = 0;
#pragma unroll
      for (int w = 0; w < kSampleWarps; ++w) sum += shared.parts[w][n];
      send(thread % blocks, &shared.mail[half()][rank()][n], sum);
    }
    const auto* mail = shared.mail[half()];
    expect(kCount * blocks * sizeof(uint64_t));
    wait();
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t b = 0; b < blocks; ++b) sum += static_cast<uint32_t>(mail[b][lane % kMaxValues]);
    return sum;
  }
  __device__ __forceinline__ uint32_t sum_of(uint32_t sums, int n) const { return __shfl_sync(0xffffffffu, sums, n); }
  // Part n of this warp as it was set, until the next are.
  __device__ __forceinline__ uint32_t part(int n) const { return static_cast<uint32_t>(shared.parts[warp][n]); }

  // The largest key and the lowest id that has it.
  __device__ __forceinline__ uint64_t largest(uint32_t key, int32_t id) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, key);
    const uint32_t lowest = __reduce_min_sync(0xffffffffu, key == most ? static_cast<uint32_t>(id) : 0xffffffffu);
    if (lane == 0) shared.parts[warp][0] = candidate(most, static_cast<int32_t>(lowest));
    __syncthreads();
    if (threadIdx.x < blocks) {
      uint64_t best = 0;
#pragma unroll
      for (int w = 0; w < kSampleWarps; ++w) best = max(best, shared.parts[w][0]);
      send(threadIdx.x, &shared.mail[half()][rank()][0], best);
    }
    const auto* mail = shared.mail[half()];
    expect(blocks * sizeof(uint64_t));
    wait();
    uint64_t best = 0;
    for (uint32_t b = 0; b < blocks; ++b) best = max(best, mail[b][0]);
    return best;
  }

  // Every thread gets what each warp of the cluster tells, in order of their ids.
  __device__ __forceinline__ const Told* tell(uint64_t word, double sum = 0) {
    const Told* all = shared.table[half()];
    if (lane < blocks) {
      ptx::store_async_16(address_in(lane, &all[me()]), address_in(lane, &shared.arrived[half()]), word,
                          static_cast<uint64_t>(__double_as_longlong(sum)));
    }
    expect(warps() * sizeof(Told));
    wait();
    return all;
  }

  // An entry of the list, of the n that the first block waits for.
  __device__ __forceinline__ void send_to_list(uint32_t place, uint32_t key, uint32_t id) const {
    ptx::store_async_8(address_in(0, &shared.list[place]), address_in(0, &shared.list_arrived),
                       uint64_t{key} << 32 | id);
  }
  __device__ __forceinline__ void wait_for_list(uint32_t n) {
    if (leads()) {
      if (threadIdx.x == 0)
        ptx::mbarrier_expect(ptx::shared_address(&shared.list_arrived), n * static_cast<uint32_t>(sizeof(uint64_t)));
      ptx::mbarrier_wait(ptx::shared_address(&shared.list_arrived), (exchanges >> 16) & 1);
    }
    exchanges += 0x10000;
  }
};

__device__ __forceinline__ ClusterRow make_row(RowShared& shared, const RowCut& cut, int32_t vocab,
                                               uint32_t exchanges = 0) {
  const uint32_t thread = ptx::read_thread();  // made again after a call, nothing of a row is in registers meanwhile
  return {shared,
          reinterpret_cast<uint32_t*>(&shared + 1),
          vocab,
          cut.segment,
          static_cast<uint32_t>(cut.blocks),
          thread / 32,
          thread % 32,
          exchanges};
}

}  // namespace nfp::cuda
