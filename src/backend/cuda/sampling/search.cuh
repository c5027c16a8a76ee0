// Which tokens a limit keeps: a search over thresholds for the largest key from which on there are enough tokens
// (top-k) or enough weight (top-p), and the collection of the few that are left in one block's list.
#pragma once

#include <cstdint>

#include "backend/cuda/sampling/cluster_row.cuh"

namespace nfp::cuda {

inline constexpr int kThresholds = 4;  // a pass

// exp((logit - maximum) / temperature).
struct Weigh {
  float maximum;
  float factor;
  __device__ __forceinline__ float operator()(uint32_t key) const {  // 0 for NaN
    return expf((fmaxf(logit_of(key), __uint_as_float(0xff800000u)) - maximum) * factor);
  }
  __device__ __forceinline__ double exact(uint32_t key) const {
    const double logit = fmaxf(logit_of(key), __uint_as_float(0xff800000u));
    return exp((logit - maximum) * static_cast<double>(factor));
  }
};

// Tokens that are kept: keys above `key`, and of those with it the first `ties` in order of id.
struct Kept {
  static constexpr uint32_t kAll = 0xffffffffu;
  uint32_t key = kNaNKey;
  uint32_t ties = kAll;
};

// Keys from `low` on are enough, keys from `high` on are not; how many they are and what they weigh.
struct Bracket {
  uint32_t low, high;
  uint32_t count_low, count_high;
  double weight_low = 0, weight_high = 0;
  __device__ bool is_closed() const { return high - low <= 1; }
  __device__ bool fits_list() const { return count_low <= kListSize; }
};

struct Measured {
  uint32_t count[kThresholds];
  double weight[kThresholds];
};

// Counts, and weighs if kWeighs, the keys from each of the ascending thresholds on; all are in [low, high).
template <bool kWeighs>
__device__ __forceinline__ Measured measure(ClusterRow& row, const Bracket& b, const uint32_t (&threshold)[kThresholds],
                                            const Weigh& weigh) {
  Measured m{};
  float part[kThresholds] = {};
  const uint32_t span = b.high - threshold[0];
  row.for_each_four<kWeighs ? 1 : 4>([&](const uint4& four, int32_t) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key[j] - threshold[0] >= span) continue;
      float w = 0.0f;
      if constexpr (kWeighs) w = weigh(key[j]);
#pragma unroll
      for (int t = 0; t < kThresholds; ++t) {
        const bool is_in = key[j] >= threshold[t];
        m.count[t] += is_in ? 1 : 0;
        if constexpr (kWeighs) part[t] += is_in ? w : 0.0f;
      }
    }
  });
  if constexpr (kWeighs) {
    double v[2 * kThresholds];
#pragma unroll
    for (int t = 0; t < kThresholds; ++t) {
      v[t] = __reduce_add_sync(0xffffffffu, m.count[t]);
      v[kThresholds + t] = part[t];
    }
    row.add_up<kThresholds>(v);
#pragma unroll
    for (int t = 0; t < kThresholds; ++t) {
      m.count[t] = static_cast<uint32_t>(v[t]);
      m.weight[t] = v[kThresholds + t] + b.weight_high;
    }
  } else {
    row.add_up(m.count);
  }
#pragma unroll
  for (int t = 0; t < kThresholds; ++t) m.count[t] += b.count_high;
  return m;
}

// What has to be reached: a count, a weight, or a share of the weight of all that is in the bracket.
struct Goal {
  enum class Kind { kCount, kWeight, kShare };
  Kind kind;
  double wanted;
};

// Thresholds for a pass. First guesses go by distance from the largest logit, since what models give is peaked; then
// the bracket is cut evenly, first between its logits and, where that settles nothing, between its keys.
__device__ __forceinline__ void choose_thresholds(const Bracket& b, int pass, float maximum, float scale,
                                                  uint32_t (&threshold)[kThresholds]) {
  constexpr int kPassesByLogit = 10;
  const float near[kThresholds] = {16.0f, 10.0f, 6.0f, 3.0f}, far[kThresholds] = {4096.0f, 512.0f, 128.0f, 40.0f};
  const bool has_low = b.low > kMinusInfinityKey;
  const float low = logit_of(b.low), high = logit_of(b.high - 1);
#pragma unroll
  for (int t = 0; t < kThresholds; ++t) {
    uint32_t key = 0;
    if (pass == 0 || (pass == 1 && !has_low)) {
      key = key_of(maximum - (pass == 0 ? near[t] : far[t]) * scale);
    } else if (has_low && pass < kPassesByLogit) {
      key = key_of(low + (high - low) * (static_cast<float>(t + 1) / (kThresholds + 1)));
    } else {
      key = b.low + static_cast<uint32_t>(uint64_t{b.high - b.low} * static_cast<uint32_t>(t + 1) / (kThresholds + 1));
    }
    threshold[t] = min(max(key, b.low), b.high - 1);
  }
}

// Narrows the bracket until what it holds fits into a list or is settled. A share becomes the weight that it is.
template <bool kWeighs>
__device__ __forceinline__ void search(ClusterRow& row, Bracket& b, Goal& goal, const Weigh& weigh, float scale) {
  for (int pass = 0; pass == 0 || (!b.is_closed() && !b.fits_list()); ++pass) {
    uint32_t threshold[kThresholds];
    choose_thresholds(b, pass, weigh.maximum, scale, threshold);
    if (kWeighs && pass == 0) threshold[0] = b.low;
    const Measured m = measure<kWeighs>(row, b, threshold, weigh);
    if (kWeighs && pass == 0) {
      b.weight_low = m.weight[0];
      if (goal.kind == Goal::Kind::kShare) goal.wanted *= b.weight_low;
    }
    bool is_enough = true;
#pragma unroll
    for (int t = 0; t < kThresholds; ++t) {
      if (!is_enough || threshold[t] <= b.low) continue;  // known
      is_enough = (goal.kind == Goal::Kind::kCount ? m.count[t] : m.weight[t]) >= goal.wanted;
      if (is_enough) {
        b.low = threshold[t];
        b.count_low = m.count[t];
        b.weight_low = m.weight[t];
      } else {
        b.high = threshold[t];
        b.count_high = m.count[t];
        b.weight_high = m.weight[t];
      }
    }
  }
}

// What a settled bracket keeps of the tokens that have its key, to reach a weight; `most` of them at most.
__device__ __forceinline__ uint32_t ties_for(const Bracket& b, double wanted, double most, const Weigh& weigh) {
  const double each = weigh(b.low);
  const double more = each > 0 ? ceil((wanted - b.weight_high) / each) : 1.0;
  return static_cast<uint32_t>(fmin(fmax(more, 1.0), most));
}

// The kept tokens into the list of the cluster's first block, in order of id; returns how many they are, at most
// kListSize. Every block has written when it returns.
__device__ __forceinline__ int collect(ClusterRow& row, const Kept& kept) {
  uint32_t above = 0, equal = 0;
  row.for_each_four<4>([&](const uint4& four, int32_t) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      above += key[j] > kept.key ? 1 : 0;
      equal += key[j] == kept.key ? 1 : 0;
    }
  });
  above = __reduce_add_sync(0xffffffffu, above);
  equal = __reduce_add_sync(0xffffffffu, equal);
  const uint64_t* all = row.tell(uint64_t{above} << 32 | equal);
  const uint32_t me = row.rank * kSampleWarps + row.warp;
  uint32_t sums[4] = {};  // above before, equal before, above, equal
  for (uint32_t i = row.lane; i < row.blocks * kSampleWarps; i += 32) {
    const auto a = static_cast<uint32_t>(all[i] >> 32), e = static_cast<uint32_t>(all[i]);
    sums[0] += i < me ? a : 0;
    sums[1] += i < me ? e : 0;
    sums[2] += a;
    sums[3] += e;
  }
#pragma unroll
  for (uint32_t& sum : sums) sum = __reduce_add_sync(0xffffffffu, sum);
  uint32_t above_before = sums[0], equal_before = sums[1];
  if (above + equal > 0) {
    row.for_each_four([&](const uint4& four, int32_t id) {
      const uint32_t key[4] = {four.x, four.y, four.z, four.w};
      uint32_t mine = 0;  // above, and equal << 16
#pragma unroll
      for (int j = 0; j < 4; ++j) mine += (key[j] > kept.key ? 1u : 0u) + (key[j] == kept.key ? 1u << 16 : 0u);
      if (__ballot_sync(0xffffffffu, mine != 0) == 0) return;
      const uint32_t until = warp_scan(mine, row.lane);
      uint32_t a = above_before + ((until - mine) & 0xffffu), e = equal_before + ((until - mine) >> 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_equal = key[j] == kept.key;
        if (key[j] > kept.key || (is_equal && e < kept.ties)) {
          const uint32_t place = a + min(e, kept.ties);
          if (place < kListSize) {
            store_remote(&row.shared.list_key[place], 0, key[j]);
            store_remote(&row.shared.list_id[place], 0, static_cast<uint32_t>(id + j));
          }
        }
        a += key[j] > kept.key ? 1 : 0;
        e += is_equal ? 1 : 0;
      }
      const uint32_t sum = __shfl_sync(0xffffffffu, until, 31);
      above_before += sum & 0xffffu;
      equal_before += sum >> 16;
    });
  }
  ptx::cluster_sync();
  return static_cast<int>(min(sums[2] + min(sums[3], kept.ties), uint32_t{kListSize}));
}

// ---- in the list's block -------------------------------------------------------------------------------------------

// shared.sorted: the list's n entries, likeliest first, then zeros up to a power of two. (Bitonic: Batcher, "Sorting
// networks and their applications", AFIPS 1968.)
__device__ __forceinline__ void sort_list(RowShared& shared, int n) {
  int size = 64;
  while (size < n) size *= 2;
  for (int i = threadIdx.x; i < size; i += kSampleThreads)
    shared.sorted[i] = i < n ? uint64_t{shared.list_key[i]} << 32 | ~static_cast<uint32_t>(i) : 0;
  __syncthreads();
  const int pair = threadIdx.x;
  for (int length = 2; length <= size; length *= 2) {
    for (int stride = length / 2; stride > 0; stride /= 2) {
      if (2 * pair < size) {
        const int i = 2 * pair - (pair & (stride - 1)), j = i + stride;
        const uint64_t a = shared.sorted[i], b = shared.sorted[j];
        const bool is_descending = (i & length) == 0;
        if ((a < b) == is_descending) {
          shared.sorted[i] = b;
          shared.sorted[j] = a;
        }
      }
      // Pairs at most 32 apart stay within a warp's 64 entries.
      const int next = stride > 1 ? stride / 2 : length;
      if (stride > 32 || next > 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// Sums up to and with entry 2 * thread and the one after it, and of all.
struct PairScan {
  double first, second, total;
};
__device__ __forceinline__ PairScan scan_pairs(RowShared& shared, double a, double b, uint32_t warp, uint32_t lane) {
  const double until = warp_scan(a + b, lane);
  __syncthreads();
  if (lane == 31) shared.scan[warp] = until;
  __syncthreads();
  const double of_warps = warp_scan(lane < kSampleWarps ? shared.scan[lane] : 0.0, lane);
  const double total = __shfl_sync(0xffffffffu, of_warps, 31);
  double before = __shfl_sync(0xffffffffu, of_warps, (warp - 1) & 31);
  if (warp == 0) before = 0;
  const double previous = __shfl_up_sync(0xffffffffu, until, 1);
  if (lane > 0) before += previous;
  return {before + a, before + a + b, total};
}
// The lowest of the block's values, kept to all threads.
__device__ __forceinline__ int lowest_of(RowShared& shared, int value) {
  __syncthreads();
  if (threadIdx.x == 0) shared.lowest = INT32_MAX;
  __syncthreads();
  const int32_t of_warp = __reduce_min_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) atomicMin(&shared.lowest, of_warp);
  __syncthreads();
  return shared.lowest;
}

// Limits that act on a list, and the draw.
struct ListLimits {
  int top_k;      // at most so many
  bool of_list;   // share counts from the weight of the kept list, not of all
  double share;   // top-p, 1 = off
  double target;  // weight wanted where the list does not decide it (not of_list)
  float min_p;    // 0 = off
  uint32_t best_key;
};
__device__ __forceinline__ int32_t draw_from_list(RowShared& shared, int n, const ListLimits& limits,
                                                  const Weigh& weigh, double u, uint32_t warp, uint32_t lane) {
  sort_list(shared, n);
  const int t = static_cast<int>(threadIdx.x);
  int kept = min(n, limits.top_k);
  const auto sorted_key = [&](int i) { return static_cast<uint32_t>(shared.sorted[i] >> 32); };
  const double w0 = 2 * t < kept ? weigh.exact(sorted_key(2 * t)) : 0.0;
  const double w1 = 2 * t + 1 < kept ? weigh.exact(sorted_key(2 * t + 1)) : 0.0;
  if (limits.share < 1.0) {
    const PairScan until = scan_pairs(shared, w0, w1, warp, lane);
    const double target = limits.of_list ? limits.share * until.total : limits.target;
    const int reached = 2 * t < kept && until.first >= target        ? 2 * t
                        : 2 * t + 1 < kept && until.second >= target ? 2 * t + 1
                                                                     : INT32_MAX;
    const int last = lowest_of(shared, reached);
    if (last < kept) kept = last + 1;
  }
  if (limits.min_p > 0.0f) {
    const auto is_cut = [&](int i, double w) {
      return i < kept && sorted_key(i) != limits.best_key && w < static_cast<double>(limits.min_p);
    };
    const int cut = lowest_of(shared, is_cut(2 * t, w0) ? 2 * t : is_cut(2 * t + 1, w1) ? 2 * t + 1 : INT32_MAX);
    kept = max(1, min(kept, cut));
  }
  // Whoever is not less likely than the last, in order of id.
  const uint64_t last = shared.sorted[kept - 1];
  const auto weight_at = [&](int i) {
    if (i >= n) return 0.0;
    const uint64_t entry = uint64_t{shared.list_key[i]} << 32 | ~static_cast<uint32_t>(i);
    return entry >= last ? weigh.exact(shared.list_key[i]) : 0.0;
  };
  const double a = weight_at(2 * t), b = weight_at(2 * t + 1);
  const PairScan until = scan_pairs(shared, a, b, warp, lane);
  const double wanted = u * until.total;
  const int crossed = a > 0 && until.first > wanted ? 2 * t : b > 0 && until.second > wanted ? 2 * t + 1 : INT32_MAX;
  int chosen = lowest_of(shared, crossed);
  if (chosen == INT32_MAX) {  // rounding: the last with a weight
    chosen = -lowest_of(shared, b > 0 ? -(2 * t + 1) : a > 0 ? -2 * t : 0);
  }
  return shared.list_id[chosen];
}

}  // namespace nfp::cuda
