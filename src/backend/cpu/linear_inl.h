// The matrix kernels. Few rows: panels are unpacked in registers and used at once. More rows: four panels are unpacked
// to a block in L1 and all rows run over it. Both add x[k] * w[k] to one accumulator an output in order of k (FP16
// pairs: as PairArithmetic says), so that the choice between them (a matter of speed) cannot be seen in the result.
// Included after one simd_*.h.
#pragma once

#include <type_traits>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/linear_names_inl.h"
#include "backend/cpu/math_inl.h"
#if defined(NFP_HAVE_TILES)
#include "backend/cpu/tiles_inl.h"
#endif

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

static_assert(kDirectRows <= kDirectUpperRows && kDirectUpperRows <= cpu::kMaxDirectRows);
// How far ahead of the group that is unpacked the panel is asked for. Measured: 4 to 64 groups on Emerald Rapids.
constexpr int64_t kPrefetchGroups = 16, kPrefetchUpperGroups = 32;
// Few rows are as fast as memory is. For them each line is asked for twice, to L2 and then to L1: requests that wait
// for memory hold places that L1 has few of (measured: 3 to 6 % for up to 4 rows, nothing for 6, slower for 8). With
// more rows Zen 5 asks L2 only: its own prefetching to L1 is in time, and a request to L1 costs a multiply-add's time
// (measured: 8 rows 10 to 15 % faster).
#ifdef NFP_TUNED_FOR_ZEN5
constexpr int kFarRows = 24, kNearRows = 4;
#else
constexpr int kFarRows = 4, kNearRows = 24;
#endif
constexpr int64_t kFarGroups = 64, kNearGroups = 8;

// Up to so many rows blocks of half the steps are faster where they are of FP32: block and rows of x lie in L1
// together. With more rows the sums, which go to memory after every block, weigh more (measured: 24, 32, 64, 128 rows).
constexpr int64_t kHalfBlockRows = 48;

// Memory to bring to L2 while a block is multiplied: runs of kRunLines cache lines.
constexpr int64_t kRunLines = 32;
struct Ahead {
  const uint8_t* runs[2 * kGroupPanels];
  int count = 0;
};

enum class Source { kBoth, kUpper, kDense };

// Where a panel's bytes are.
struct Lines {
  const uint8_t* upper = nullptr;
  const uint8_t* lower = nullptr;
};

// What is read after the panels of a tile: the first groups of each panel of the next tile, of this matrix or of the
// one that is multiplied after it.
struct Upcoming {
  Lines panels[kDirectPanels];
  int more = 0;  // how many of them are a new matrix's, whose tile may be of more panels than this one
};

// Sums in FP32, from the first step of k to the last.
struct WholeSums {
  using Sum = Vec;
  static constexpr int64_t kChunkUnits = 0;
  static Sum none() { return zero(); }
  static Sum load_sum(const float* p, bool fresh) { return fresh ? zero() : load(p); }
  static void store_sum(float* p, Sum s, bool) { store(p, s); }
};

// FP32 multiply-adds, one step of k at a time.
template <Source S>
struct Fp32Steps : WholeSums {
  using X = float;
  using Operand = Vec;
  using W = Vec;
  static constexpr int kUnits = 4;  // multiply-adds a group of four steps takes
  static constexpr int kStepsPerUnit = 1;
  static constexpr int64_t kAhead = S == Source::kUpper ? kPrefetchUpperGroups : kPrefetchGroups;
  static constexpr int kMostDirectRows = S == Source::kUpper ? kDirectUpperRows : kDirectRows;
  static constexpr int kMostHalvedRows = kHalvedRows;
  static constexpr int most_panels(int rows) { return direct_panels(rows, S != Source::kUpper); }
  static constexpr int64_t kUpperBytes = static_cast<int64_t>(S == Source::kDense ? 2 * kGroupBytes : kGroupBytes);
  // Calls ask(line) for what unpacking reads.
  template <typename At, typename Ask>
  static void each_line(const At& panel, int64_t group, Ask ask) {
    const uint8_t* upper = panel.upper + group * kUpperBytes;
    ask(upper);
    if constexpr (S == Source::kDense) ask(upper + kGroupBytes);
    if constexpr (S == Source::kBoth) ask(panel.lower + group * static_cast<int64_t>(kGroupBytes));
  }
  // What a block that begins at `group` reads of the panel, in runs of kRunLines lines. Past a panel's end lies memory
  // of the same weight or nothing: a prefetch does not mind.
  static void list_runs(const Panel& panel, int64_t group, Ahead& ahead) {
    const uint8_t* upper = panel.upper + group * kUpperBytes;
    ahead.runs[ahead.count++] = upper;
    if constexpr (S == Source::kDense) ahead.runs[ahead.count++] = upper + kRunLines * 64;
    if constexpr (S == Source::kBoth)
      ahead.runs[ahead.count++] = panel.lower + group * static_cast<int64_t>(kGroupBytes);
  }
  static void unpack(const Panel& panel, int64_t group, W* w) {
    const uint8_t* upper = panel.upper + group * kUpperBytes;
    if constexpr (S == Source::kBoth) {
      unpack_both(upper, panel.lower + static_cast<size_t>(group) * kGroupBytes, w);
    } else if constexpr (S == Source::kUpper) {
      unpack_upper(upper, w);
    } else {
      unpack_dense(upper, w);
    }
  }
#if defined(NFP_HAVE_STAGES)
  // The group's FP16 words, in `words` or where they are.
  static const uint16_t* stage(const Panel& panel, int64_t group, uint16_t* words) {
    const uint8_t* upper = panel.upper + group * kUpperBytes;
    if constexpr (S == Source::kBoth) {
      stage_both(upper, panel.lower + static_cast<size_t>(group) * kGroupBytes, words);
    } else if constexpr (S == Source::kUpper) {
      stage_upper(upper, words);
    } else {
      return reinterpret_cast<const uint16_t*>(upper);
    }
    return words;
  }
  static constexpr bool staged(int) { return true; }
  static constexpr int kUnitWords = kPanelRows;
  static void load_here(const uint16_t* words, W& w) { widen_here(words, w); }
  static void mac_here(Sum& sum, Operand x, W w) { fma_here(x, w, sum); }
#endif
  static Operand operand(X x) { return splat(x); }
  static Vec mac(Vec acc, Operand x, W w) { return fma(x, w, acc); }
#if defined(NFP_TUNED_FOR_ZEN5)
  // FP16 words, a panel's steps after each other.
  using B = uint16_t;
  static constexpr int64_t kBlockUnit = kPanelRows, kBlockPanel = kBlockSteps * kPanelRows;
  static void fill_block(const Panel& panel, int64_t group, B* at) {
    const B* words = stage(panel, group, at);
    if constexpr (S == Source::kDense) __builtin_memcpy(at, words, 2 * kGroupBytes);
  }
  static W load_block(const B* p) { return widen_stored(p); }
#else
  using B = float;
  static constexpr int64_t kBlockUnit = kGroupColumns, kBlockPanel = kPanelRows;
  static void fill_block(const Panel& panel, int64_t group, B* at) {
    W w[kUnits];
    unpack(panel, group, w);
    NFP_UNROLL for (int u = 0; u < kUnits; ++u) store(at + u * kBlockUnit, w[u]);
  }
  static W load_block(const B* p) { return load(p); }
#endif
};

#if defined(NFP_HAVE_PAIRS)
// Two steps of k at a time, which Self unpacks.
template <typename Self>
struct PairSteps {
  using X = uint32_t;
  using Operand = Pairs;
  using W = Pairs;
  static constexpr int kUnits = 2;
  static constexpr int kStepsPerUnit = 2;
  static constexpr int64_t kUpperBytes = static_cast<int64_t>(kGroupBytes);
  static constexpr int64_t kAhead = kPrefetchUpperGroups;
  static constexpr int kMostDirectRows = kDirectPairRows;
  static constexpr int most_panels(int rows) { return direct_panels(rows, false); }
  static constexpr int kMostHalvedRows = kHalvedPairRows;  // of which two halves are faster than a block
  template <typename At, typename Ask>
  static void each_line(const At& panel, int64_t group, Ask ask) {
    ask(panel.upper + group * static_cast<int64_t>(kGroupBytes));
  }
  static void list_runs(const Panel& panel, int64_t group, Ahead& ahead) {
    for (int64_t run = 0; run * kRunLines < cpu::kHalfChunk / cpu::kGroupSteps; ++run) {
      ahead.runs[ahead.count++] = panel.upper + (group + run * kRunLines) * static_cast<int64_t>(kGroupBytes);
    }
  }
#if defined(NFP_HAVE_STAGES)
  static constexpr bool staged(int) { return true; }
  static constexpr int kUnitWords = 2 * kPanelRows;
  static void load_here(const uint16_t* words, W& w) { load_pairs_here(words, w); }
  static const uint16_t* stage(const Panel& panel, int64_t group, uint16_t* words) {
    W w[kUnits];
    Self::unpack(panel, group, w);
    for (int u = 0; u < kUnits; ++u) store_pairs(reinterpret_cast<uint32_t*>(words + u * kUnitWords), w[u]);
    return words;
  }
#endif
  static Operand operand(X x) { return splat_pair(x); }
  using B = uint32_t;
  static constexpr int64_t kBlockUnit = kGroupColumns, kBlockPanel = kPanelRows;
  static void fill_block(const Panel& panel, int64_t group, B* at) {
    W w[kUnits];
    Self::unpack(panel, group, w);
    for (int u = 0; u < kUnits; ++u) store_pairs(at + u * kBlockUnit, w[u]);
  }
  static W load_block(const B* p) { return load_pairs(p); }
};
#endif

template <cpu::PairArithmetic A>
struct StepsOf;

#if defined(NFP_HAVE_BF16_PAIRS)
template <>
struct StepsOf<cpu::PairArithmetic::kBf16> : WholeSums, PairSteps<StepsOf<cpu::PairArithmetic::kBf16>> {
  static void unpack(const Panel& panel, int64_t group, W* w) {
    unpack_upper_pairs(panel.upper + static_cast<size_t>(group) * kGroupBytes, w);
  }
#if defined(NFP_HAVE_STAGES)
  static constexpr bool staged(int panels) { return panels > 1; }  // one by one is faster (measured: 15 to 24 rows)
  static void mac_here(Sum& sum, Operand x, W w) { dot_pairs_here(x, w, sum); }
#endif
  static Vec mac(Vec acc, Operand x, W w) { return dot_pairs(acc, x, w); }
};
#endif

#if defined(NFP_HAVE_FP16_PAIRS)
// Sums of a chunk in FP16, of all chunks in FP32.
template <>
struct StepsOf<cpu::PairArithmetic::kFp16> : PairSteps<StepsOf<cpu::PairArithmetic::kFp16>> {
  using Sum = HalfSums;
  static constexpr int64_t kChunkUnits = cpu::kHalfChunk / kStepsPerUnit;
  static Sum none() { return no_halves(); }
  static Sum load_sum(const float*, bool) { return no_halves(); }
  static void store_sum(float* p, Sum s, bool fresh) { store(p, fresh ? widened(s) : add(load(p), widened(s))); }
  static void unpack(const Panel& panel, int64_t group, W* w) {
    unpack_upper_halves(panel.upper + static_cast<size_t>(group) * kGroupBytes, w);
  }
#if defined(NFP_HAVE_STAGES)
  static void mac_here(Sum& sum, Operand x, W w) { fma_halves_here(x, w, sum); }
#endif
  static Sum mac(Sum acc, Operand x, W w) { return fma_halves(x, w, acc); }
};
// What is unpacked at a time for many rows is a chunk: half as many bytes a step as in FP32.
static_assert(cpu::kHalfChunk <= 2 * kBlockSteps);
#endif

#if defined(NFP_HAVE_MOVED_UPPERS)
// FP8 of few rows where multiply-adds take subnormal numbers at full speed: weights 2^-112 of Fp32Steps', x times 2^96.
// Nothing overflows or is rounded otherwise: an x of 2^-93 at least has no bit below 2^-116, times 2^96 below 2^-20,
// and the weights none below 2^-129, so products and sums have none below 2^-149, FP32's last; move_rows() sees to x.
struct MovedSteps : Fp32Steps<Source::kUpper> {
  using W = UpperHalves;
  static constexpr float kOfX = 0x1p96f, kOfSums = 0x1p16f;
  static void unpack(const Panel& panel, int64_t group, W* w) { move_upper(panel.upper + group * kUpperBytes, w); }
  static Vec mac(Vec acc, Operand x, W w) { return fma(x, moved(w), acc); }
  static void store_sum(float* p, Sum s, bool) { store(p, mul(in_order(s), splat(kOfSums))); }
};
// to: [rows, k]. False where a number is too large or too small.
inline bool move_rows(const float* x, int64_t stride, int64_t k, int64_t rows, float* to) {
  constexpr uint32_t kLeast = (127u - 93u) << 23, kEnd = (127u + 31u) << 23;  // FP32 bits of 2^-93, 2^31
  uint32_t outside = 0;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < k; ++i) {
      const float value = x[m * stride + i];
      uint32_t bits = 0;
      __builtin_memcpy(&bits, &value, sizeof bits);
      bits &= 0x7fffffffu;
      outside |= bits != 0 && (bits < kLeast || bits >= kEnd) ? 1u : 0u;
      to[m * k + i] = value * MovedSteps::kOfX;
    }
  }
  return outside == 0;
}
#endif

// x is to be read again, as an operand of each multiply-add: kept in registers for the next panel it would push sums
// out to the stack.
inline void forget_loads() { asm volatile("" ::: "memory"); }

// Where that happens: x's values and sums against registers. Unpacking upper bytes alone leaves room (measured).
template <typename Steps, int P, int M>
constexpr bool kTooManyValues = !std::is_base_of_v<Fp32Steps<Source::kUpper>, Steps> && M * (P + Steps::kUnits) > 24;

// What is read so many groups after `group` of one of P panels. Past a panel's end comes the next panel, which is being
// read too: what will be read next lies P - 1 panels on.
template <int P>
inline int64_t group_ahead(int64_t group, int64_t distance, int64_t groups) {
  return group + distance + (group + distance < groups ? 0 : (P - 1) * groups);
}

// Where the chunk that begins at `first` ends.
template <typename Steps>
inline int64_t end_of_chunk(int64_t first, int64_t units) {
  return Steps::kChunkUnits > 0 && units - first > Steps::kChunkUnits ? first + Steps::kChunkUnits : units;
}

// acc[m][p] of `P` panels from `first` and `M` rows of x: [M, stride], or [units, M] from more than kPointerRows on.
// out: [M, kGroupColumns].
template <typename Steps, int P, int M>
void direct(const Panel* panels, const typename Steps::X* x, int64_t stride, int64_t units, float* out) {
  const auto at = [&](int m, int64_t u) { return Steps::operand(M > kPointerRows ? x[u * M + m] : x[m * stride + u]); };
  const int64_t groups = units / Steps::kUnits;
  int64_t first = 0, end = 0;  // units of a chunk
  do {
    end = end_of_chunk<Steps>(first, units);
    typename Steps::Sum acc[P][M];
    NFP_UNROLL for (int p = 0; p < P; ++p) { NFP_UNROLL for (int m = 0; m < M; ++m) acc[p][m] = Steps::none(); }
    for (int64_t g = first / Steps::kUnits; g < end / Steps::kUnits; ++g) {
      const int64_t ahead = group_ahead<P>(g, Steps::kAhead, groups);
      NFP_UNROLL for (int p = 0; p < P; ++p) {
        typename Steps::W w[Steps::kUnits];
        if constexpr (kTooManyValues<Steps, P, M>) forget_loads();
        Steps::each_line(panels[p], ahead, [](const uint8_t* line) { prefetch(line); });
        Steps::unpack(panels[p], g, w);
        NFP_UNROLL for (int u = 0; u < Steps::kUnits; ++u) {
          NFP_UNROLL for (int m = 0; m < M; ++m) {
            acc[p][m] = Steps::mac(acc[p][m], at(m, g * Steps::kUnits + u), w[u]);
          }
        }
      }
    }
    const int64_t done = end / Steps::kUnits * Steps::kUnits;
    if (done < end) {
      NFP_UNROLL for (int p = 0; p < P; ++p) {
        typename Steps::W w[Steps::kUnits];
        Steps::unpack(panels[p], groups, w);
        for (int64_t u = 0; u < end - done; ++u) {
          NFP_UNROLL for (int m = 0; m < M; ++m) { acc[p][m] = Steps::mac(acc[p][m], at(m, done + u), w[u]); }
        }
      }
    }
    NFP_UNROLL for (int p = 0; p < P; ++p) {
      NFP_UNROLL for (int m = 0; m < M; ++m) {
        Steps::store_sum(out + m * kGroupColumns + p * kPanelRows, acc[p][m], first == 0);
      }
    }
    first = end;
  } while (Steps::kChunkUnits > 0 && end < units);
}

#if defined(NFP_HAVE_STAGES)
// The same by hand: while one group is multiplied the next one is unpacked, and while one step is multiplied the next
// one's weights are widened (FP16: loaded). Processors take the oldest operation that is ready first, so an
// unpacking that stands behind a group's multiply-adds is begun when these are done, and its latency would be waited
// for. One load of each x serves all panels. `upcoming`: as if its groups were numbered on from these panels'.
template <typename Steps, int P, int M>
void direct_staged(const Panel* panels, const Upcoming& upcoming, const typename Steps::X* x, int64_t stride,
                   int64_t units, float* out) {
  constexpr int kSteps = Steps::kUnits;
  constexpr bool kFar = M <= kFarRows, kNear = M <= kNearRows;
  constexpr bool kLoadsAhead = P * M <= 26;  // registers for it
  using W = typename Steps::W;
  typename Steps::Sum acc[P][M];
  alignas(64) uint16_t room[2][P][kStageWords];
  const uint16_t* words[P];
  const uint16_t* next[P];
  W w[P];
  const auto multiply = [&](const typename Steps::X* at, const W* weights) __attribute__((always_inline)) {
    NFP_UNROLL for (int m = 0; m < M; ++m) {
      const typename Steps::Operand value = Steps::operand(M > kPointerRows ? at[m] : at[m * stride]);
      NFP_UNROLL for (int p = 0; p < P; ++p) Steps::mac_here(acc[p][m], value, weights[p]);
    }
  };
  // NOLINTNEXTLINE(bugprone-branch-clone): the same only where M is 1
  constexpr int64_t kUnitValues = M > kPointerRows ? M : 1;  // of x
  const int64_t last = (units + kSteps - 1) / kSteps - 1;
  Lines here[P];
  NFP_UNROLL for (int p = 0; p < P; ++p) here[p] = {panels[p].upper, panels[p].lower};
  const auto lines_at = [&](int64_t group) { return group <= last ? here : upcoming.panels; };
  NFP_UNROLL for (int p = 0; p < P; ++p) words[p] = Steps::stage(panels[p], 0, room[0][p]);
  if constexpr (kLoadsAhead) {
    NFP_UNROLL for (int p = 0; p < P; ++p) Steps::load_here(words[p], w[p]);
  }
  const typename Steps::X* at = x;
  int64_t g = 0, first = 0, end = 0;  // units of a chunk
  do {
    end = end_of_chunk<Steps>(first, units);
    NFP_UNROLL for (int p = 0; p < P; ++p) { NFP_UNROLL for (int m = 0; m < M; ++m) acc[p][m] = Steps::none(); }
    for (; g < end / kSteps; ++g) {
      const int64_t ahead = g + (kFar ? kNearGroups : Steps::kAhead), far = g + kFarGroups;
      [[maybe_unused]] const Lines* near_lines = lines_at(ahead);
      const Lines* far_lines = lines_at(far);
      const int64_t following = g < last ? g + 1 : last;
      NFP_UNROLL for (int u = 0; u < kSteps; ++u) {
        constexpr int kEach = (P + 1) / 2;  // panels to unpack in each of the first two steps
        NFP_UNROLL for (int p = 0; p < P; ++p) {
          if (p / kEach != u) continue;
          if constexpr (kNear) Steps::each_line(near_lines[p], ahead, [](const uint8_t* line) { prefetch(line); });
          if constexpr (kFar) Steps::each_line(far_lines[p], far, [](const uint8_t* line) { prefetch_far(line); });
          next[p] = Steps::stage(panels[p], following, room[(g + 1) & 1][p]);
        }
        W now[P];
        if constexpr (kLoadsAhead) {
          NFP_UNROLL for (int p = 0; p < P; ++p) now[p] = w[p];
          NFP_UNROLL for (int p = 0; p < P; ++p) {
            Steps::load_here(u + 1 < kSteps ? words[p] + (u + 1) * Steps::kUnitWords : next[p], w[p]);
          }
        } else {
          NFP_UNROLL for (int p = 0; p < P; ++p) Steps::load_here(words[p] + u * Steps::kUnitWords, now[p]);
        }
        multiply(at + u * kUnitValues, now);
      }
      at += kSteps * kUnitValues;
      NFP_UNROLL for (int p = 0; p < P; ++p) words[p] = next[p];
      if (far > last) {
        for (int p = kFar ? P : 0; p < upcoming.more; ++p) {
          Steps::each_line(upcoming.panels[p], far, [](const uint8_t* line) { prefetch_far(line); });
        }
      }
    }
    for (int64_t u = g * kSteps; u < end; ++u, at += kUnitValues) {
      NFP_UNROLL for (int p = 0; p < P; ++p) Steps::load_here(words[p] + (u - g * kSteps) * Steps::kUnitWords, w[p]);
      multiply(at, w);
    }
    NFP_UNROLL for (int p = 0; p < P; ++p) {
      NFP_UNROLL for (int m = 0; m < M; ++m) {
        Steps::store_sum(out + m * kGroupColumns + p * kPanelRows, acc[p][m], first == 0);
      }
    }
    first = end;
  } while (Steps::kChunkUnits > 0 && end < units);
}
#endif

template <typename Steps, int P, int M>
void direct_tile(const Panel* panels, [[maybe_unused]] const Upcoming& upcoming, const typename Steps::X* x,
                 int64_t stride, int64_t units, float* out) {
#if defined(NFP_HAVE_STAGES)
  if constexpr (Steps::staged(P)) {
    return direct_staged<Steps, P, M>(panels, upcoming, x, stride, units, out);
  } else
#endif
    direct<Steps, P, M>(panels, x, stride, units, out);
}

template <typename Steps, int P>
void direct_rows(const Panel* panels, const Upcoming& upcoming, const typename Steps::X* x, int64_t stride,
                 int64_t units, int rows, float* out) {
  switch (rows) {
#define NFP_CASE(n)                                                                                          \
  case n:                                                                                                    \
    if constexpr ((n) <= Steps::kMostDirectRows && (n) <= most_direct_rows(P) && P <= Steps::most_panels(n)) \
      direct_tile<Steps, P, n>(panels, upcoming, x, stride, units, out);                                     \
    return;
    NFP_CASE(1)
    NFP_CASE(2)
    NFP_CASE(3)
    NFP_CASE(4)
    NFP_CASE(5)
    NFP_CASE(6)
    NFP_CASE(7)
    NFP_CASE(8)
    NFP_CASE(9)
    NFP_CASE(10)
    NFP_CASE(11)
    NFP_CASE(12)
    NFP_CASE(13)
    NFP_CASE(14)
    NFP_CASE(15)
    NFP_CASE(16)
    NFP_CASE(17)
    NFP_CASE(18)
    NFP_CASE(19)
    NFP_CASE(20)
    NFP_CASE(21)
    NFP_CASE(22)
    NFP_CASE(23)
    NFP_CASE(24)
#undef NFP_CASE
    default:
      return;
  }
}

// What follows `panel`: panels of the task, then those of the next. Asks for what the ones behind these are.
template <typename Steps>
Upcoming upcoming_after(const LinearTask& task, const Panel* panel, int64_t groups) {
  Upcoming upcoming;
  const Panel* end = task.panels + task.last;
  for (int64_t p = 0; p < kDirectPanels; ++p) {
    const Panel* known = panel_at(task, panel + p);
    if (const Panel* later = panel_at(task, panel + kDirectPanels + p); later != nullptr) prefetch(later);
    // Where nothing follows: what has been read, and lies in a cache.
    const Panel& from = known == nullptr ? panel[-1] : *known;
    const uint8_t* lower = from.lower != nullptr ? from.lower : from.upper;
    upcoming.panels[p] = {from.upper - groups * Steps::kUpperBytes, lower - groups * static_cast<int64_t>(kGroupBytes)};
    if (known != nullptr && panel + p >= end) upcoming.more = static_cast<int>(p) + 1;
  }
  return upcoming;
}

template <typename Steps>
void direct_panels(const LinearTask& task, const Panel* panels, int count, const typename Steps::X* x, int64_t stride,
                   int64_t units, int rows, float* out) {
  const int64_t groups = (units + Steps::kUnits - 1) / Steps::kUnits;
  while (count > 0) {
    const auto fits = [&](int step) {
      return count >= step && step <= Steps::most_panels(rows) && rows <= most_direct_rows(step);
    };
    const int step = fits(kDirectPanels) ? kDirectPanels : (fits(2) ? 2 : 1);
    const Upcoming upcoming = upcoming_after<Steps>(task, panels + step, groups);
    if (step == kDirectPanels) {
      direct_rows<Steps, kDirectPanels>(panels, upcoming, x, stride, units, rows, out);
    } else if (step == 2) {
      direct_rows<Steps, kDirectPanels >= 2 ? 2 : 1>(panels, upcoming, x, stride, units, rows, out);
    } else {
      direct_rows<Steps, 1>(panels, upcoming, x, stride, units, rows, out);
    }
    panels += step;
    count -= step;
    out += step * kPanelRows;
  }
}

// What a tile multiplies: units of k by panels of sixteen columns, as blocked_panels() unpacks them.
template <typename Steps>
struct UnpackedBlock {
  const typename Steps::B* at;
  typename Steps::W load(int64_t unit, int panel) const {
    return Steps::load_block(at + unit * Steps::kBlockUnit + panel * Steps::kBlockPanel);
  }
  UnpackedBlock from(int panel) const { return {at + panel * Steps::kBlockPanel}; }
};
// The same where they are rows of FP32.
struct FloatBlock {
  const float* at;
  int64_t stride;
  Vec load(int64_t unit, int panel) const { return nfp::load(at + unit * stride + panel * kPanelRows); }
  FloatBlock from(int panel) const { return {at + panel * kPanelRows, stride}; }
};

// acc[m][c] (+)= sum over u of x[m][u] * block[u][c], c in panels of sixteen columns. One line of `ahead` is fetched
// with each u, so that the next block's bytes arrive while this one is computed on.
template <typename Steps, int M, int N, typename Block>
void tile(const typename Steps::X* x, int64_t x_stride, Block block, int64_t units, float* acc, int64_t acc_stride,
          bool fresh, Ahead& ahead) {
  typename Steps::Sum sum[M][N];
  NFP_UNROLL for (int m = 0; m < M; ++m) {
    NFP_UNROLL for (int n = 0; n < N; ++n) sum[m][n] = Steps::load_sum(acc + m * acc_stride + n * kPanelRows, fresh);
  }
  for (int64_t begin = 0; begin < units; begin += kRunLines) {
    const int64_t end = units - begin < kRunLines ? units : begin + kRunLines;
    const bool fetches = ahead.count > 0;
    const auto* line = fetches ? ahead.runs[--ahead.count] : reinterpret_cast<const uint8_t*>(block.at);
    const int64_t line_step = fetches ? 64 : 0;
    for (int64_t u = begin; u < end; ++u) {
      prefetch_far(line);
      line += line_step;
      typename Steps::W w[N];
      NFP_UNROLL for (int n = 0; n < N; ++n) w[n] = block.load(u, n);
      NFP_UNROLL for (int m = 0; m < M; ++m) {
        const typename Steps::Operand value = Steps::operand(x[m * x_stride + u]);
        NFP_UNROLL for (int n = 0; n < N; ++n) sum[m][n] = Steps::mac(sum[m][n], value, w[n]);
      }
    }
  }
  NFP_UNROLL for (int m = 0; m < M; ++m) {
    NFP_UNROLL for (int n = 0; n < N; ++n) {
      Steps::store_sum(acc + m * acc_stride + n * kPanelRows, sum[m][n], fresh);
    }
  }
}

template <typename Steps, int N, typename Block>
void tile_rows(int rows, const typename Steps::X* x, int64_t x_stride, Block block, int64_t units, float* acc,
               int64_t acc_stride, bool fresh, Ahead& ahead) {
  switch (rows) {
    case 1:
      return tile<Steps, 1, N>(x, x_stride, block, units, acc, acc_stride, fresh, ahead);
    case 2:
      return tile<Steps, 2, N>(x, x_stride, block, units, acc, acc_stride, fresh, ahead);
    case 3:
      return tile<Steps, 3, N>(x, x_stride, block, units, acc, acc_stride, fresh, ahead);
    case 4:
      return tile<Steps, 4, N>(x, x_stride, block, units, acc, acc_stride, fresh, ahead);
#define NFP_CASE(n)                                                                                              \
  case n:                                                                                                        \
    if constexpr ((n) <= kTileRows) tile<Steps, n, N>(x, x_stride, block, units, acc, acc_stride, fresh, ahead); \
    return;
      NFP_CASE(5)
      NFP_CASE(6)
#undef NFP_CASE
    default:
      return;
  }
}

// Whether x_pairs, x_codes and token_scale are for this panel: FP8 steps multiply dense ones with x itself.
inline bool takes_prepared(const LinearTask& task, const Panel& panel) {
  return !task.upper_only || panel.kind == PanelKind::kNested;
}

inline Vec finished(const LinearTask& task, const Panel& panel, const float* acc, int64_t row) {
  Vec v = mul(load(acc), load(panel.scale));
  if (task.token_scale != nullptr && takes_prepared(task, panel)) v = mul(v, splat(task.token_scale[row]));
  if (panel.biased) v = add(v, load(panel.bias()));
  return v;
}

inline void finish_panel(const LinearTask& task, const Panel& panel, const float* acc, int64_t first, int64_t end) {
  for (int64_t m = first; m < end; ++m) {
    Vec v = finished(task, panel, acc + m * kGroupColumns, m);
    if (task.soft_cap > 0.0f) {  // what overflowed is no number, not the cap
      v = add(mul(tanh_of(div(v, splat(task.soft_cap))), splat(task.soft_cap)), sub(v, v));
    }
    float* y = task.y + m * task.y_stride + panel.column;
    if (panel.stride != 1) {
      alignas(64) float lanes[kPanelRows];
      store(lanes, v);
      for (int r = 0; r < panel.rows; ++r) y[r * panel.stride] = lanes[r];
    } else if (panel.rows == kPanelRows) {
      store(y, v);
    } else {
      store_some(y, v, panel.rows);
    }
  }
}

// Panels come in pairs: sixteen gates, then the sixteen ups that go with them.
inline void finish_pair(const LinearTask& task, const Panel* pair, const float* acc, int64_t first, int64_t end) {
  for (int64_t m = first; m < end; ++m) {
    const Vec gate = finished(task, pair[0], acc + m * kGroupColumns, m);
    const Vec up = finished(task, pair[1], acc + m * kGroupColumns + kPanelRows, m);
    const Vec v = mul(task.activation == Activation::kSilu ? silu(gate) : gelu_tanh(gate), up);
    store_some(task.y + m * task.y_stride + pair[0].column / 2, v, pair[0].rows);
  }
}

// From the sums of a group of panels to y, for rows [first, end).
inline void finish(const LinearTask& task, const Panel* panels, int count, const float* acc, int64_t first,
                   int64_t end) {
  if (task.epilogue == Epilogue::kGatedActivation) {
    for (int p = 0; p + 1 < count; p += 2) finish_pair(task, panels + p, acc + p * kPanelRows, first, end);
  } else {
    for (int p = 0; p < count; ++p) finish_panel(task, panels[p], acc + p * kPanelRows, first, end);
  }
}

// What becomes of a tile of rows when its sums are complete: y's lines are asked for before the last block of k, and
// written while the next tile is computed. `task` null: nothing.
struct Finish {
  const LinearTask* task = nullptr;
  const Panel* panels = nullptr;
  int count = 0;
  void prepare(int64_t first, int64_t end) const {
    if (task == nullptr) return;
    const bool pairs = task->epilogue == Epilogue::kGatedActivation;
    for (int64_t m = first; m < end; ++m) {
      for (int p = 0; p < count; p += pairs ? 2 : 1) {
        prefetch_to_write(task->y + m * task->y_stride + panels[p].column / (pairs ? 2 : 1));
      }
    }
  }
  void operator()(const float* acc, int64_t first, int64_t end) const {
    if (task != nullptr) finish(*task, panels, count, acc, first, end);
  }
};

// All rows and `vectors` column vectors, in tiles of nearly equal height.
template <typename Steps, typename Block>
void multiply_block(const typename Steps::X* x, int64_t x_stride, int64_t rows, Block block, int vectors, int64_t units,
                    float* acc, int64_t acc_stride, bool fresh, Ahead& ahead, const Finish& done = {}) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = rows * t / tiles;
    const int64_t end = rows * (t + 1) / tiles;
    const int count = static_cast<int>(end - begin);
    done.prepare(begin, end);
    const typename Steps::X* xt = x + begin * x_stride;
    float* at = acc + begin * acc_stride;
    int v = 0;
    for (; v + kTileVectors <= vectors; v += kTileVectors) {
      tile_rows<Steps, kTileVectors>(count, xt, x_stride, block.from(v), units, at + v * kPanelRows, acc_stride, fresh,
                                     ahead);
    }
    if constexpr (kTileVectors > 2) {
      for (; v + 2 <= vectors; v += 2) {
        tile_rows<Steps, 2>(count, xt, x_stride, block.from(v), units, at + v * kPanelRows, acc_stride, fresh, ahead);
      }
    }
    for (; v < vectors; ++v) {
      tile_rows<Steps, 1>(count, xt, x_stride, block.from(v), units, at + v * kPanelRows, acc_stride, fresh, ahead);
    }
    done(acc, begin, end);
  }
}

template <typename Steps>
void blocked_panels(const Panel* panels, int count, int next_count, const typename Steps::X* x, int64_t stride,
                    int64_t k, int64_t rows, typename Steps::B* block, float* acc, const Finish& done) {
  const int64_t units = (k + Steps::kStepsPerUnit - 1) / Steps::kStepsPerUnit;
  constexpr bool kWide = std::is_same_v<typename Steps::B, float>;
  int64_t most = (kWide && rows <= kHalfBlockRows ? kBlockSteps / 2 : kBlockSteps) / Steps::kStepsPerUnit;
  if constexpr (Steps::kChunkUnits > 0) most = Steps::kChunkUnits;
  for (int64_t u0 = 0; u0 < units; u0 += most) {
    const int64_t here = units - u0 < most ? units - u0 : most;
    for (int p = 0; p < count; ++p) {
      // A group past k writes steps that are never read: the block has room for whole groups.
      for (int64_t u = 0; u < here; u += Steps::kUnits) {
        Steps::fill_block(panels[p], (u0 + u) / Steps::kUnits, block + p * Steps::kBlockPanel + u * Steps::kBlockUnit);
      }
    }
    Ahead ahead;
    const bool last = u0 + here >= units;
    const int64_t next_group = last ? 0 : (u0 + here) / Steps::kUnits;
    for (int p = 0; p < (last ? next_count : count); ++p) {
      Steps::list_runs(panels[last ? count + p : p], next_group, ahead);
    }
    multiply_block<Steps>(x + u0, stride, rows, UnpackedBlock<Steps>{block}, count, here, acc, kGroupColumns, u0 == 0,
                          ahead, last ? done : Finish{});
  }
}

// Few rows of x in the order in which direct() reads them; made once for all panels that multiply the same x.
struct DirectRows {
  void* area;  // of linear_scratch_bytes
  cpu::PackedRows& packed;

  // `at`: where in the area. The second half of rows lies behind the first.
  template <typename X>
  const X* get(const X* x, int64_t stride, int64_t units, int rows, int64_t at = 0) {
    if (rows <= kPointerRows) return x;
    auto* rows_at = static_cast<X*>(area) + at;
    if constexpr (kPointerRows < kDirectUpperRows) {
      const void*& here = packed.source[at == 0 ? 0 : 1];
      if (here != x) pack_rows(x, stride, units, rows, rows_at);
      here = x;
    }
    return rows_at;
  }

#if defined(NFP_HAVE_MOVED_UPPERS)
  static_assert(kPointerRows >= kDirectRows, "the area is free");
  // [rows, k] for MovedSteps; null where it is not for these rows.
  const float* moved(const float* x, int64_t stride, int64_t k, int64_t rows) {
    if (rows > MovedSteps::kMostHalvedRows) return nullptr;
    auto* to = static_cast<float*>(area);
    if (packed.source[0] != x) {
      packed.source[1] = move_rows(x, stride, k, rows, to) ? to : nullptr;
      packed.source[0] = x;
    }
    return packed.source[1] == nullptr ? nullptr : to;
  }
#endif
};

// False where there are more rows than are multiplied from registers.
template <typename Steps>
bool run_few(const LinearTask& task, const Panel* panels, int count, const typename Steps::X* x, int64_t stride,
             float* acc, DirectRows& few, const Finish& done) {
  const int64_t units = (task.k + Steps::kStepsPerUnit - 1) / Steps::kStepsPerUnit;
  if (task.rows <= Steps::kMostDirectRows) {
    direct_panels<Steps>(task, panels, count, few.get(x, stride, units, task.rows), stride, units, task.rows, acc);
  } else if (task.rows <= Steps::kMostHalvedRows) {
    const int half = (task.rows + 1) / 2;
    for (int first = 0; first < task.rows; first += half) {
      const int rows = first + half <= task.rows ? half : task.rows - first;
      const auto* packed = few.get(x + first * stride, stride, units, rows, first == 0 ? 0 : half * units);
      direct_panels<Steps>(task, panels, count, packed, stride, units, rows, acc + first * kGroupColumns);
    }
  } else {
    return false;
  }
  done(acc, 0, task.rows);
  return true;
}

template <typename Steps>
void run_panels(const LinearTask& task, const Panel* panels, int count, const typename Steps::X* x, int64_t stride,
                void* block, float* acc, DirectRows& few, const Finish& done) {
  if (run_few<Steps>(task, panels, count, x, stride, acc, few, done)) return;
  const int64_t left = task.last - (panels - task.panels) - count;
  const int next_count = left < kGroupPanels ? static_cast<int>(left) : kGroupPanels;
  blocked_panels<Steps>(panels, count, next_count, x, stride, task.k, task.rows, static_cast<typename Steps::B*>(block),
                        acc, done);
}

inline Source source_of(const LinearTask& task, const Panel& panel) {
  if (panel.kind == PanelKind::kDense) return Source::kDense;
  return task.upper_only ? Source::kUpper : Source::kBoth;
}

#if defined(NFP_HAVE_TILES)
template <typename Done>
void multiply_on_tiles(const LinearTask& task, const Panel* panels, int count, Done done) {
  if (panels->kind == PanelKind::kDense) {
    tile_panels<DenseTiles>(task, panels, count, done);
  } else if (task.upper_only) {
    tile_panels<UpperTiles>(task, panels, count, done);
  } else {
    tile_panels<SplitTiles>(task, panels, count, done);
  }
}

// How many panels from `panels` on are multiplied on tiles together: whole groups, or all to the task's end.
inline int panels_on_tiles(const LinearTask& task, const Panel* panels) {
  if (!takes_prepared(task, *panels)) return 0;
  const int most = static_cast<int>(panels_alike(task, panels, kTilePanels));
  return panels + most == task.panels + task.last || most == kTilePanels ? most : most / kGroupPanels * kGroupPanels;
}
#endif

template <cpu::PairArithmetic A>
void linear(const LinearTask& task) {
  [[maybe_unused]] constexpr bool kTiles = A == cpu::PairArithmetic::kBf16Tiles;
  auto& packed = *static_cast<cpu::PackedRows*>(task.scratch);
  if (!task.same_x) packed = {};
  void* block = static_cast<char*>(task.scratch) + cpu::kPackedRowsBytes;
  float* acc = static_cast<float*>(block) + kBlockSteps * kGroupColumns;
  DirectRows few{acc + task.rows * kGroupColumns, packed};
#if defined(NFP_HAVE_TILES)
  const bool on_tiles = kTiles && task.x_pairs != nullptr;
  if (on_tiles) begin_tiles(static_cast<int>(task.rows < kTileHeight ? task.rows : kTileHeight), weight_tile(0));
#endif
  int count = 0;
  for (int64_t first = task.first; first < task.last; first += count) {
    const Panel* panels = task.panels + first;
#if defined(NFP_HAVE_TILES)
    if (on_tiles) {
      count = panels_on_tiles(task, panels);
      if (count > 0) {
        multiply_on_tiles(task, panels, count, [&](const float* sums, int group, int64_t row, int64_t end) {
          finish(task, panels + group, count - group < kGroupPanels ? count - group : kGroupPanels, sums, row, end);
        });
        continue;
      }
    }
#endif
    count = static_cast<int>(task.last - first < kGroupPanels ? task.last - first : kGroupPanels);
    bool mixed = false;
    for (int begin = 0, end = 0; begin < count; begin = end) {  // runs of panels that compute alike
      const Source source = source_of(task, panels[begin]);
      while (end < count && source_of(task, panels[end]) == source) ++end;
      float* out = acc + begin * kPanelRows;
      // Panels that compute alike are finished at once; a mixed group when all of it is there.
      mixed = end - begin < count;
      const Finish done = mixed ? Finish{} : Finish{&task, panels, count};
#if defined(NFP_HAVE_TILES)
      if (on_tiles && takes_prepared(task, panels[begin])) {
        multiply_on_tiles(task, panels + begin, end - begin, [&](const float* sums, int, int64_t row, int64_t last) {
          for (int64_t m = row; m < last; ++m) {
            for (int p = 0; p < end - begin; ++p) {
              store(out + m * kGroupColumns + p * kPanelRows, load(sums + m * kGroupColumns + p * kPanelRows));
            }
          }
          if (last == task.rows) done(out, 0, task.rows);
        });
        continue;
      }
#endif
      switch (source) {
        case Source::kBoth:
          run_panels<Fp32Steps<Source::kBoth>>(task, panels + begin, end - begin, task.x, task.x_stride, block, out,
                                               few, done);
          break;
        case Source::kUpper:
          if constexpr (A != cpu::PairArithmetic::kNone && !kTiles) {
            if (task.x_pairs != nullptr) {
              run_panels<StepsOf<A>>(task, panels + begin, end - begin, task.x_pairs, (task.k + 1) / 2, block, out, few,
                                     done);
              break;
            }
          }
          {
            const float* const x = task.x_codes != nullptr ? task.x_codes : task.x;
            const int64_t stride = task.x_codes != nullptr ? task.k : task.x_stride;
#if defined(NFP_HAVE_MOVED_UPPERS)
            if (task.cheap_subnormals) {
              if (const float* const moved = few.moved(x, stride, task.k, task.rows); moved != nullptr) {
                run_few<MovedSteps>(task, panels + begin, end - begin, moved, task.k, out, few, done);
                break;
              }
            }
#endif
            run_panels<Fp32Steps<Source::kUpper>>(task, panels + begin, end - begin, x, stride, block, out, few, done);
          }
          break;
        case Source::kDense:
          run_panels<Fp32Steps<Source::kDense>>(task, panels + begin, end - begin, task.x, task.x_stride, block, out,
                                                few, done);
          break;
      }
    }
    if (mixed) finish(task, panels, count, acc, 0, task.rows);
  }
#if defined(NFP_HAVE_TILES)
  if (on_tiles) end_tiles();
#endif
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
