#include "backend/cuda/sampling/load_row.cuh"
#include "backend/cuda/sampling/sampling_kernels.h"
#include "backend/cuda/sampling/search.cuh"
#include "backend/philox.h"

namespace nfp::cuda {
namespace {

// The row's largest key, and the first warp that has it.
struct Largest {
  uint32_t key, warp;
};
__device__ __forceinline__ Largest largest_of(const ClusterRow& row, const Told* told) {
  uint32_t key = 0, warp = 0;
  for (uint32_t i = row.lane; i < row.warps(); i += 32) {
    const auto other = static_cast<uint32_t>(told[i].word);
    if (other > key) {
      key = other;
      warp = i;
    }
  }
  const uint32_t most = __reduce_max_sync(0xffffffffu, key);
  return {most, __reduce_min_sync(0xffffffffu, key == most ? warp : 0xffffffffu)};
}

// The first of this warp's ids that has the key.
__device__ __forceinline__ int32_t first_with(const ClusterRow& row, uint32_t wanted) {
  uint32_t first = 0xffffffffu;
  row.for_each_four([&](const uint4& four, int32_t id) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) first = key[j] == wanted ? min(first, static_cast<uint32_t>(id + j)) : first;
  });
  return static_cast<int32_t>(__reduce_min_sync(0xffffffffu, first));
}

// Weights of what is kept of a warp's tokens; 0 for others.
struct KeptWeights {
  const ClusterRow& row;
  Weigh weigh;
  uint32_t key;
  uint32_t ties;  // that this warp keeps

  // Of the lane's four ids in the stretch at i. `seen`: the warp's ties before it, and then also those in it.
  __device__ __forceinline__ void get(int i, uint32_t& seen, float (&w)[4]) const {
    const uint4 four = reinterpret_cast<const uint4*>(row.warp_keys())[i / 4 + static_cast<int>(row.lane)];
    const uint32_t of[4] = {four.x, four.y, four.z, four.w};
    uint32_t tie = 0;
    if (ties != Kept::kAll) {
      uint32_t equal = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) equal += of[j] == key ? 1 : 0;
      if (__ballot_sync(0xffffffffu, equal != 0) != 0) {
        const uint32_t until = warp_scan(equal, row.lane);
        tie = seen + until - equal;
        seen += __shfl_sync(0xffffffffu, until, 31);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool is_in = of[j] > key || (of[j] == key && tie < ties);
      tie += of[j] == key ? 1 : 0;
      w[j] = is_in ? weigh(of[j]) : 0.0f;
    }
  }
};

// The id where the running sum of this warp's weights passes `left`, or the last with a weight.
__device__ __forceinline__ int32_t draw_from_warp(const ClusterRow& row, double left, const KeptWeights& weights) {
  constexpr int kGroup = 4;  // stretches whose sums are found at once
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  const auto last_of = [&](const float(&w)[4], int i, uint32_t last) {  // plus one
#pragma unroll
    for (int j = 0; j < 4; ++j) last = w[j] > 0.0f ? static_cast<uint32_t>(first + i + j) + 1 : last;
    return last;
  };
  uint32_t seen = 0;
  float w[4];
  for (int i = 0; i < row.segment; i += kGroup * kStretch) {
    uint32_t seen_before = seen;
    float sum[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      sum[g] = 0;
      if (i + g * kStretch >= row.segment) continue;
      weights.get(i + g * kStretch, seen, w);
      sum[g] = (w[0] + w[1]) + (w[2] + w[3]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (float& of_stretch : sum) of_stretch += __shfl_xor_sync(0xffffffffu, of_stretch, offset);
    }
    int at = -1;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (at >= 0) continue;
      if (sum[g] > left) {
        at = i + g * kStretch;
      } else {
        left -= sum[g];
      }
    }
    if (at < 0) continue;
    if (weights.ties != Kept::kAll) {
      for (int before = i; before < at; before += kStretch) weights.get(before, seen_before, w);
    }
    weights.get(at, seen_before, w);
    const double of_lane = (w[0] + w[1]) + (w[2] + w[3]);
    double until = warp_scan(of_lane, row.lane) - of_lane;
    uint32_t crossed = 0xffffffffu;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      until += static_cast<double>(w[j]);
      if (crossed == 0xffffffffu && w[j] > 0.0f && until > left) crossed = static_cast<uint32_t>(first + at + j);
    }
    crossed = __reduce_min_sync(0xffffffffu, crossed);
    if (crossed == 0xffffffffu)  // rounding: the stretch's last
      crossed = __reduce_max_sync(0xffffffffu, last_of(w, at, 0)) - 1;
    return static_cast<int32_t>(crossed);
  }
  uint32_t last = 0;
  seen = 0;
  for (int i = 0; i < row.segment; i += kStretch) {
    weights.get(i, seen, w);
    last = last_of(w, i, last);
  }
  last = __reduce_max_sync(0xffffffffu, last);
  if (last > 0) return static_cast<int32_t>(last) - 1;
  uint32_t largest = 0;  // rounding to no weight at all
  row.for_each_four(
      [&](const uint4& four, int32_t) { largest = max(max(largest, max(four.x, four.y)), max(four.z, four.w)); });
  return first_with(row, __reduce_max_sync(0xffffffffu, largest));
}

struct Drawn {
  uint32_t warp;  // of the cluster, which has the token
  int32_t token;
};

// Draws in order of id given the weights of the row's warps, kTold of them a lane.
__device__ __forceinline__ Drawn draw_from_warps(const ClusterRow& row, const double (&sum)[kTold],
                                                 const KeptWeights& weights, double u) {
  const Passed passed = where_passed([&](uint32_t i) { return sum[i]; }, u, 0.0, row.lane);
  // Where rounding lets the sum pass nowhere: the last with a weight.
  const uint32_t owner = passed.is_passed() ? passed.warp : passed.last;
  const double left = passed.is_passed() ? passed.left : __longlong_as_double(0x7ff0000000000000ll);
  return {owner, owner == row.me() ? draw_from_warp(row, left, weights) : 0};
}

// What of a warp's tokens is kept weighs; all ties are, and the row's bracket knows what is from its upper end on.
__device__ __forceinline__ double weigh_within_bracket(const ClusterRow& row, uint32_t kept_key, const Weigh& weigh) {
  const uint32_t span = row.bracket().high - kept_key;
  double mine = 0;
  row.for_each_four<2>([&](const uint4& four, int32_t) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (key[j] - kept_key < span) mine += static_cast<double>(weigh(key[j]));
  });
  return warp_sum(mine) + row.bracket().mine_weight_high;
}

// The same where the warps have not weighed what is kept, or (is_in_bracket) only what is above the row's bracket.
__device__ __forceinline__ Drawn draw_from_row(ClusterRow& row, const Kept& kept, const Weigh& weigh, double u,
                                               bool is_in_bracket) {
  KeptWeights weights{row, weigh, kept.key, kept.ties};
  double mine = 0;
  if (is_in_bracket && kept.ties == Kept::kAll) {
    mine = weigh_within_bracket(row, kept.key, weigh);
  } else {
    if (kept.ties != Kept::kAll) {
      uint32_t equal = 0;
      row.for_each_four([&](const uint4& four, int32_t) {
        equal += (four.x == kept.key) + (four.y == kept.key) + (four.z == kept.key) + (four.w == kept.key);
      });
      const Told* all = row.tell(__reduce_add_sync(0xffffffffu, equal));
      const uint32_t me = row.me();
      uint32_t before = 0;
      for (uint32_t i = row.lane; i < me; i += 32) before += static_cast<uint32_t>(all[i].word);
      before = __reduce_add_sync(0xffffffffu, before);
      weights.ties = kept.ties > before ? kept.ties - before : 0;
    }
    uint32_t seen = 0;
#pragma unroll 2
    for (int i = 0; i < row.segment; i += kStretch) {
      float w[4];
      weights.get(i, seen, w);
      mine += static_cast<double>((w[0] + w[1]) + (w[2] + w[3]));
    }
    mine = warp_sum(mine);
  }
  const Told* told = row.tell(0, mine);
  double sum[kTold];
#pragma unroll
  for (uint32_t i = 0; i < kTold; ++i) {
    const uint32_t at = row.lane * kTold + i;
    sum[i] = at < row.warps() ? told[at].sum : 0.0;
  }
  return draw_from_warps(row, sum, weights, u);
}

// The smallest key whose weight is at least min_p, or the best.
__device__ __forceinline__ uint32_t lowest_key(const Weigh& weigh, float min_p, uint32_t best, uint32_t lane) {
  return first_key(kMinusInfinityKey, best, lane,
                   [&](uint32_t key) { return weigh.exact(key) >= static_cast<double>(min_p); });
}

// A key no larger than lowest_key()'s, and hardly smaller.
__device__ __forceinline__ uint32_t below_lowest_key(const SamplingRow& s, uint32_t best) {
  const float maximum = logit_of(best), down = logf(fminf(s.min_p, 1.0f)) * s.temperature;
  return min(key_of(maximum + down - 1e-6f * (fabsf(maximum) - down)), best);
}

// All of what is kept, for a search within.
__device__ __forceinline__ Bracket whole_of(ClusterRow& row, const Kept& kept, uint32_t best, const Weigh& weigh,
                                            float share) {
  const uint32_t next = min(kept.key + 1, best), threshold[kThresholds] = {kept.key, next, next, next};
  const double sums = measure<true>(row, best + 1, threshold, weigh);
  const auto count = [&](int t) { return static_cast<uint32_t>(row.sum_of(sums, t)); };
  const auto weight = [&](int t) { return row.sum_of(sums, kThresholds + t); };
  const double all = weight(0);
  if (kept.ties == Kept::kAll) return Bracket::of(share * all, kept.key, best, count(0), all);
  const uint32_t count_above = count(1);
  const double weight_above = weight(1);
  const bool is_above = kept.key < best;
  const double weight_kept = (is_above ? weight_above : 0.0) + kept.ties * static_cast<double>(weigh(kept.key));
  return Bracket::of(share * weight_kept, kept.key, best, (is_above ? count_above : 0) + kept.ties, weight_kept,
                     kept.ties);
}

class Limits {
 public:
  __device__ Limits(const SamplingRow& s, int32_t vocab)
      : bits_((s.top_k > 0 && s.top_k < vocab ? 1u : 0u) | (s.top_p < 1.0f ? 2u : 0u) | (s.min_p > 0.0f ? 4u : 0u)) {
    asm volatile("" : "+r"(bits_));  // or it is three registers
  }
  __device__ bool k() const { return (bits_ & 1u) != 0; }
  __device__ bool p() const { return (bits_ & 2u) != 0; }
  __device__ bool min() const { return (bits_ & 4u) != 0; }
  __device__ bool any() const { return bits_ != 0; }
  __device__ bool need_total() const { return !k() && (p() || !min()); }  // the weight of all tokens

 private:
  uint32_t bits_;
};

// A token for temperature > 0. `best` is finite; `told` are the warps' largest keys and, if a total is needed, what
// they weigh relative to those.
__device__ __forceinline__ Drawn draw(ClusterRow& row, const SamplingRow& s, uint32_t best, const Told* told) {
  const Weigh weigh{logit_of(best), 1.0f / s.temperature};
  const Limits limited(s, row.vocab);
  Kept kept;
  double total = 0;
  if (limited.need_total()) {
    double sum[kTold] = {};
#pragma unroll
    for (uint32_t i = 0; i < kTold; ++i) {
      const uint32_t at = row.lane * kTold + i;
      if (at < row.warps()) sum[i] = told[at].sum * static_cast<double>(weigh(static_cast<uint32_t>(told[at].word)));
      total += sum[i];
    }
    if (!limited.any()) return draw_from_warps(row, sum, {row, weigh, kept.key, kept.ties}, uniform(s.seed, s.draw));
    total = warp_sum(total);
  }
  row.shared.target = s.top_p * total;  // every thread the same; searches need the registers
  bool is_list = row.vocab <= kListSize;
  Candidates candidates;
  if (is_list) {
    candidates = count(row, kept, weigh);
  } else {
    // A bound that the warps' largest give: few tokens reach it, and in most rows they are enough.
    const uint32_t n = limited.k() ? static_cast<uint32_t>(s.top_k) : limited.p() ? row.warps() * 3 / 4 : 0;
    bool is_enough = true;
    // (No token weighs more than 1.)
    const bool is_hopeless = !limited.k() && limited.p() && row.shared.target > 4.0 * n;
    if (n <= row.warps() && !is_hopeless) {
      kept.key = max(n > 0 ? nth_largest(row, told, n, 0) : below_lowest_key(s, best), kLowestKey);
      candidates = count(row, kept, weigh);
      is_enough = limited.k() || !limited.p() || kept.key == kLowestKey || candidates.weight >= row.shared.target;
      is_list = is_enough && candidates.count <= kListSize;
    }
    if (!is_list) {
      Bracket b = Bracket::of(limited.k() ? s.top_k : row.shared.target, kMinusInfinityKey, best,
                              static_cast<uint32_t>(row.vocab), total);
      const bool is_counted = kept.key != kNaNKey;
      if (is_counted && is_enough) {
        b.low = kept.key;
        b.count_low = candidates.count;
        b.weight_low = candidates.weight;
        b.mine_low = candidates.mine;
      } else if (is_counted) {
        b.high = kept.key;
        b.count_high = candidates.count;
        b.weight_high = candidates.weight;
        b.mine_high = candidates.mine;
        __syncwarp();
        b.mine_weight_high = row.part(0);  // of count()
      }
      row.keep(b);
      if (limited.k()) {
        is_list = narrow<false>(row, weigh, 1.0f, kept);
        is_list |= s.top_k <= kListSize;
        if (!is_list && Limits(s, row.vocab).p()) {  // top-p of a top-k that is no list
          const Bracket whole = whole_of(row, kept, best, weigh, s.top_p);
          row.keep(whole);
          row.shared.target = whole.wanted;
        }
      }
      if (!is_list && Limits(s, row.vocab).p()) is_list = narrow<true>(row, weigh, s.temperature, kept);
      if (is_list) candidates = count(row, kept, weigh);
    }
  }
  const Limits limits_then(s, row.vocab);  // from shared memory again: a search needs the registers
  if (limits_then.min() && !is_list) {
    if (row.warp == 0) {  // one warp's exact weights are quicker than all warps'
      const uint32_t key = lowest_key(weigh, s.min_p, row.shared.best, row.lane);
      if (row.lane == 0) row.shared.bound[0] = key;
    }
    __syncthreads();
    const uint32_t low = row.shared.bound[0];
    if (low > kept.key) kept = {low, Kept::kAll};
  }
  if (!is_list)
    return draw_from_row(row, kept, weigh, uniform(s.seed, s.draw), limits_then.p() && kept.key < row.bracket().high);
  const int listed = collect(row, kept, kAnyKey, candidates);
  if (!row.leads()) return {0, 0};
  const ListLimits limits{limits_then.k() ? s.top_k : row.vocab,
                          row.vocab <= kListSize || (limits_then.k() && s.top_k <= kListSize),
                          limits_then.p() ? static_cast<double>(s.top_p) : 1.0, row.shared.target, s.min_p};
  return {0, draw_from_list(row.shared, listed, limits, weigh, uniform(s.seed, s.draw), row.warp, row.lane)};
}

// Of the raw logits, whose keys the row holds: log-probability and rank of `token`, and the top_n likeliest. After
// report_bound().
__device__ __forceinline__ void report(ClusterRow& row, uint32_t best, const float* logits, int32_t token,
                                       int32_t top_n, SampledRow* out, TokenLogprob* top) {
  const uint32_t bound = max(row.shared.bound[1], kMinusInfinityKey);
  const float minus_infinity = __uint_as_float(0xff800000u);
  const bool is_finite = is_finite_key(best);
  const Weigh weigh{is_finite ? logit_of(best) : 0.0f, 1.0f};
  const uint32_t own = max(key_of(logits[token]), kMinusInfinityKey);
  const bool has_likeliest = top_n > 0 && row.reaches(bound);
  uint32_t likely = 0;  // above the bound << 16, equal to it
  double sum = 0;
  uint32_t before = 0;
  row.for_each_four([&](const uint4& four, int32_t id) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
    const uint32_t limit = id + 3 < token ? own - 1 : own;  // ties count where they come before
    float part = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      part += weigh(key[j]);
      before += key[j] > limit ? 1 : 0;
    }
    if (has_likeliest) {
#pragma unroll
      for (int j = 0; j < 4; ++j) likely += key[j] > bound ? 0x10000u : key[j] == bound ? 1u : 0u;
    }
    if (id <= token && token < id + 4) {
#pragma unroll
      for (int j = 0; j < 3; ++j) before += key[j] == own && id + j < token ? 1 : 0;
    }
    sum += static_cast<double>(part);
  });
  Kept kept{bound, Kept::kAll};
  likely = __reduce_add_sync(0xffffffffu, likely);
  const Counted mine{likely >> 16, likely & 0xffffu};
  Candidates candidates =
      sum_up(row, row.tell(mine.word(__reduce_add_sync(0xffffffffu, before)), warp_sum(sum)), kept.ties);
  const double log_total = is_finite ? log(candidates.weight) : 0.0;
  const auto logprob_of = [&](uint32_t key) {
    if (!is_finite || key <= kMinusInfinityKey) return minus_infinity;
    return static_cast<float>(static_cast<double>(logit_of(key)) - weigh.maximum - log_total);
  };
  if (row.leads() && threadIdx.x == 0)
    *out = {token, logprob_of(own), static_cast<int32_t>(candidates.low_halves) + 1, is_finite ? 0 : 1};
  if (top_n <= 0) return;
  if (candidates.count > kListSize) {
    Bracket b = Bracket::of(top_n, bound, max(best, kMinusInfinityKey), candidates.count, 0.0);
    b.mine_low = mine.above + mine.equal;
    row.keep(b);
    narrow<false>(row, weigh, 1.0f, kept);
    candidates = count(row, kept, weigh);
  }
  const int n = collect(row, kept, kAnyKey, candidates);
  if (!row.leads()) return;
  sort_list(row.shared, n);
  for (int i = threadIdx.x; i < top_n; i += kSampleThreads) {
    const uint64_t entry = i < n ? row.shared.sorted[i] : 0;
    const auto key = static_cast<uint32_t>(entry >> 32);
    top[i] = key > kNaNKey
                 ? TokenLogprob{row.shared.list_id(static_cast<int>(~static_cast<uint32_t>(entry))), logprob_of(key)}
                 : TokenLogprob{-1, minus_infinity};
  }
}
// report()'s bound in shared memory, a key that top_n tokens reach if so many are there, where the row has been told
// its warps' largest keys.
__device__ __forceinline__ void report_bound(const ClusterRow& row, const Told* told, int32_t top_n) {
  if (top_n > 0 && row.vocab > kListSize && static_cast<uint32_t>(top_n) <= row.warps()) {
    nth_largest(row, told, static_cast<uint32_t>(top_n), 1);
  } else {
    if (threadIdx.x == 0) row.shared.bound[1] = kMinusInfinityKey;
    __syncthreads();
  }
}

struct Best {
  uint32_t key = kPaddingKey;
  int32_t id = 0;
  __device__ __forceinline__ void see(float logit, int32_t other_id) {  // in order of id
    const uint32_t other = key_of(logit);
    if (other > key) {
      key = other;
      id = other_id;
    }
  }
};
// This thread's, of a row that is not stored.
template <bool kAligned>
__device__ __forceinline__ Best best_of_row(const ClusterRow& row, const float* logits) {
  constexpr int kUnroll = 8;
  Best best;
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  for (int i = 0; i < row.segment; i += kUnroll * kStretch) {
    float4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch < row.segment) v[j] = load_four<kAligned>(logits, first + i + j * kStretch, row.vocab);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch >= row.segment) break;
      const int32_t id = first + i + j * kStretch;
      best.see(v[j].x, id);
      best.see(v[j].y, id + 1);
      best.see(v[j].z, id + 2);
      best.see(v[j].w, id + 3);
    }
  }
  return best;
}

extern __shared__ __align__(alignof(RowShared)) uint4 dynamic_shared[];

// The tokens of all rows into their histories, by the block that is the last of those that chose them.
__device__ __forceinline__ void append_when_last(const SampleCall& call, RowShared& shared) {
  const auto rows = static_cast<uint32_t>(call.logits.rows);
  __syncthreads();  // one of the block's threads has written the token
  if (threadIdx.x == 0) {
    __threadfence();
    shared.is_last = atomicAdd(call.counter, 1u) == rows - 1;
    __threadfence();
  }
  __syncthreads();
  if (shared.is_last == 0) return;
  for (uint32_t r = threadIdx.x; r < rows; r += kSampleThreads) {
    const int32_t slot = call.row[r].history_slot;
    if (slot < 0) continue;
    uint32_t* count = call.history.counts + int64_t{slot} * call.history.vocab + __ldcg(&call.out[r].token);
    atomicOr(count, 1u);
    atomicAdd(count, 2u);
  }
  if (threadIdx.x == 0) *call.counter = 0;
}

template <bool kAligned>
__global__ __launch_bounds__(kSampleThreads, 2) void sample_kernel(const SampleParams p) {
  const SampleCall& call = p.call;
  auto& shared = *reinterpret_cast<RowShared*>(dynamic_shared);
  ClusterRow row = make_row(shared, p.cut, call.logits.vocab);
  ptx::launch_dependents();
  row.meet();
  ptx::dependency_wait();
  const int32_t r = static_cast<int32_t>(blockIdx.x / row.blocks);
  const float* logits = call.logits.data + r * call.logits.ld;
  copy_row<kAligned>(row, logits);
  if (threadIdx.x < sizeof(SamplingRow) / 4)
    reinterpret_cast<uint32_t*>(&shared.row)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(call.row + r)[threadIdx.x];
  __syncthreads();
  const SamplingRow& s = shared.row;
  constexpr uint32_t kAdjusts = SamplingNeeds::kBias | SamplingNeeds::kMask | SamplingNeeds::kPenalties;
  Adjustment adjustment{};
  if ((call.needs & kAdjusts) != 0) adjustment = adjustment_of(call, s);
  if (adjustment.bias != nullptr) add_bias(row, adjustment);
  const uint32_t largest = adjustment.is_none() ? make_keys<false>(row, {}) : make_keys<true>(row, adjustment);
  if (threadIdx.x == 0) {
    shared.is_adjusted = !adjustment.is_none();
    shared.index = r;
  }
  const float factor = 1.0f / s.temperature;
  const bool draws = s.temperature > 0.0f && factor <= 3.402823466e38f;
  const uint32_t of_warp = row.set_largest(largest);
  const double weight = draws && Limits(s, row.vocab).need_total() ? weigh_warp(row, of_warp, factor) : 0.0;
  const Told* told = row.tell(of_warp, weight);
  const Largest best = largest_of(row, told);
  if ((call.needs & SamplingNeeds::kReport) != 0) report_bound(row, told, s.report);
  if (threadIdx.x == 0) shared.best = best.key;
  Drawn drawn{best.warp, 0};
  if (draws && is_finite_key(best.key)) {
    drawn = draw(row, s, best.key, told);
  } else if (best.warp == row.me() && best.key > kMinusInfinityKey) {
    drawn.token = first_with(row, best.key);
  }
  __syncthreads();
  const int64_t index = shared.index;
  if ((call.needs & SamplingNeeds::kReport) != 0 && s.report >= 0) {
    const auto token = static_cast<int32_t>(row.tell(static_cast<uint32_t>(drawn.token))[drawn.warp].word);
    const float* raw = call.logits.data + index * call.logits.ld;
    if (shared.is_adjusted) {
      copy_row<kAligned>(row, raw);
      told = row.tell(row.set_largest(make_keys<false>(row, {})));
      const uint32_t raw_best = largest_of(row, told).key;
      report_bound(row, told, s.report);
      if (threadIdx.x == 0) shared.best = raw_best;
      __syncthreads();
    }
    report(row, shared.best, raw, token, s.report, call.out + index, call.top + index * call.top_stride);
    drawn.warp = 0;
  } else if (drawn.warp == row.me() && row.lane == 0) {
    call.out[index] = {drawn.token, 0.0f, 0, is_finite_key(shared.best) ? 0 : 1};
  }
  if (call.history.counts != nullptr && drawn.warp / kSampleWarps == row.rank()) append_when_last(call, shared);
}

template <bool kAligned>
__global__ __launch_bounds__(kSampleThreads, 2) void greedy_kernel(const SampleParams p) {
  __shared__ RowShared shared;
  ClusterRow row = make_row(shared, p.cut, p.call.logits.vocab);
  ptx::launch_dependents();
  row.meet();
  ptx::dependency_wait();
  const auto r = static_cast<int64_t>(blockIdx.x / row.blocks);
  const Best mine = best_of_row<kAligned>(row, p.call.logits.data + r * p.call.logits.ld);
  const uint64_t best = row.largest(mine.key, mine.id);
  if (row.leads() && threadIdx.x == 0) {
    const auto best_key = static_cast<uint32_t>(best >> 32);
    const int32_t token = best_key > kMinusInfinityKey ? static_cast<int32_t>(~static_cast<uint32_t>(best)) : 0;
    p.call.out[r] = {token, 0.0f, 0, is_finite_key(best_key) ? 0 : 1};
  }
}

template <bool kAligned>
__global__ __launch_bounds__(kSampleThreads, 2) void score_kernel(const ScoreParams p) {
  const ScoreCall& call = p.call;
  auto& shared = *reinterpret_cast<RowShared*>(dynamic_shared);
  ClusterRow row = make_row(shared, p.cut, call.logits.vocab);
  ptx::launch_dependents();
  row.meet();
  ptx::dependency_wait();
  const auto r = static_cast<int64_t>(blockIdx.x / row.blocks);
  const float* logits = call.logits.data + r * call.logits.ld;
  copy_row<kAligned>(row, logits);
  const Told* told = row.tell(row.set_largest(make_keys<false>(row, {})));
  report_bound(row, told, call.top_n);
  report(row, largest_of(row, told).key, logits, call.target[r], call.top_n, call.out + r,
         call.top + r * call.top_stride);
}

__global__ void history_kernel(TokenCounts history, int32_t slot, const int32_t* tokens, int32_t prompt,
                               int32_t count) {
  uint32_t* counts = history.counts + int64_t{slot} * history.vocab;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    atomicOr(counts + tokens[i], 1u);
    if (i >= prompt) atomicAdd(counts + tokens[i], 2u);
  }
}

template <typename Kernel>
const void* as_function(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace

const void* sample_function(bool aligned, bool greedy) {
  if (greedy) return aligned ? as_function(&greedy_kernel<true>) : as_function(&greedy_kernel<false>);
  return aligned ? as_function(&sample_kernel<true>) : as_function(&sample_kernel<false>);
}
const void* score_function(bool aligned) {
  return aligned ? as_function(&score_kernel<true>) : as_function(&score_kernel<false>);
}
size_t sample_shared_bytes(const RowCut& cut) {
  return sizeof(RowShared) + static_cast<size_t>(kSampleWarps * cut.segment) * sizeof(uint32_t);
}
const void* history_function() { return as_function(&history_kernel); }

}  // namespace nfp::cuda
