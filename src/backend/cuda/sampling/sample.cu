#include "backend/cuda/sampling/sampling_kernels.h"
#include "backend/cuda/sampling/search.cuh"
#include "backend/philox.h"

namespace nfp::cuda {
namespace {

// Four neighbouring logits; NaN past the vocabulary.
template <bool kAligned>
__device__ __forceinline__ float4 load_four(const float* logits, int32_t id, int32_t vocab) {
  if (kAligned && id + 4 <= vocab) return *reinterpret_cast<const float4*>(logits + id);
  const float none = __uint_as_float(0x7fffffffu);
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = id + j < vocab ? logits[id + j] : none;
  return make_float4(v[0], v[1], v[2], v[3]);
}

struct Best {
  uint32_t key = kPaddingKey;
  int32_t id = 0;
  __device__ __forceinline__ void see(uint32_t other, int32_t other_id) {  // in order of id
    if (other > key) {
      key = other;
      id = other_id;
    }
  }
};

// The keys of logits, kStored of them in shared memory, and the largest.
template <bool kAligned, bool kStored, int kUnroll>
__device__ __forceinline__ Best load_row(const ClusterRow& row, const float* logits) {
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
      const int at = i + j * kStretch;
      if (at >= row.segment) break;
      const int32_t id = first + at;
      uint4 key = make_uint4(key_of(v[j].x), key_of(v[j].y), key_of(v[j].z), key_of(v[j].w));
      best.see(key.x, id);
      best.see(key.y, id + 1);
      best.see(key.z, id + 2);
      best.see(key.w, id + 3);
      if constexpr (kStored) {
        if (id + 3 >= row.vocab) {
          uint32_t* four[4] = {&key.x, &key.y, &key.z, &key.w};
#pragma unroll
          for (int q = 0; q < 4; ++q) *four[q] = id + q < row.vocab ? *four[q] : kPaddingKey;
        }
        reinterpret_cast<uint4*>(row.warp_keys())[at / 4 + row.lane] = key;
      }
    }
  }
  return best;
}

struct Adjustment {
  const LogitBias* bias;  // of the row; null = none, likewise below
  int32_t bias_count;
  const uint32_t* allowed;
  int32_t allowed_words;
  const uint32_t* counts;
  float repetition, presence, frequency;
  __device__ bool is_none() const { return bias == nullptr && allowed == nullptr && counts == nullptr; }
};
__device__ __forceinline__ Adjustment adjustment_of(const SampleCall& call, const SamplingRow& s) {
  Adjustment a{};
  if (call.bias != nullptr && s.bias_count > 0) {
    a.bias = call.bias + s.bias_first;
    a.bias_count = s.bias_count;
  }
  if (call.allowed != nullptr && s.allowed_row >= 0) {
    a.allowed = call.allowed + int64_t{s.allowed_row} * call.allowed_words;
    a.allowed_words = call.allowed_words;
  }
  if (call.history.counts != nullptr && s.history_slot >= 0 &&
      (s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f)) {
    a.counts = call.history.counts + int64_t{s.history_slot} * call.history.vocab;
    a.repetition = s.repetition_penalty;
    a.presence = s.presence_penalty;
    a.frequency = s.frequency_penalty;
  }
  return a;
}

// load_row with bias, mask and penalties, in this order.
template <bool kAligned>
__device__ __forceinline__ Best load_adjusted(const ClusterRow& row, const float* logits, const Adjustment& a) {
  float4* mine = reinterpret_cast<float4*>(row.warp_keys()) + row.lane;
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  if (a.bias != nullptr) {  // tokens are scattered: first the logits, then the biases on top
#pragma unroll 4
    for (int i = 0; i < row.segment; i += kStretch) mine[i / 4] = load_four<kAligned>(logits, first + i, row.vocab);
    __syncthreads();
    const auto begin = static_cast<int32_t>(row.rank * kSampleWarps) * row.segment;
    const int32_t end = min(row.vocab, begin + kSampleWarps * row.segment);
    for (int i = threadIdx.x; i < a.bias_count; i += kSampleThreads) {
      const LogitBias bias = a.bias[i];
      if (bias.token >= begin && bias.token < end) reinterpret_cast<float*>(row.keys)[bias.token - begin] += bias.value;
    }
    __syncthreads();
  }
  Best best;
#pragma unroll 2
  for (int i = 0; i < row.segment; i += kStretch) {
    const int32_t id = first + i;
    const float4 four = a.bias != nullptr ? mine[i / 4] : load_four<kAligned>(logits, id, row.vocab);
    float v[4] = {four.x, four.y, four.z, four.w};
    if (a.allowed != nullptr) {  // four ids lie in one word
      const uint32_t bits = id / 32 < a.allowed_words ? a.allowed[id / 32] >> (id % 32) : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = ((bits >> j) & 1u) != 0 ? v[j] : __uint_as_float(0xff800000u);
    }
    if (a.counts != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t count = id + j < row.vocab ? a.counts[id + j] : 0;
        if (count == 0) continue;
        v[j] = v[j] > 0.0f ? v[j] / a.repetition : v[j] * a.repetition;
        const uint32_t generated = count / 2;  // (rounded like the CPU's: no fused multiply-add)
        if (generated > 0) {
          v[j] = __fsub_rn(v[j], __fadd_rn(a.presence, __fmul_rn(a.frequency, static_cast<float>(generated))));
        }
      }
    }
    uint32_t key[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      key[j] = id + j < row.vocab ? key_of(v[j]) : kPaddingKey;
      best.see(key[j], id + j);
    }
    reinterpret_cast<uint4*>(mine)[i / 4] = make_uint4(key[0], key[1], key[2], key[3]);
  }
  return best;
}

// The id where the running sum of this warp's weights passes `left`, or the last with a weight.
template <typename ForEachWeight>
__device__ __forceinline__ int32_t draw_from_warp(const ClusterRow& row, double left,
                                                  const ForEachWeight& for_each_weight) {
  int32_t chosen = -1;
  uint32_t candidate = 0;  // the last id with a weight, plus one
  for_each_weight([&](const float(&w)[4], int32_t id) {
    if (chosen >= 0) return;
    // Which of 128 ids it is matters in one stretch only: the others are just added up.
    const float of_lane = (w[0] + w[1]) + (w[2] + w[3]);
    float of_all = of_lane;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) of_all += __shfl_xor_sync(0xffffffffu, of_all, offset);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (w[j] > 0.0f) candidate = static_cast<uint32_t>(id + j) + 1;
    }
    if (of_all <= left) {
      left -= of_all;
      return;
    }
    double until = warp_scan(static_cast<double>(of_lane), row.lane) - of_lane;
    uint32_t crossed = 0xffffffffu;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      until += static_cast<double>(w[j]);
      if (crossed == 0xffffffffu && w[j] > 0.0f && until > left) crossed = static_cast<uint32_t>(id + j);
    }
    crossed = __reduce_min_sync(0xffffffffu, crossed);
    if (crossed != 0xffffffffu) {
      chosen = static_cast<int32_t>(crossed);
    } else {
      left = 0;  // rounding: the next with a weight
    }
  });
  candidate = __reduce_max_sync(0xffffffffu, candidate);
  if (chosen < 0) chosen = candidate > 0 ? static_cast<int32_t>(candidate) - 1 : 0;
  return chosen;
}

// Draws in order of id from what is kept of a row too flat for a list.
__device__ __forceinline__ int32_t draw_from_row(ClusterRow& row, const Kept& kept, const Weigh& weigh, double u) {
  constexpr uint32_t kTable = kSampleBlocks * kSampleWarps / 32;  // entries a lane
  const uint32_t warps = row.blocks * kSampleWarps, me = row.rank * kSampleWarps + row.warp;
  uint32_t ties = Kept::kAll;  // that this warp keeps
  if (kept.ties != Kept::kAll) {
    uint32_t equal = 0;
    row.for_each_four([&](const uint4& four, int32_t) {
      equal += (four.x == kept.key) + (four.y == kept.key) + (four.z == kept.key) + (four.w == kept.key);
    });
    const uint64_t* all = row.tell(__reduce_add_sync(0xffffffffu, equal));
    uint32_t before = 0;
    for (uint32_t i = row.lane; i < me; i += 32) before += static_cast<uint32_t>(all[i]);
    before = __reduce_add_sync(0xffffffffu, before);
    ties = kept.ties > before ? kept.ties - before : 0;
  }
  // f(four weights, id of the first), ids in order; a warp's lanes together.
  const auto for_each_weight = [&](auto f) {
    uint32_t seen = 0;  // ties
    row.for_each_four([&](const uint4& four, int32_t id) {
      const uint32_t key[4] = {four.x, four.y, four.z, four.w};
      float w[4];
      uint32_t equal = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) equal += key[j] == kept.key ? 1 : 0;
      uint32_t tie = 0;
      if (ties != Kept::kAll && __ballot_sync(0xffffffffu, equal != 0) != 0) {
        const uint32_t until = warp_scan(equal, row.lane);
        tie = seen + until - equal;
        seen += __shfl_sync(0xffffffffu, until, 31);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_tie = key[j] == kept.key;
        const bool is_in = key[j] > kept.key || (is_tie && tie < ties);
        tie += is_tie ? 1 : 0;
        w[j] = is_in ? weigh(key[j]) : 0.0f;
      }
      f(w, id);
    });
  };
  double mine = 0;
  for_each_weight([&](const float(&w)[4], int32_t) { mine += static_cast<double>((w[0] + w[1]) + (w[2] + w[3])); });
  mine = warp_sum(mine);
  const uint64_t* all = row.tell(static_cast<uint64_t>(__double_as_longlong(mine)));
  double sum[kTable], of_lane = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTable; ++i) {
    const uint32_t at = row.lane * kTable + i;
    sum[i] = at < warps ? __longlong_as_double(static_cast<int64_t>(all[at])) : 0.0;
    of_lane += sum[i];
  }
  const double until = warp_scan(of_lane, row.lane);
  const double wanted = u * __shfl_sync(0xffffffffu, until, 31);
  // The warp where the running sum passes what is wanted; the last with a weight where rounding lets it pass nowhere.
  uint32_t at = 0xffffffffu, last = 0;
  double before = __shfl_up_sync(0xffffffffu, until, 1);
  if (row.lane == 0) before = 0;
  double left = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTable; ++i) {
    if (sum[i] > 0) last = row.lane * kTable + i;
    if (at == 0xffffffffu && sum[i] > 0 && before + sum[i] > wanted) {
      at = row.lane * kTable + i;
      left = wanted - before;
    }
    before += sum[i];
  }
  const uint32_t owner = __reduce_min_sync(0xffffffffu, at);
  left = __shfl_sync(0xffffffffu, left, (owner == 0xffffffffu ? 0 : owner / kTable) & 31);
  last = __reduce_max_sync(0xffffffffu, last);
  if (me == (owner == 0xffffffffu ? last : owner)) {
    if (owner == 0xffffffffu) left = __longlong_as_double(0x7ff0000000000000ll);
    const int32_t chosen = draw_from_warp(row, left, for_each_weight);
    if (row.lane < row.blocks) store_remote(&row.shared.token, row.lane, static_cast<uint32_t>(chosen));
  }
  ptx::cluster_sync();
  return row.shared.token;
}

// The smallest key whose weight is at least min_p: 32 keys at a time.
__device__ __forceinline__ uint32_t lowest_key(const Weigh& weigh, float min_p, uint32_t best, uint32_t lane) {
  uint32_t low = kMinusInfinityKey, high = best;  // not enough; enough, or the best
  while (high - low > 1) {
    const uint64_t span = high - low;
    const uint32_t key = low + static_cast<uint32_t>(span * (lane + 1) / 33);
    const bool is_enough = key > low && weigh.exact(key) >= static_cast<double>(min_p);
    const uint32_t enough = __ballot_sync(0xffffffffu, is_enough);
    const int first = enough != 0 ? __ffs(static_cast<int>(enough)) - 1 : 32;
    const uint32_t new_high = __shfl_sync(0xffffffffu, key, first & 31),
                   new_low = __shfl_sync(0xffffffffu, key, (first - 1) & 31);
    if (first < 32) high = new_high;
    if (first > 0) low = max(low, new_low);
  }
  return high;
}

// A token for temperature > 0. `best` is finite.
__device__ __forceinline__ int32_t draw(ClusterRow& row, const SamplingRow& s, uint32_t best, bool told_all) {
  const Weigh weigh{logit_of(best), 1.0f / s.temperature};
  const bool limits_k = s.top_k > 0 && s.top_k < row.vocab, limits_p = s.top_p<1.0f, limits_min = s.min_p> 0.0f;
  Kept kept;
  ListLimits limits{row.vocab, limits_k, limits_p ? static_cast<double>(s.top_p) : 1.0, 0.0, s.min_p, best};
  if (limits_k) limits.top_k = s.top_k;
  bool is_list = (limits_k || limits_p || limits_min) && row.vocab <= kListSize;
  if (is_list) {
    limits.of_list = true;
  } else if (limits_k || limits_p) {
    Bracket b{kNaNKey, best + 1, static_cast<uint32_t>(row.vocab), 0};
    Goal goal{limits_k ? Goal::Kind::kCount : Goal::Kind::kShare, limits_k ? s.top_k : limits.share};
    const float scale = limits_k ? 1.0f : s.temperature;
    if (limits_p && (!limits_k || s.top_k > kListSize)) {
      search<true>(row, b, goal, weigh, scale);
    } else {
      search<false>(row, b, goal, weigh, scale);
    }
    kept.key = b.low;
    is_list = b.fits_list();
    if (!is_list && limits_k) {
      kept.ties = static_cast<uint32_t>(s.top_k) - b.count_high;
      is_list = s.top_k <= kListSize;
    } else if (!is_list) {
      kept.ties = ties_for(b, goal.wanted, b.count_low - b.count_high, weigh);
    }
    limits.target = goal.wanted;
    if (!is_list && limits_k && limits_p) {  // top-p of a top-k that is no list
      const uint32_t tie_key = kept.key, ties = kept.ties;
      const double all = b.weight_high + ties * static_cast<double>(weigh(tie_key));
      limits.of_list = false;
      limits.target = limits.share * all;
      goal = {Goal::Kind::kWeight, limits.target};
      b = {tie_key, best + 1, static_cast<uint32_t>(s.top_k), 0, all, 0.0};
      search<true>(row, b, goal, weigh, s.temperature);
      kept = {b.low, b.low == tie_key ? ties : Kept::kAll};
      is_list = b.fits_list();
      if (!is_list) {
        const double most = b.low == tie_key ? ties : b.count_low - b.count_high;
        kept.ties = ties_for(b, limits.target, most, weigh);
      }
    }
  }
  if (limits_min && !is_list) {
    const uint32_t low = lowest_key(weigh, s.min_p, best, row.lane);
    if (low > kept.key) kept = {low, Kept::kAll};
    if (!limits_k && !limits_p) {
      Bracket b{kNaNKey, best + 1, static_cast<uint32_t>(row.vocab), 0};
      const uint32_t threshold[kThresholds] = {low, best, best, best};
      is_list = measure<false>(row, b, threshold, weigh).count[0] <= kListSize;
    }
  }
  if (!is_list) return draw_from_row(row, kept, weigh, uniform(s.seed, s.draw));
  const int n = collect(row, kept);
  if (row.leads()) {
    const int32_t token = draw_from_list(row.shared, n, limits, weigh, uniform(s.seed, s.draw), row.warp, row.lane);
    if (!told_all) return token;
    if (threadIdx.x < row.blocks) store_remote(&row.shared.token, threadIdx.x, static_cast<uint32_t>(token));
  }
  if (!told_all) return 0;
  ptx::cluster_sync();
  return row.shared.token;
}

// Of the raw logits, whose keys the row holds: log-probability and rank of `token`, and the top_n likeliest.
__device__ __forceinline__ void report(ClusterRow& row, uint64_t best, const float* logits, int32_t token,
                                       int32_t top_n, SampledRow* out, TokenLogprob* top) {
  const auto best_key = static_cast<uint32_t>(best >> 32);
  const float minus_infinity = __uint_as_float(0xff800000u);
  const bool is_finite = is_finite_key(best_key);
  const Weigh weigh{is_finite ? logit_of(best_key) : 0.0f, 1.0f};
  const uint32_t own = max(key_of(logits[token]), kMinusInfinityKey);
  double v[2] = {0, 0};
  row.for_each_four([&](const uint4& four, int32_t id) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
    float part = 0;
    uint32_t before = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (is_finite) part += weigh(key[j]);
      before += key[j] > own || (key[j] == own && id + j < token) ? 1 : 0;
    }
    v[0] += static_cast<double>(part);
    v[1] += before;
  });
  row.add_up(v);
  const double log_total = is_finite ? log(v[0]) : 0.0;
  const auto logprob_of = [&](uint32_t key) {
    if (!is_finite || key <= kMinusInfinityKey) return minus_infinity;
    return static_cast<float>(static_cast<double>(logit_of(key)) - weigh.maximum - log_total);
  };
  if (row.leads() && threadIdx.x == 0) {
    *out = {token, logprob_of(own), static_cast<int32_t>(v[1]) + 1, is_finite ? 0 : 1};
  }
  if (top_n <= 0) return;
  Kept kept;
  if (row.vocab > kListSize) {
    Bracket b{kNaNKey, max(best_key, kNaNKey) + 1, static_cast<uint32_t>(row.vocab), 0};
    Goal goal{Goal::Kind::kCount, static_cast<double>(top_n)};
    search<false>(row, b, goal, weigh, 1.0f);
    kept.key = b.low;
    if (!b.fits_list()) kept.ties = static_cast<uint32_t>(top_n) - b.count_high;
  }
  const int n = collect(row, kept);
  if (!row.leads()) return;
  sort_list(row.shared, n);
  for (int i = threadIdx.x; i < top_n; i += kSampleThreads) {
    const uint64_t entry = i < n ? row.shared.sorted[i] : 0;
    const auto key = static_cast<uint32_t>(entry >> 32);
    top[i] = key > kNaNKey ? TokenLogprob{row.shared.list_id[~static_cast<uint32_t>(entry)], logprob_of(key)}
                           : TokenLogprob{-1, minus_infinity};
  }
}

extern __shared__ uint4 dynamic_shared[];

__device__ __forceinline__ ClusterRow make_row(RowShared& shared, uint32_t* keys, const RowCut& cut, int32_t vocab) {
  return {shared,
          keys,
          vocab,
          cut.segment,
          static_cast<uint32_t>(cut.blocks),
          blockIdx.x % static_cast<uint32_t>(cut.blocks),
          threadIdx.x / 32,
          threadIdx.x % 32};
}

// The tokens of all rows into their histories, by the block that is the last of all to be done reading.
__device__ __forceinline__ void append_when_last(const SampleCall& call, RowShared& shared) {
  const auto rows = static_cast<uint32_t>(call.logits.rows);
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
  ClusterRow row = make_row(shared, reinterpret_cast<uint32_t*>(&shared + 1), p.cut, call.logits.vocab);
  ptx::launch_dependents();
  ptx::cluster_sync();  // the others' shared memory is there
  ptx::dependency_wait();
  const int32_t r = static_cast<int32_t>(blockIdx.x / row.blocks);
  if (threadIdx.x < sizeof(SamplingRow) / 4)
    reinterpret_cast<uint32_t*>(&shared.row)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(call.row + r)[threadIdx.x];
  const float* logits = call.logits.data + r * call.logits.ld;
  constexpr uint32_t kAdjusts = SamplingNeeds::kBias | SamplingNeeds::kMask | SamplingNeeds::kPenalties;
  Adjustment adjustment{};
  if ((call.needs & kAdjusts) != 0) adjustment = adjustment_of(call, call.row[r]);
  Best mine = adjustment.is_none() ? load_row<kAligned, true, 4>(row, logits)
                                   : load_adjusted<kAligned>(row, logits, adjustment);
  uint64_t best = row.largest(mine.key, mine.id);
  const SamplingRow& s = shared.row;  // there since that exchange
  const auto best_key = static_cast<uint32_t>(best >> 32);
  const int32_t report_n = (call.needs & SamplingNeeds::kReport) != 0 ? s.report : -1;
  int32_t token = best_key > kMinusInfinityKey ? static_cast<int32_t>(~static_cast<uint32_t>(best)) : 0;
  const float factor = 1.0f / s.temperature;
  if (s.temperature > 0.0f && factor <= 3.402823466e38f && is_finite_key(best_key)) {
    token = draw(row, s, best_key, report_n >= 0);
  }
  if (report_n >= 0) {
    if (!adjustment.is_none()) {
      __syncthreads();
      mine = load_row<kAligned, true, 4>(row, logits);
      best = row.largest(mine.key, mine.id);
    }
    report(row, best, logits, token, report_n, call.out + r, call.top + int64_t{r} * call.top_stride);
  } else if (row.leads() && threadIdx.x == 0) {
    call.out[r] = {token, 0.0f, 0, is_finite_key(best_key) ? 0 : 1};
  }
  if (call.history.counts != nullptr && row.leads()) append_when_last(call, shared);
}

template <bool kAligned>
__global__ __launch_bounds__(kSampleThreads, 2) void greedy_kernel(const SampleParams p) {
  __shared__ RowShared shared;
  ClusterRow row = make_row(shared, nullptr, p.cut, p.call.logits.vocab);
  ptx::launch_dependents();
  ptx::cluster_sync();
  ptx::dependency_wait();
  const auto r = static_cast<int64_t>(blockIdx.x / row.blocks);
  const Best mine = load_row<kAligned, false, 8>(row, p.call.logits.data + r * p.call.logits.ld);
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
  ClusterRow row = make_row(shared, reinterpret_cast<uint32_t*>(&shared + 1), p.cut, call.logits.vocab);
  ptx::launch_dependents();
  ptx::cluster_sync();
  ptx::dependency_wait();
  const auto r = static_cast<int64_t>(blockIdx.x / row.blocks);
  const float* logits = call.logits.data + r * call.logits.ld;
  const Best mine = load_row<kAligned, true, 4>(row, logits);
  const uint64_t best = row.largest(mine.key, mine.id);
  report(row, best, logits, call.target[r], call.top_n, call.out + r, call.top + r * call.top_stride);
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
