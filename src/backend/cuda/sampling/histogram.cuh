// Where a row's tokens reach a number, in one pass: they are counted by how far they are below the largest.
#pragma once

#include <cstdint>

#include "backend/cuda/sampling/cluster_row.cuh"

namespace nfp::cuda {

inline constexpr uint32_t kBinsPerBlock = 256;
static_assert(kBinsPerBlock * sizeof(uint32_t) * kSampleBlocks <= sizeof(RowShared::sorted));
static_assert(kBinsPerBlock * sizeof(uint32_t) * kSampleBlocks <= sizeof(RowShared::list));

// The smallest key above `low` and below `high` that is enough, or `high`; what is enough for a key is for all above
// it. 32 keys at a time, by a whole warp.
template <typename F>
__device__ __forceinline__ uint32_t first_key(uint32_t low, uint32_t high, uint32_t lane, const F& is_enough) {
  while (high - low > 1) {
    const uint64_t span = high - low;
    const uint32_t key = low + static_cast<uint32_t>(span * (lane + 1) / 33);
    const uint32_t enough = __ballot_sync(0xffffffffu, key > low && is_enough(key));
    const int first = enough != 0 ? __ffs(static_cast<int>(enough)) - 1 : 32;
    const uint32_t new_high = __shfl_sync(0xffffffffu, key, first & 31),
                   new_low = __shfl_sync(0xffffffffu, key, (first - 1) & 31);
    if (first < 32) high = new_high;
    if (first > 0) low = max(low, new_low);
  }
  return high;
}

// Bins of equal width down from the largest logit, kDepth in all; the last has whatever is further down.
class Bins {
 public:
  __device__ Bins(float largest, uint32_t blocks)
      : largest_(largest),
        rate_(static_cast<float>(kBinsPerBlock * blocks) / kDepth),
        count_(static_cast<int32_t>(kBinsPerBlock * blocks)) {}
  __device__ int32_t count() const { return count_; }
  // Otherwise numbers round to too few bins.
  __device__ bool are_distinct() const { return fabsf(largest_) * rate_ < 4194304.0f; }
  // Of a finite key. It never rises with the key, whatever is rounded.
  __device__ __forceinline__ int32_t of(uint32_t key) const {
    const float at = __fmaf_rn(logit_of(key), -rate_, zero()), last = kZero + static_cast<float>(count_ - 1);
    return static_cast<int32_t>(__float_as_uint(fminf(fmaxf(at, kZero), last)) & 0x7fffffu);
  }
  // The smallest key in this bin or above it; the one after `best` if none is. By a whole warp.
  __device__ __forceinline__ uint32_t first_key_of(int32_t bin, uint32_t best, uint32_t lane) const {
    if (bin < 0) return best + 1;
    if (bin >= count_ - 1) return kLowestKey;
    const auto is_in = [&](uint32_t key) { return of(key) <= bin; };
    // It is where of()'s sum is half way to the next bin, or a key or two beside it.
    const float between = (zero() - kZero - static_cast<float>(bin) - 0.5f) / rate_;
    const uint32_t from = min(max(key_of(between), kLowestKey + 16), best - 15) - 16;
    const uint32_t in = __ballot_sync(0xffffffffu, is_in(from + lane));
    if (in != 0 && (in & 1u) == 0) return min(from + static_cast<uint32_t>(__ffs(static_cast<int>(in))) - 1, best + 1);
    return first_key(kMinusInfinityKey, best + 1, lane, is_in);
  }

 private:
  static constexpr float kDepth = 16.0f;
  static constexpr float kZero = 8388608.0f;  // 2^23: integers from here on
  __device__ float zero() const { return __fmaf_rn(largest_, rate_, kZero); }

  float largest_, rate_;
  int32_t count_;
};

// The bin with which the tokens below the bracket are as many as it lacks, or the last.
__device__ __forceinline__ int32_t bin_of(ClusterRow& row, const Bins& bins) {
  auto* count = reinterpret_cast<uint32_t*>(row.shared.sorted);
  const auto* from = reinterpret_cast<const uint32_t(*)[kBinsPerBlock]>(row.shared.list);
  const uint32_t thread = threadIdx.x;
  for (auto i = static_cast<int32_t>(thread); i < bins.count(); i += kSampleThreads) count[i] = 0;
  __syncthreads();
  const Bracket bracket = row.bracket();
  const uint32_t span = bracket.high - kLowestKey;
  row.for_each_four([&](const uint4& four, int32_t) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (key[j] - kLowestKey < span) atomicAdd(count + bins.of(key[j]), 1u);
  });
  __syncthreads();
  // Each block adds up its share of the bins: four of them from each of these threads.
  constexpr uint32_t kSenders = kBinsPerBlock / 4;
  if (thread < row.blocks * kSenders)
    row.send_four(thread / kSenders, from[row.rank()] + thread % kSenders * 4,
                  reinterpret_cast<const uint4*>(count)[thread]);
  row.expect(row.blocks * kBinsPerBlock * sizeof(uint32_t));
  row.wait();
  const uint32_t place = row.warp * 32 + row.lane;
  const auto bin = static_cast<int32_t>(row.rank() * kBinsPerBlock + place);
  uint32_t tokens = 0;
  if (place < kBinsPerBlock)
    for (uint32_t b = 0; b < row.blocks; ++b) tokens += from[b][place];
  const float until = warp_scan(static_cast<float>(tokens), row.lane);
  const Told* told = row.tell(0, static_cast<double>(__shfl_sync(0xffffffffu, until, 31)));
  const auto of_warp = [&](uint32_t i) {
    const uint32_t at = row.lane * kTold + i;
    return at < row.warps() ? told[at].sum : 0.0;
  };
  const double to_pass = static_cast<double>(bracket.wanted - bracket.count_high) - 0.5;
  const Passed passed = where_passed(of_warp, to_pass, row.lane);
  const uint32_t lanes = __ballot_sync(0xffffffffu, static_cast<double>(until) > passed.left);
  const auto found = static_cast<uint32_t>(bin) - row.lane + (lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1u : 31u);
  told = row.tell(found);  // of which one counts
  return passed.is_passed() ? static_cast<int32_t>(told[passed.warp].word) : bins.count() - 1;
}

}  // namespace nfp::cuda
