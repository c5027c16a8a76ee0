// Sampling and scoring against the CPU's sampler, and against float64 where the two differ by rounding. Needs a Hopper
// GPU; skips elsewhere.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "backend/cpu/sampler.h"
#include "backend/cuda/sampling/sampling.h"
#include "backend/cuda/testing/device.h"
#include "backend/cuda/testing/row_largest.h"
#include "backend/race.h"

namespace nfp::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Batch {
  int32_t vocab = 0;
  int32_t rows = 0;
  int64_t ld = 0;
  std::vector<float> logits;  // [rows, ld]
  std::vector<SamplingRow> row;
  std::vector<LogitBias> bias;
  std::vector<uint32_t> allowed;  // [*, allowed_words]
  int32_t allowed_words = 0;
  std::vector<std::vector<int32_t>> prompt, output;  // of each history slot

  const float* logits_of(int32_t r) const { return logits.data() + r * ld; }
};

class Generator {
 public:
  explicit Generator(uint32_t seed) : engine_(seed) {}
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  bool one_in(int n) { return integer(1, n) == 1; }
  template <typename T>
  T of(std::initializer_list<T> values) {
    return values.begin()[integer(0, static_cast<int>(values.size()) - 1)];
  }
  // Cheap and near enough to normal: only the shape matters.
  float normal() {
    float sum = 0;
    const uint64_t bits = engine_();
    for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xffff);
    return (sum * 0x1p-16f - 2.0f) * 1.732f + 0.3f * tail();
  }

  void fill(float* x, int32_t n) {
    const int kind = integer(0, 11);
    const float sigma = of({0.5f, 1.0f, 3.0f, 10.0f});
    for (int32_t i = 0; i < n; ++i) x[i] = kind == 11 ? 0.25f : normal() * sigma;
    const auto some = [&](int count, auto value) {
      for (int i = 0; i < count; ++i) x[integer(0, n - 1)] = value(i);
    };
    switch (kind) {
      case 0:  // peaked
        some(8, [&](int i) { return 12.0f + 2.0f * static_cast<float>(i); });
        break;
      case 1:  // ties
        for (int32_t i = 0; i < n; ++i) x[i] = std::round(x[i] * 2) / 2 * (one_in(2) ? 1.0f : -1.0f);
        break;
      case 2:
        for (int32_t i = 0; i < n; ++i) x[i] *= 1e-4f;
        break;
      case 3:
        some(n / 2, [](int) { return -kInfinity; });
        break;
      case 4:
        some(n / 3, [](int i) { return i % 2 == 0 ? kNaN : -kNaN; });
        break;
      case 5:
        if (one_in(3)) {
          std::fill_n(x, n, one_in(2) ? kNaN : -kInfinity);
          if (one_in(2)) x[integer(0, n - 1)] = of({-5.0f, kInfinity, -kInfinity, 3e38f});
        }
        break;
      case 6:  // zeros of both signs on top
        for (int32_t i = 0; i < n; ++i) x[i] = one_in(3) ? (one_in(2) ? 0.0f : -0.0f) : -std::fabs(x[i]);
        break;
      default:
        break;
    }
  }

  // Rows that are hard on bounds, brackets and lists.
  static constexpr int kShapes = 11;
  void shape(float* x, int32_t n, int kind) {
    for (int32_t i = 0; i < n; ++i) x[i] = normal() * 0.3f;  // flat
    const auto some = [&](int count, float value) {
      for (int i = 0; i < count; ++i) x[integer(0, n - 1)] = value;
    };
    switch (kind) {
      case 1:  // one dominates
        some(1, 60.0f);
        break;
      case 2:
        std::fill_n(x, n, 0.25f);
        break;
      case 3:  // what a grammar leaves
        std::fill_n(x, n, -kInfinity);
        for (int i = 0; i < 3; ++i) some(1, normal());
        break;
      case 4:  // ties at every limit
        for (int32_t i = 0; i < n; ++i) x[i] = one_in(2) ? 1.0f : 0.0f;
        break;
      case 5:  // likely ids lie together
        for (int32_t i = 0; i < n; ++i) x[i] += -1.2f * std::log(static_cast<float>(i + 1));
        break;
      case 6:
        for (int32_t i = 0; i < n; ++i) x[i] *= 3000.0f;
        break;
      case 7:  // ascending, and flatter than a key at the end
        for (int32_t i = 0; i < n; ++i) x[i] = static_cast<float>(i) * 1e-7f;
        break;
      case 8:  // more ties below the largest than a list takes
        std::fill_n(x, n, -3.0f);
        some(5, 2.0f);
        some(1, 2.5f);
        break;
      case 9:  // all but a few are far down
        for (int32_t i = 0; i < n; ++i) x[i] -= 200.0f;
        for (int i = 0; i < 40; ++i) some(1, normal() * 3);
        break;
      case 10:  // a flat bulk under a few that have much of the weight
        for (int i = 0; i < 30; ++i) some(1, 0.3f * static_cast<float>(i));
        break;
      default:
        break;
    }
  }

  Batch batch(int32_t vocab, int32_t rows, bool is_greedy) {
    Batch b;
    b.vocab = vocab;
    b.rows = rows;
    b.ld = one_in(2) ? (vocab + 3) / 4 * 4 : vocab + integer(0, 1);
    b.logits.assign(static_cast<size_t>(rows * b.ld), kNaN);
    constexpr int kSlots = 5;
    for (int s = 0; s < kSlots; ++s) {
      auto& prompt = b.prompt.emplace_back();
      auto& output = b.output.emplace_back();
      for (int i = integer(0, 300); i > 0; --i) prompt.push_back(integer(0, vocab - 1));
      for (int i = integer(0, 200); i > 0; --i) output.push_back(integer(0, std::min(vocab - 1, 50)));
    }
    b.allowed_words = (vocab + 31) / 32 - (one_in(4) ? 1 : 0);
    constexpr int kMasks = 4;
    for (int i = 0; i < kMasks * b.allowed_words; ++i) {
      const uint32_t dense = static_cast<uint32_t>(engine_()) | static_cast<uint32_t>(engine_());
      const uint32_t sparse = one_in(50) ? 1u << integer(0, 31) : 0;
      b.allowed.push_back(i / std::max(b.allowed_words, 1) == 0   ? 0xffffffffu
                          : i / std::max(b.allowed_words, 1) == 1 ? sparse
                                                                  : dense);
    }
    for (int32_t r = 0; r < rows; ++r) {
      fill(b.logits.data() + r * b.ld, vocab);
      SamplingRow s;
      if (!is_greedy) {
        s.seed = engine_();
        s.draw = engine_();
        s.temperature = of({0.0f, 0.7f, 1.0f, 1.0f, 0.3f, 2.0f, 1e-3f, 100.0f, 1e-40f});
        s.top_k = of({0, 0, 0, 1, 5, 50, 50, 1000, 1024, 1025, 5000, vocab - 1, vocab, vocab + 5});
        s.top_p = of({1.0f, 1.0f, 0.95f, 0.95f, 0.5f, 1e-6f, 0.999f, 0.0f});
        s.min_p = of({0.0f, 0.0f, 0.0f, 0.05f, 0.5f, 1e-4f, 1.5f});
        s.report = of({-1, -1, 0, 1, 5, 20, 128});
        if (one_in(3)) {
          s.history_slot = integer(0, kSlots - 1);
          s.repetition_penalty = of({1.0f, 1.3f, 0.9f});
          s.presence_penalty = of({0.0f, 0.4f, -0.3f});
          s.frequency_penalty = of({0.0f, 0.21f});
        }
        if (one_in(4)) {
          s.bias_first = static_cast<int32_t>(b.bias.size());
          std::vector<int32_t> tokens(static_cast<size_t>(integer(1, 40)));
          for (int32_t& t : tokens) t = integer(-1, vocab + 2);
          std::sort(tokens.begin(), tokens.end());
          tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
          for (const int32_t t : tokens) b.bias.push_back({t, of({-kInfinity, 3.0f, -2.5f, 100.0f, 0.125f})});
          s.bias_count = static_cast<int32_t>(tokens.size());
        }
        if (one_in(4)) s.allowed_row = integer(0, kMasks - 1);
      }
      b.row.push_back(s);
    }
    return b;
  }

 private:
  float tail() { return one_in(200) ? static_cast<float>(integer(0, 2000)) * 0.004f : 0.0f; }
  std::mt19937_64 engine_;
};

struct Reported {
  SampledRow row;
  std::vector<TokenLogprob> top;
};

// What the CPU gives for row r: `history` is read only.
Reported cpu_sample(const Batch& b, int32_t r, cpu::CpuTokenHistory& history, cpu::SampleScratch& scratch) {
  const SamplingRow& s = b.row[static_cast<size_t>(r)];
  Reported out;
  out.top.resize(static_cast<size_t>(std::max(s.report, 0)));
  SampleArgs args;
  args.logits = b.logits_of(r);
  args.rows = 1;
  args.vocab = b.vocab;
  args.row = &s;
  args.bias = b.bias.data();
  args.allowed = b.allowed.data();
  args.allowed_words = b.allowed_words;
  args.history = &history;
  args.out = &out.row;
  args.top = out.top.data();
  cpu::sample_row(cpu::scalar_kernels(), args, 0, scratch);
  return out;
}

Reported cpu_score(const Batch& b, int32_t r, int32_t target, int32_t top_n, cpu::SampleScratch& scratch) {
  Reported out;
  out.top.resize(static_cast<size_t>(top_n));
  ScoreArgs args;
  args.logits = b.logits_of(r);
  args.target = &target;
  args.rows = 1;
  args.vocab = b.vocab;
  args.top_n = top_n;
  args.out = &out.row;
  args.top = out.top.data();
  cpu::score_row(cpu::scalar_kernels(), args, 0, scratch);
  return out;
}

// From the definitions, in float64: may `token` be drawn with this u, give or take `slack` of the total at every
// boundary between tokens and at top-p's and min-p's limits?
bool may_be_drawn(const Batch& b, int32_t r, const cpu::CpuTokenHistory& history, int32_t token, double slack,
                  std::string& why) {
  const SamplingRow& s = b.row[static_cast<size_t>(r)];
  std::vector<float> x(b.logits_of(r), b.logits_of(r) + b.vocab);
  for (int32_t i = s.bias_first; i < s.bias_first + s.bias_count; ++i) {
    const LogitBias& bias = b.bias[static_cast<size_t>(i)];
    if (bias.token >= 0 && bias.token < b.vocab) x[static_cast<size_t>(bias.token)] += bias.value;
  }
  for (int32_t v = 0; v < b.vocab && s.allowed_row >= 0; ++v) {
    const bool is_allowed =
        v / 32 < b.allowed_words &&
        ((b.allowed[static_cast<size_t>(int64_t{s.allowed_row} * b.allowed_words + v / 32)] >> (v % 32)) & 1u) != 0;
    if (!is_allowed) x[static_cast<size_t>(v)] = -kInfinity;
  }
  if (s.history_slot >= 0) {
    for (const int32_t t : history.seen(s.history_slot)) {
      float& logit = x[static_cast<size_t>(t)];
      logit = logit > 0 ? logit / s.repetition_penalty : logit * s.repetition_penalty;
      const uint32_t count = history.generated(s.history_slot, t);
      if (count > 0) logit -= s.presence_penalty + s.frequency_penalty * static_cast<float>(count);
    }
  }
  for (float& v : x) v = std::isnan(v) ? -kInfinity : v;
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t i, int32_t j) { return x[static_cast<size_t>(i)] > x[static_cast<size_t>(j)]; });
  const auto maximum = static_cast<double>(x[static_cast<size_t>(order[0])]);
  const auto factor = static_cast<double>(1.0f / s.temperature);
  std::vector<double> w(x.size());
  for (size_t i = 0; i < w.size(); ++i) w[i] = std::exp((static_cast<double>(x[i]) - maximum) * factor);
  size_t most = order.size();
  if (s.top_k > 0) most = std::min(most, static_cast<size_t>(s.top_k));
  double all = 0;
  for (size_t i = 0; i < most; ++i) all += w[static_cast<size_t>(order[i])];
  // Every count of kept tokens that rounding might choose.
  std::vector<size_t> counts;
  size_t low = most, high = most;
  if (s.top_p < 1.0f) {
    double sum = 0;
    low = 0;
    for (size_t i = 0; i < most; ++i) {
      sum += w[static_cast<size_t>(order[i])];
      const double target = static_cast<double>(s.top_p) * all;
      if (low == 0 && sum >= target - slack * all) low = i + 1;
      if (sum >= target + slack * all) {
        high = i + 1;
        break;
      }
    }
  }
  if (s.min_p > 0) {
    const auto limit = static_cast<double>(s.min_p);
    while (low > 1 && w[static_cast<size_t>(order[low - 1])] < limit * (1 - 1e-6) &&
           x[static_cast<size_t>(order[low - 1])] != x[static_cast<size_t>(order[0])])
      --low;
    while (high > low && w[static_cast<size_t>(order[high - 1])] < limit * (1 - 1e-6)) --high;
    while (low > 1 && w[static_cast<size_t>(order[low - 1])] < limit * (1 + 1e-6) &&
           x[static_cast<size_t>(order[low - 1])] != x[static_cast<size_t>(order[0])])
      --low;
  }
  // Whoever arrives first of so many that are kept.
  double earliest = std::numeric_limits<double>::infinity(), own = earliest;
  for (size_t kept = 1; kept <= high; ++kept) {
    const int32_t id = order[kept - 1];
    const uint32_t word = race_word(race_key(s.seed, s.draw), id);
    const double arrival =
        arrival_of(word, x[static_cast<size_t>(id)], static_cast<float>(maximum), 1.0f / s.temperature);
    earliest = std::min(earliest, arrival);
    if (id == token) own = arrival;
    if (kept >= low && own <= earliest * (1 + slack)) return true;
  }
  why = fmt::format(" of {}..{} kept one arrives at {}, and token {} at {}", low, high, earliest, token, own);
  return false;
}

bool near(float got, float want) {
  if (std::isinf(want) || std::isinf(got)) return got == want;
  return std::fabs(got - want) <= 2e-6f * std::max(1.0f, std::fabs(want)) + 2e-6f;
}

void expect_report(const Reported& want, const SampledRow& got, const TokenLogprob* top, const std::string& where) {
  EXPECT_TRUE(near(got.logprob, want.row.logprob))
      << where << " logprob " << got.logprob << " want " << want.row.logprob;
  EXPECT_EQ(got.rank, want.row.rank) << where;
  for (size_t i = 0; i < want.top.size(); ++i) {
    ASSERT_EQ(top[i].token, want.top[i].token) << where << " place " << i;
    ASSERT_TRUE(near(top[i].logprob, want.top[i].logprob))
        << where << " place " << i << " " << top[i].logprob << " want " << want.top[i].logprob;
  }
}

class SamplingGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
};

struct Tally {
  int rows = 0, drawn = 0, by_rounding = 0;
};

void check_batch(const Batch& b, uint32_t needs, Tally& tally) {
  const auto rows = static_cast<size_t>(b.rows);
  auto history = cpu::CpuTokenHistory::create(static_cast<int32_t>(b.prompt.size()), b.vocab).value();
  const auto slots = static_cast<int32_t>(b.prompt.size());
  const DeviceVector<uint32_t> counts(static_cast<size_t>(slots * b.vocab));  // poisoned
  const TokenCounts view{counts.get(), slots, b.vocab};
  const DeviceVector<int32_t> staging(1000);
  for (int32_t s = 0; s < slots; ++s) {
    const auto at = static_cast<size_t>(s);
    ASSERT_TRUE(history->reset(s, b.prompt[at], b.output[at]).ok());
    ASSERT_TRUE(reset_history(view, s, b.prompt[at], b.output[at], staging.get(), nullptr).ok());
  }
  const DeviceVector<float> logits(b.logits);
  const DeviceVector<SamplingRow> row(b.row);
  const DeviceVector<LogitBias> bias(b.bias);
  const DeviceVector<uint32_t> allowed(b.allowed), counter(std::vector<uint32_t>{0});
  const DeviceVector<SampledRow> out(rows);
  const DeviceVector<TokenLogprob> top(rows * kMaxTopLogprobs);
  SampleCall call;
  call.logits = {logits.get(), b.ld, b.rows, b.vocab};
  call.needs = needs;
  call.row = row.get();
  call.bias = bias.get();
  call.allowed = allowed.get();
  call.allowed_words = b.allowed_words;
  call.history = view;
  call.counter = counter.get();
  call.out = out.get();
  call.top = top.get();
  const Status status = run_sample(call, nullptr);
  ASSERT_TRUE(status.ok()) << status.error().message;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto got = out.host();
  const auto got_top = top.host();
  EXPECT_EQ(std::memcmp(logits.host().data(), b.logits.data(), b.logits.size() * sizeof(float)), 0) << "logits changed";
  EXPECT_EQ(counter.host()[0], 0u);
  cpu::SampleScratch scratch;
  scratch.reserve(b.vocab);
  int failures = 0;
  for (int32_t r = 0; r < b.rows && failures < 5; ++r) {
    const auto at = static_cast<size_t>(r);
    const SamplingRow& s = b.row[at];
    const Reported want = cpu_sample(b, r, *history, scratch);
    const std::string where = fmt::format(
        "vocab {} row {} of {} T {} k {} p {} min {} slot {} bias {} mask {} report {}:", b.vocab, r, b.rows,
        s.temperature, s.top_k, s.top_p, s.min_p, s.history_slot, s.bias_count, s.allowed_row, s.report);
    ++tally.rows;
    tally.drawn += s.temperature > 0 ? 1 : 0;
    if (got[at].token != want.row.token) {
      std::string why;
      if (s.temperature > 0 && got[at].token >= 0 && got[at].token < b.vocab &&
          may_be_drawn(b, r, *history, got[at].token, 1e-6, why)) {
        ++tally.by_rounding;
        continue;
      }
      ++failures;
      ADD_FAILURE() << where << " token " << got[at].token << " want " << want.row.token << why;
      continue;
    }
    EXPECT_EQ(got[at].not_finite, want.row.not_finite) << where;
    if (s.report >= 0) {
      expect_report(want, got[at], got_top.data() + at * kMaxTopLogprobs, where);
      failures += ::testing::Test::HasFailure() ? 1 : 0;
    }
  }
  if (slots > 0 && (needs & SamplingNeeds::kPenalties) != 0) {
    auto output = b.output;
    for (int32_t r = 0; r < b.rows; ++r) {
      const int32_t slot = b.row[static_cast<size_t>(r)].history_slot;
      if (slot >= 0) output[static_cast<size_t>(slot)].push_back(got[static_cast<size_t>(r)].token);
    }
    std::vector<uint32_t> want(static_cast<size_t>(slots * b.vocab));
    for (int32_t s = 0; s < slots; ++s) {
      uint32_t* of_slot = want.data() + int64_t{s} * b.vocab;
      for (const int32_t t : b.prompt[static_cast<size_t>(s)]) of_slot[t] |= 1u;
      for (const int32_t t : output[static_cast<size_t>(s)]) of_slot[t] = (of_slot[t] | 1u) + 2;
    }
    EXPECT_EQ(counts.host(), want);
  }
}

constexpr uint32_t kEverything = SamplingNeeds::kDraw | SamplingNeeds::kLimits | SamplingNeeds::kPenalties |
                                 SamplingNeeds::kBias | SamplingNeeds::kMask | SamplingNeeds::kReport;

TEST_F(SamplingGpu, GivesTheCpusTokens) {
  Generator generator(11);
  Tally tally;
  struct Case {
    int32_t vocab, rows;
  };
  for (const Case& c : {Case{7, 256},      Case{1, 3},       Case{1000, 256},  Case{1024, 33},   Case{1025, 65},
                        Case{2049, 200},   Case{5003, 128},  Case{32000, 200}, Case{32000, 1},   Case{49152, 256},
                        Case{128256, 100}, Case{128256, 8},  Case{151936, 64}, Case{151935, 33}, Case{262144, 12},
                        Case{128256, 200}, Case{32000, 256}, Case{4096, 256},  Case{12000, 60},  Case{100352, 40}}) {
    check_batch(generator.batch(c.vocab, c.rows, false), kEverything, tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(tally.drawn, 1600);
  EXPECT_LE(tally.by_rounding, tally.drawn / 500);
  std::printf("%d rows, %d drawn, %d chosen differently by rounding\n", tally.rows, tally.drawn, tally.by_rounding);
}

TEST_F(SamplingGpu, RowsOfEveryShape) {
  Generator generator(16);
  Tally tally;
  struct Case {
    int32_t vocab, rows;
  };
  for (const Case& c : {Case{1025, 300}, Case{4097, 300}, Case{16385, 200}, Case{50257, 1}, Case{50257, 131},
                        Case{128256, 150}, Case{151935, 67}, Case{262147, 21}, Case{12000, 33}, Case{100352, 33}}) {
    Batch b = generator.batch(c.vocab, c.rows, false);
    for (int32_t r = 0; r < b.rows; ++r) {
      generator.shape(b.logits.data() + r * b.ld, b.vocab, r % Generator::kShapes);
      SamplingRow& s = b.row[static_cast<size_t>(r)];
      s.temperature = generator.of({1.0f, 1.0f, 0.7f, 1.5f});
      if (generator.one_in(3)) continue;
      s.history_slot = s.allowed_row = -1;
      s.bias_count = 0;
    }
    check_batch(b, kEverything, tally);
    if (HasFatalFailure()) return;
  }
  EXPECT_LE(tally.by_rounding, tally.drawn / 500);
  std::printf("%d rows, %d drawn, %d chosen differently by rounding\n", tally.rows, tally.drawn, tally.by_rounding);
}

// From what a product finds of its logits, which nobody has stored.
TEST_F(SamplingGpu, TheLargestOfCandidatesIsTheGreedyToken) {
  Generator generator(23);
  struct Case {
    int32_t vocab, rows;
  };
  for (const Case& c : {Case{1, 3}, Case{7, 64}, Case{1000, 130}, Case{32000, 66}, Case{49152, 8}, Case{128256, 1},
                        Case{128256, 61}, Case{151935, 33}}) {
    const Batch b = generator.batch(c.vocab, c.rows, true);
    const DeviceVector<float> logits(b.logits);
    const DeviceVector<SamplingRow> row(b.row);
    const DeviceVector<uint64_t> found(testing::largest_of(b.logits.data(), b.ld, c.rows, c.vocab));
    const DeviceVector<SampledRow> of_logits(b.row.size()), of_candidates(b.row.size());
    SampleCall call;
    call.logits = {logits.get(), b.ld, b.rows, b.vocab};
    call.row = row.get();
    call.out = of_logits.get();
    ASSERT_TRUE(run_sample(call, nullptr).ok());
    ASSERT_TRUE(run_largest({found.get(), b.rows, b.vocab, of_candidates.get()}, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto want = of_logits.host(), got = of_candidates.host();
    for (size_t r = 0; r < want.size(); ++r) {
      ASSERT_EQ(got[r].token, want[r].token) << "vocab " << c.vocab << " row " << r;
      ASSERT_EQ(got[r].not_finite, want[r].not_finite) << "vocab " << c.vocab << " row " << r;
    }
  }
}

// Two runners that FP32 cannot tell apart with certainty, of one warp and of two blocks.
TEST_F(SamplingGpu, NearRunnersAreToldApart) {
  Batch b;
  b.vocab = 16384;
  b.ld = b.vocab;
  b.prompt.resize(1);
  b.output.resize(1);
  uint64_t draw = 0;
  const auto are_near = [](double a, double c) { return std::fabs(a - c) < 1e-4 * c; };
  for (int32_t other : {9, 16000}) {
    for (int i = 0; i < 30; ++i) {
      const auto when = [&](int32_t id) { return exponential_of(race_word(race_key(1, draw), id)); };
      do ++draw;
      while (!are_near(when(5), when(other)));
      SamplingRow row;
      row.seed = 1;
      row.draw = draw;
      row.temperature = 1.0f;
      b.row.push_back(row);
      b.logits.insert(b.logits.end(), static_cast<size_t>(b.vocab), -kInfinity);
      b.logits[b.logits.size() - static_cast<size_t>(b.vocab) + 5] = 1.0f;
      b.logits[b.logits.size() - static_cast<size_t>(b.vocab - other)] = 1.0f;
      ++b.rows;
    }
  }
  Tally tally;
  check_batch(b, SamplingNeeds::kDraw, tally);
  EXPECT_EQ(tally.drawn, 60);
  EXPECT_EQ(tally.by_rounding, 0);
}

TEST_F(SamplingGpu, GreedyRowsGiveTheCpusTokens) {
  Generator generator(12);
  Tally tally;
  for (const int32_t vocab : {7, 1000, 32000, 49152, 128256, 151936, 151937, kMaxVocab}) {
    check_batch(generator.batch(vocab, vocab > 200000 ? 3 : 40, true), 0, tally);
    if (HasFatalFailure()) return;
  }
}

TEST_F(SamplingGpu, LargestVocabulary) {
  Generator generator(13);
  Tally tally;
  check_batch(generator.batch(kMaxVocab, 10, false), kEverything, tally);
}

TEST_F(SamplingGpu, ARowDoesNotDependOnTheOthers) {
  Generator generator(14);
  Batch one = generator.batch(49152, 1, false);
  for (int kind = 0; kind < 6; ++kind) {
    one = generator.batch(49152, 1, false);
    one.row[0].history_slot = -1;
    one.row[0].allowed_row = -1;
    one.row[0].bias_count = 0;
    one.row[0].report = 20;
    Batch many = one;
    many.rows = 150;
    for (int r = 1; r < many.rows; ++r) {
      many.logits.insert(many.logits.end(), one.logits.begin(), one.logits.end());
      many.row.push_back(one.row[0]);
    }
    const DeviceVector<float> logits(many.logits);
    const DeviceVector<SamplingRow> row(many.row);
    const DeviceVector<SampledRow> out(150);
    const DeviceVector<TokenLogprob> top(size_t{150} * kMaxTopLogprobs);
    SampleCall call;
    call.logits = {logits.get(), many.ld, many.rows, many.vocab};
    call.needs = SamplingNeeds::kDraw | SamplingNeeds::kLimits | SamplingNeeds::kReport;
    call.row = row.get();
    call.out = out.get();
    call.top = top.get();
    ASSERT_TRUE(run_sample(call, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto got = out.host();
    const auto got_top = top.host();
    for (size_t r = 1; r < got.size(); ++r) {
      // NOLINTBEGIN(bugprone-suspicious-memory-comparison): bit for bit
      ASSERT_EQ(std::memcmp(&got[r], &got[0], sizeof(SampledRow)), 0) << "row " << r;
      ASSERT_EQ(std::memcmp(&got_top[r * kMaxTopLogprobs], &got_top[0], 20 * sizeof(TokenLogprob)), 0) << "row " << r;
      // NOLINTEND(bugprone-suspicious-memory-comparison)
    }
  }
}

TEST_F(SamplingGpu, ScoresGivenTokens) {
  Generator generator(15);
  for (const int32_t vocab : {7, 1000, 1025, 32000, 49152, 128256, 151935}) {
    const Batch b = generator.batch(vocab, 48, true);
    std::vector<int32_t> target;
    target.reserve(static_cast<size_t>(b.rows));
    for (int32_t r = 0; r < b.rows; ++r) target.push_back(generator.integer(0, vocab - 1));
    for (const int32_t top_n : {0, 5, 128}) {
      const DeviceVector<float> logits(b.logits);
      const DeviceVector<int32_t> d_target(target);
      const DeviceVector<SampledRow> out(static_cast<size_t>(b.rows));
      const DeviceVector<TokenLogprob> top(static_cast<size_t>(b.rows * std::max(top_n, 1)));
      ScoreCall call;
      call.logits = {logits.get(), b.ld, b.rows, b.vocab};
      call.target = d_target.get();
      call.top_n = top_n;
      call.out = out.get();
      call.top = top.get();
      call.top_stride = top_n;
      const Status status = run_score(call, nullptr);
      ASSERT_TRUE(status.ok()) << status.error().message;
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const auto got = out.host();
      const auto got_top = top.host();
      cpu::SampleScratch scratch;
      scratch.reserve(vocab);
      for (int32_t r = 0; r < b.rows; ++r) {
        const auto at = static_cast<size_t>(r);
        const Reported want = cpu_score(b, r, target[at], top_n, scratch);
        ASSERT_EQ(got[at].token, target[at]);
        ASSERT_EQ(got[at].not_finite, want.row.not_finite);
        expect_report(want, got[at], got_top.data() + int64_t{r} * top_n,
                      fmt::format("vocab {} row {} top {}", vocab, r, top_n));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(SamplingGpu, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(run_sample({}, nullptr).ok());
  EXPECT_FALSE(run_score({}, nullptr).ok());
  const std::vector<int32_t> outside = {10};
  const DeviceVector<uint32_t> counts(10);
  EXPECT_FALSE(reset_history({counts.get(), 1, 10}, 0, outside, {}, nullptr, nullptr).ok());
}

}  // namespace
}  // namespace nfp::cuda
