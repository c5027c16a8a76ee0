// Which tokens top-k keeps. A bound that the warps' largest logits give leaves few tokens of most rows, which are
// collected in one block's list. In other rows a histogram, and a search over thresholds where that does not do, finds
// the largest key from which on there are enough tokens, until the keys that it may be are few enough for that list.
#pragma once

#include <cstdint>

#include "backend/cuda/sampling/cluster_row.cuh"
#include "backend/cuda/sampling/histogram.cuh"
#include "backend/cuda/sampling/race.cuh"
#include "backend/cuda/sampling/weigh.cuh"

namespace nfp::cuda {

inline constexpr int kThresholds = 4;  // of a pass that searches

// Counts the keys from each of the ascending thresholds on up to `end`, which is above all: part t.
template <int kCount>
__device__ __forceinline__ uint32_t measure(ClusterRow& row, uint32_t end, const uint32_t (&threshold)[kCount]) {
  uint32_t count[kCount] = {};
  row.for_each_four([&](const uint4& four, int32_t) {
    uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (uint32_t& k : key) k = k < end ? k : kPaddingKey;
    if (max(max(key[0], key[1]), max(key[2], key[3])) < threshold[0]) return;
#pragma unroll
    for (const uint32_t k : key) {
#pragma unroll
      for (int t = 0; t < kCount; ++t) count[t] += k >= threshold[t] ? 1 : 0;
    }
  });
#pragma unroll
  for (int t = 0; t < kCount; ++t) row.set_part(t, __reduce_add_sync(0xffffffffu, count[t]));
  return row.add_up_parts<kCount>();
}

__device__ __forceinline__ uint32_t key_between(float low, float high, float part) {  // 0: high
  return key_of(high + (low - high) * part);
}

// Thresholds for a pass. The bracket is cut between its logits, around where the goal would be if tokens lay evenly
// and, every other time, evenly; and where that settles nothing between its keys. One that is open below is cut at
// distances from its upper end, and is not open afterwards.
__device__ __forceinline__ void choose_thresholds(const Bracket& b, int pass, uint32_t (&threshold)[kThresholds]) {
  constexpr int kPassesByLogit = 8;
  const float around[kThresholds] = {0.15f, 0.03f, -0.03f, -0.15f}, below[kThresholds] = {0.0f, 512.0f, 32.0f, 2.0f};
  const float down =  // as if even
      static_cast<float>(b.wanted - b.count_high) / static_cast<float>(b.count_low - b.count_high);
  const float low = logit_of(b.low), high = logit_of(b.high - 1);
#pragma unroll
  for (int t = 0; t < kThresholds; ++t) {
    if (b.low <= kMinusInfinityKey) {
      threshold[t] = t == 0 ? kLowestKey : key_of(high - below[t]);
    } else if (pass < kPassesByLogit) {
      threshold[t] = key_between(
          low, high, pass % 2 == 1 ? down + around[t] : static_cast<float>(kThresholds - t) / (kThresholds + 1));
    } else {
      threshold[t] =
          b.low + static_cast<uint32_t>(uint64_t{b.high - b.low} * static_cast<uint32_t>(t + 1) / (kThresholds + 1));
    }
  }
}

// The ends of the histogram's bin that has the goal of a bracket that is open below, as keys; both 0 if it is further
// down than there are bins. A call, since its callers have no registers left for it; so it takes the row in parts.
struct BinEnds {
  uint32_t key[2];
  uint32_t exchanges;
};
__device__ __noinline__ BinEnds ends_of_bin(RowShared& shared, RowCut shape, uint32_t exchanges) {
  ClusterRow row = make_row(shared, shape, 0, exchanges);
  const Bracket b = row.bracket();
  const Bins bins{logit_of(b.best), row.blocks};
  if (!bins.are_distinct()) return {{0, 0}, row.exchanges};
  const int32_t found = bin_of(row, bins);
  if (found >= bins.count() - 1) return {{0, 0}, row.exchanges};
  return {{bins.first_key_of(found, b.best, row.lane), bins.first_key_of(found - 1, b.best, row.lane)}, row.exchanges};
}

// Narrows the row's bracket by what is measured at ascending thresholds, which are moved into it. One lane judges each.
template <int kCount>
__device__ __forceinline__ void cut(ClusterRow& row, uint32_t (&threshold)[kCount]) {
  {
    const Bracket b = row.bracket();
#pragma unroll
    for (uint32_t& key : threshold) key = min(max(key, b.low), b.high - 1);
  }
  const uint32_t sums = measure(row, row.bracket().high, threshold);
  Bracket& b = row.shared.bracket[ptx::read_thread() / 32];
  uint32_t key = threshold[0];
#pragma unroll
  for (uint32_t t = 1; t < kCount; ++t) key = row.lane == t ? threshold[t] : key;
  const uint32_t reached = row.sum_of(sums, static_cast<int>(row.lane) % kCount) + b.count_high;
  const bool is_enough = key <= b.low || reached >= b.wanted;
  const uint32_t short_of = __ballot_sync(0xffffffffu, row.lane >= kCount || !is_enough);
  const int upper = __ffs(static_cast<int>(short_of)) - 1, lower = upper - 1;  // thresholds: the first that is not
  const uint32_t high = __shfl_sync(0xffffffffu, key, upper), low = __shfl_sync(0xffffffffu, key, lower & 31);
  const uint32_t count_low = row.sum_of(sums, lower & 31), count_high = row.sum_of(sums, upper);
  if (row.lane == 0) {
    if (lower >= 0 && low > b.low) {
      b.low = low;
      b.count_low = count_low + b.count_high;
      b.mine_low = row.part(lower) + b.mine_high;
      b.ties = Kept::kAll;
    }
    if (upper < kCount) {
      b.high = high;
      b.count_high += count_high;
      b.mine_high += row.part(upper);
    }
  }
  __syncwarp();
}

// Narrows the row's bracket, pass by pass, until it is closed or what may be its goal's key fits into a list; returns
// the exchanges so far. A call, as ends_of_bin() is.
__device__ __noinline__ uint32_t search(RowShared& shared, RowCut shape, uint32_t exchanges) {
  ClusterRow row = make_row(shared, shape, 0, exchanges);
  for (int pass = 0;; ++pass) {
    const Bracket b = row.bracket();
    if (b.is_closed() || b.is_narrow()) return row.exchanges;
    uint32_t threshold[kThresholds];
    choose_thresholds(b, pass, threshold);
    cut(row, threshold);
  }
}

// How many of n keys are before the one at `at`, the larger ones and earlier ones like it: found by the kThreads
// threads that have this `at`, neighbours from a multiple of kThreads on. All of a warp.
template <uint32_t kThreads, typename KeyAt>
__device__ __forceinline__ uint32_t keys_before(const KeyAt& key_at, uint32_t n, uint32_t at, uint32_t thread) {
  uint32_t before = 0;
  if (at < n) {
    const uint32_t key = key_at(at);
#pragma unroll 4
    for (uint32_t i = thread % kThreads; i < n; i += kThreads) {
      const uint32_t other = key_at(i);
      before += other > key || (other == key && i < at) ? 1 : 0;
    }
  }
#pragma unroll
  for (uint32_t other = 1; other < kThreads; other *= 2) before += __shfl_xor_sync(0xffffffffu, before, other);
  return before;
}

// At least n tokens have this key or more: the n-th largest of the warps' largest (their words). n <= warps().
__device__ __forceinline__ uint32_t nth_largest(const ClusterRow& row, const Told* told, uint32_t n, int slot) {
  static_assert(kSampleThreads >= 4 * kSampleBlocks * kSampleWarps);
  const uint32_t at = threadIdx.x / 4;
  const auto key_at = [&](uint32_t i) { return static_cast<uint32_t>(told[i].word); };
  const uint32_t before = keys_before<4>(key_at, row.warps(), at, threadIdx.x);
  if (at < row.warps() && before == n - 1 && threadIdx.x % 4 == 0) row.shared.bound[slot] = key_at(at);
  __syncthreads();
  return row.shared.bound[slot];
}

// What a warp has of the keys between two: those of `kept`, and all with its key, that are below `end`.
struct Counted {
  uint32_t above = 0, equal = 0;
  __device__ uint64_t word(uint32_t low_half = 0) const {
    return uint64_t{above} << 48 | uint64_t{equal} << 32 | low_half;
  }
};
inline constexpr uint32_t kAnyKey = 0xffffffffu;  // above all
__device__ __forceinline__ Counted count_kept(const ClusterRow& row, const Kept& kept, uint32_t end) {
  Counted c;
  if (!row.reaches(kept.key)) return c;
  row.for_each_four([&](const uint4& four, int32_t) {
    const uint32_t key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key[j] < kept.key || key[j] >= end) continue;
      c.above += key[j] > kept.key ? 1 : 0;
      c.equal += key[j] == kept.key ? 1 : 0;
    }
  });
  c.above = __reduce_add_sync(0xffffffffu, c.above);
  c.equal = __reduce_add_sync(0xffffffffu, c.equal);
  return c;
}

// What all warps have, and those before this one.
struct Candidates {
  uint32_t above_before = 0, equal_before = 0;
  uint32_t count = 0;  // that are kept
  uint32_t mine = 0;   // this warp's, all ties
  uint32_t low_halves = 0;
  double weight = 0;
};
__device__ __forceinline__ Candidates sum_up(const ClusterRow& row, const Told* told, uint32_t ties) {
  const uint32_t me = row.me();
  Candidates c;
  uint32_t above = 0, equal = 0;
  for (uint32_t i = row.lane; i < row.warps(); i += 32) {
    const auto a = static_cast<uint32_t>(told[i].word >> 48), e = static_cast<uint32_t>(told[i].word >> 32) & 0xffffu;
    c.above_before += i < me ? a : 0;
    c.equal_before += i < me ? e : 0;
    above += a;
    equal += e;
    c.low_halves += static_cast<uint32_t>(told[i].word);
    c.weight += told[i].sum;
  }
  c.above_before = __reduce_add_sync(0xffffffffu, c.above_before);
  c.equal_before = __reduce_add_sync(0xffffffffu, c.equal_before);
  c.count = __reduce_add_sync(0xffffffffu, above) + min(__reduce_add_sync(0xffffffffu, equal), ties);
  row.shared.kept = c.count;  // every thread the same; for collect()
  c.low_halves = __reduce_add_sync(0xffffffffu, c.low_halves);
  c.weight = warp_sum(c.weight);
  return c;
}

__device__ __forceinline__ Candidates count(ClusterRow& row, const Kept& kept, uint32_t end = kAnyKey) {
  const Counted c = count_kept(row, kept, end);
  Candidates all = sum_up(row, row.tell(c.word()), kept.ties);
  all.mine = c.above + c.equal;
  return all;
}

// The kept tokens whose keys are below `end` into the list of the cluster's first block, in order of id; returns how
// many they are, at most kListSize. They are there when it returns to that block.
__device__ __forceinline__ int collect(ClusterRow& row, const Kept& kept, uint32_t end, const Candidates& c) {
  if (row.reaches(kept.key)) {
    uint32_t above_before = c.above_before, equal_before = c.equal_before;
    row.for_each_four([&](const uint4& four, int32_t id) {
      const uint32_t key[4] = {four.x, four.y, four.z, four.w};
      uint32_t mine = 0;  // above, and equal << 16
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mine += key[j] > kept.key && key[j] < end ? 1u : 0u;
        mine += key[j] == kept.key ? 1u << 16 : 0u;
      }
      if (__ballot_sync(0xffffffffu, mine != 0) == 0) return;
      const uint32_t until = warp_scan(mine, row.lane);
      uint32_t a = above_before + ((until - mine) & 0xffffu), e = equal_before + ((until - mine) >> 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_above = key[j] > kept.key && key[j] < end, is_equal = key[j] == kept.key;
        if (is_above || (is_equal && e < kept.ties)) {
          const uint32_t place = a + min(e, kept.ties);
          if (place < kListSize) {
            row.send_to_list(place, key[j], static_cast<uint32_t>(id + j));
          }
        }
        a += is_above ? 1 : 0;
        e += is_equal ? 1 : 0;
      }
      const uint32_t sum = __shfl_sync(0xffffffffu, until, 31);
      above_before += sum & 0xffffu;
      equal_before += sum >> 16;
    });
  }
  const uint32_t n = min(row.shared.kept, uint32_t{kListSize});
  row.wait_for_list(n);
  return static_cast<int>(n);
}

// ---- in the list's block -------------------------------------------------------------------------------------------

// Few entries: kThreads threads each.
template <uint32_t kThreads>
__device__ __forceinline__ void rank_list(RowShared& shared, uint32_t n) {
  const uint32_t thread = ptx::read_thread(), at = thread / kThreads;  // as in scan_pairs()
  const auto key_at = [&](uint32_t i) { return shared.list_key(static_cast<int>(i)); };
  const uint32_t before = keys_before<kThreads>(key_at, n, at, thread);
  if (at < n && thread % kThreads == 0) shared.sorted[before] = uint64_t{key_at(at)} << 32 | ~at;
  __syncthreads();
}

// shared.sorted: the list's n entries, likeliest first. (Bitonic: Batcher, "Sorting networks and their applications",
// AFIPS 1968.)
__device__ __forceinline__ void sort_list(RowShared& shared, int n) {
  if (n <= kSampleThreads / 4) return rank_list<4>(shared, static_cast<uint32_t>(n));
  if (n <= kSampleThreads / 2) return rank_list<2>(shared, static_cast<uint32_t>(n));
  int size = 64;
  while (size < n) size *= 2;
  for (int i = threadIdx.x; i < size; i += kSampleThreads)
    shared.sorted[i] = i < n ? uint64_t{shared.list_key(i)} << 32 | ~static_cast<uint32_t>(i) : 0;
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
  const uint32_t thread = ptx::read_thread();  // or addresses that it is in take registers while a search runs
  const double until = warp_scan(a + b, lane);
  __syncthreads();
  if (lane == 31) shared.scan[thread / 32] = until;
  __syncthreads();
  const double of_warps = warp_scan(lane < kSampleWarps ? shared.scan[thread % 32] : 0.0, lane);
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

// What the searched bracket keeps to reach its goal, exactly.
__device__ __forceinline__ Kept settle(ClusterRow& row) {
  Bracket b = row.bracket();
  if (b.is_closed()) return {b.low, b.wanted - b.count_high};
  Kept inside{b.low, b.ties};
  Candidates candidates;
  if (b.ties == Kept::kAll && b.mine_low != Bracket::kUnknown) {
    inside = {b.low - 1, 0};  // those above it
    candidates = sum_up(row, row.tell(Counted{b.mine_low - b.mine_high}.word()), inside.ties);
  } else {
    candidates = count(row, inside, b.high);
  }
  const int n = collect(row, inside, b.high, candidates);
  uint64_t kept = 0;  // as a word
  if (row.leads()) {
    sort_list(row.shared, n);
    b = row.bracket();
    const int t = static_cast<int>(ptx::read_thread());
    const auto sorted_key = [&](int i) { return static_cast<uint32_t>(row.shared.sorted[i] >> 32); };
    const auto is_there = [&](int i) { return i < n; };
    const int last = min(static_cast<int>(b.wanted - b.count_high), n) - 1;
    const uint32_t key = sorted_key(last);
    const int first = lowest_of(row.shared, is_there(2 * t) && sorted_key(2 * t) == key           ? 2 * t
                                            : is_there(2 * t + 1) && sorted_key(2 * t + 1) == key ? 2 * t + 1
                                                                                                  : INT32_MAX);
    const bool is_all = last + 1 < n ? sorted_key(last + 1) != key : key != b.low || b.ties == Kept::kAll;
    kept = uint64_t{key} << 32 | (is_all ? Kept::kAll : static_cast<uint32_t>(last + 1 - first));
  }
  kept = row.tell(kept)[0].word;
  return {static_cast<uint32_t>(kept >> 32), static_cast<uint32_t>(kept)};
}

// What the row's bracket keeps to reach its goal; true if it is a little more, which makes a list.
__device__ __forceinline__ bool narrow(ClusterRow& row, Kept& kept) {
  const RowCut shape = row.cut();
  if (row.bracket().low <= kMinusInfinityKey && !row.bracket().is_closed() && !row.bracket().is_narrow()) {
    BinEnds ends = ends_of_bin(row.shared, shape, row.exchanges);
    row.exchanges = ends.exchanges;
    if (ends.key[0] != 0) cut(row, ends.key);
  }
  row.exchanges = search(row.shared, shape, row.exchanges);
  const Bracket b = row.bracket();
  kept = b.fits_list() ? Kept{b.low, b.ties} : settle(row);
  return row.bracket().fits_list();
}

// Limits that act on the list of the likeliest, and the draw.
__device__ __noinline__ int32_t draw_from_list(RowShared& shared, int n, const Weigh weigh, uint32_t warp,
                                               uint32_t lane) {
  sort_list(shared, n);
  const SamplingRow& s = shared.row;
  const int t = static_cast<int>(ptx::read_thread());
  int kept = min(n, s.top_k);
  const auto sorted_key = [&](int i) { return static_cast<uint32_t>(shared.sorted[i] >> 32); };
  const double w0 = 2 * t < kept ? weigh.exact(sorted_key(2 * t)) : 0.0;
  const double w1 = 2 * t + 1 < kept ? weigh.exact(sorted_key(2 * t + 1)) : 0.0;
  if (s.top_p < 1.0f) {
    const PairScan until = scan_pairs(shared, w0, w1, warp, lane);
    const double target = static_cast<double>(s.top_p) * until.total;
    const int reached = 2 * t < kept && until.first >= target        ? 2 * t
                        : 2 * t + 1 < kept && until.second >= target ? 2 * t + 1
                                                                     : INT32_MAX;
    const int last = lowest_of(shared, reached);
    if (last < kept) kept = last + 1;
  }
  if (s.min_p > 0.0f) {
    const uint32_t best = sorted_key(0);
    const auto is_cut = [&](int i, double w) {
      return i < kept && sorted_key(i) != best && w < static_cast<double>(s.min_p);
    };
    const int cut = lowest_of(shared, is_cut(2 * t, w0) ? 2 * t : is_cut(2 * t + 1, w1) ? 2 * t + 1 : INT32_MAX);
    kept = max(1, min(kept, cut));
  }
  // Whoever is not less likely than the last.
  const uint64_t last = shared.sorted[kept - 1];
  const RaceKey race = race_key(s.seed, s.draw);
  Runner mine;
#pragma unroll 1
  for (int i = 2 * t; i < min(2 * t + 2, n); ++i) {
    const uint32_t key = shared.list_key(i);
    if ((uint64_t{key} << 32 | ~static_cast<uint32_t>(i)) < last) continue;
    const int32_t id = shared.list_id(i);
    const double arrival = arrival_of(race_word(race, id), logit_of(key), weigh.maximum, weigh.factor);
    if (arrival < mine.arrival) mine = {arrival, key, id};
  }
  mine = first_of_warp(mine);
  __syncthreads();
  if (lane == 0) {
    shared.scan[warp] = mine.arrival;
    shared.parts[warp][0] = static_cast<uint32_t>(mine.id);
  }
  __syncthreads();
  Runner winner;
  if (lane < kSampleWarps) winner = {shared.scan[lane], 0, static_cast<int32_t>(shared.parts[lane][0])};
  return first_of_warp(winner).id;
}

}  // namespace nfp::cuda
