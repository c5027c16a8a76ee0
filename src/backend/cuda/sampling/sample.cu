#include "backend/cuda/sampling/load_row.cuh"
#include "backend/cuda/sampling/race.cuh"
#include "backend/cuda/sampling/sampled.cuh"
#include "backend/cuda/sampling/sampling_kernels.h"
#include "backend/cuda/sampling/search.cuh"

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

struct Drawn {
  uint32_t warp;  // of the cluster, which has the token
  int32_t token;
};

// The smallest key whose weight is at least min_p, or the best.
__device__ __forceinline__ uint32_t lowest_key(const Weigh& weigh, float min_p, uint32_t best, uint32_t lane) {
  return first_key(kMinusInfinityKey, best, lane,
                   [&](uint32_t key) { return weigh.exact(key) >= static_cast<double>(min_p); });
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
  __device__ bool need_total() const { return p() && !k(); }  // the weight of all tokens

 private:
  uint32_t bits_;
};

// The top_k likeliest: true if they are in the first block's list, of `listed` tokens, with a few more perhaps, else
// those that `kept` keeps.
__device__ __forceinline__ bool limit_to_top_k(ClusterRow& row, int32_t top_k, uint32_t best, const Told* told,
                                               Kept& kept, int& listed) {
  const auto n = static_cast<uint32_t>(top_k);
  bool is_list = row.vocab <= kListSize;
  Candidates candidates;
  if (is_list) {
    candidates = count(row, kept);
  } else {
    Bracket b = Bracket::of(n, kMinusInfinityKey, best, static_cast<uint32_t>(row.vocab));
    if (n <= row.warps()) {  // a bound that the warps' largest give: few tokens reach it
      kept.key = max(nth_largest(row, told, n, 0), kLowestKey);
      candidates = count(row, kept);
      is_list = candidates.count <= kListSize;
      b.low = kept.key;
      b.count_low = candidates.count;
      b.mine_low = candidates.mine;
    }
    if (!is_list) {
      row.keep(b);
      is_list = narrow(row, kept);
      if (!is_list && n > kListSize) return false;
      candidates = count(row, kept);
      is_list = true;
    }
  }
  listed = collect(row, kept, kAnyKey, candidates);
  return true;
}

// One more than the id of the last token with its key that is kept, of some that are. A call, as race() is.
struct LastTie {
  int32_t after;
  uint32_t exchanges;
};
__device__ __noinline__ LastTie last_tie(RowShared& shared, RowCut shape, uint32_t exchanges, Kept kept) {
  ClusterRow row = make_row(shared, shape, 0, exchanges);
  uint32_t equal = 0;
  row.for_each_four([&](const uint4& four, int32_t) {
    equal += (four.x == kept.key) + (four.y == kept.key) + (four.z == kept.key) + (four.w == kept.key);
  });
  const Told* told = row.tell(__reduce_add_sync(0xffffffffu, equal));
  const uint32_t me = row.me();
  uint32_t before = 0;
  for (uint32_t i = row.lane; i < me; i += 32) before += static_cast<uint32_t>(told[i].word);
  before = __reduce_add_sync(0xffffffffu, before);
  int32_t last = -1;  // of this warp's that is kept
  row.for_each_four([&](const uint4& four, int32_t id) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) mine += key[j] == kept.key ? 1 : 0;
    const uint32_t until = warp_scan(mine, row.lane);
    uint32_t tie = before + until - mine;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key[j] != kept.key) continue;
      if (tie < kept.ties) last = id + j;
      ++tie;
    }
    before += __shfl_sync(0xffffffffu, until, 31);
  });
  told = row.tell(static_cast<uint32_t>(__reduce_max_sync(0xffffffffu, last) + 1));
  uint32_t after = 0;
  for (uint32_t i = row.lane; i < row.warps(); i += 32) after = max(after, static_cast<uint32_t>(told[i].word));
  return {static_cast<int32_t>(__reduce_max_sync(0xffffffffu, after)), row.exchanges};
}

// A token for temperature > 0. `best` is finite; `told` are the warps' largest keys and, if a total is needed, what
// they weigh relative to those.
__device__ __forceinline__ Drawn draw(ClusterRow& row, const SamplingRow& s, uint32_t best, const Told* told) {
  const Weigh weigh{logit_of(best), 1.0f / s.temperature};
  const Limits limited(s, row.vocab);
  Cut cut{kMinusInfinityKey, INT32_MAX};
  double total = 0;
  if (limited.k()) {
    Kept kept;
    int listed = 0;
    if (limit_to_top_k(row, s.top_k, best, told, kept, listed)) {
      if (!row.leads()) return {0, 0};
      return {0, draw_from_list(row.shared, listed, weigh, row.warp, row.lane)};
    }
    cut.key = kept.key;
    if (kept.ties != Kept::kAll) {
      const LastTie last = last_tie(row.shared, row.cut(), row.exchanges, kept);
      cut.id = last.after;
      row.exchanges = last.exchanges;
    }
    if (limited.p()) {
      const KeptWeight weight = weigh_kept(row.shared, row.cut(), row.exchanges, cut, weigh.maximum);
      total = weight.sum;
      row.exchanges = weight.exchanges;
    }
  } else if (limited.p()) {
#pragma unroll
    for (uint32_t i = 0; i < kTold; ++i) {
      const uint32_t at = row.lane * kTold + i;
      if (at < row.warps()) total += told[at].sum * static_cast<double>(weigh(static_cast<uint32_t>(told[at].word)));
    }
    total = warp_sum(total);
  }
  row.shared.target = s.top_p * total;  // every thread the same; races need the registers
  if (limited.min()) {
    if (row.warp == 0) {  // one warp's exact weights are quicker than all warps'
      const uint32_t key = lowest_key(weigh, s.min_p, best, row.lane);
      if (row.lane == 0) row.shared.bound[0] = key;
    }
    __syncthreads();
    if (row.shared.bound[0] > cut.key) cut = {row.shared.bound[0], INT32_MAX};
  }
  const Raced raced = race(row.shared, row.cut(), row.exchanges, cut, weigh.maximum);
  row.exchanges = raced.exchanges;
  return {0, raced.id};
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
    Bracket b = Bracket::of(static_cast<uint32_t>(top_n), bound, max(best, kMinusInfinityKey), candidates.count);
    b.mine_low = mine.above + mine.equal;
    row.keep(b);
    narrow(row, kept);
    candidates = count(row, kept);
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

// What follows the draw: the token and its report to where they go, and into its history.
template <bool kAligned>
__device__ __forceinline__ void finish(const SampleParams& p, uint32_t exchanges, Drawn drawn) {
  const SampleCall& call = p.call;
  auto& shared = *reinterpret_cast<RowShared*>(dynamic_shared);
  ClusterRow row = make_row(shared, p.cut, call.logits.vocab, exchanges);
  __syncthreads();
  const SamplingRow& s = shared.row;
  const int64_t index = shared.index;
  if ((call.needs & SamplingNeeds::kReport) != 0 && s.report >= 0) {
    const auto token = static_cast<int32_t>(row.tell(static_cast<uint32_t>(drawn.token))[drawn.warp].word);
    const float* raw = call.logits.data + index * call.logits.ld;
    if (shared.is_adjusted) {
      copy_row<kAligned>(row, raw);
      const Told* told = row.tell(row.set_largest(make_keys<false>(row, {})));
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
  finish<kAligned>(p, row.exchanges, drawn);
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
    p.call.out[r] = sampled(best);
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
