#include "backend/cpu/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "backend/cpu/testing/reference.h"
#include "backend/race.h"

namespace nfp::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Known answers of the Random123 distribution (kat_vectors, philox4x32-10).
TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, KnownAnswersOf2x32) {
  using Words = std::array<uint32_t, 2>;
  EXPECT_EQ(philox2x32({0, 0}, 0), (Words{0xff1dae59, 0x6cd10df2}));
  EXPECT_EQ(philox2x32({0xffffffff, 0xffffffff}, 0xffffffff), (Words{0x2c3f628b, 0xab4fd7ad}));
  EXPECT_EQ(philox2x32({0x243f6a88, 0x85a308d3}, 0x13198a2e), (Words{0xdd7ce038, 0xf62a4c12}));
}

TEST(Race, ExponentialsHaveTheRightMeanVarianceAndEnds) {
  double sum = 0, squares = 0;
  constexpr int32_t kCount = 40000;
  for (int32_t id = 0; id < kCount; ++id) {
    const double e = exponential_of(race_word(race_key(7, 3), id));
    sum += e;
    squares += e * e;
  }
  const double mean = sum / kCount;
  EXPECT_NEAR(mean, 1.0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount - mean * mean, 1.0, 5 * std::sqrt(8.0 / kCount));  // the variance's own: 8 / n
  EXPECT_GE(std::log2(exponential_of(0)), static_cast<double>(kLeastLog2OfExponential));
  EXPECT_LT(exponential_of(0xffffffffu), 23.0);
}

struct Settings {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
  float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
  int32_t history_slot = -1;
  std::vector<int32_t> bias_token = {};
  std::vector<float> bias_value = {};
  std::vector<uint32_t> allowed = {};
};

class Fixture {
 public:
  explicit Fixture(const KernelTable& table) : table_(table) {}

  int32_t sample(const std::vector<float>& logits, const Settings& s, uint64_t seed, uint64_t draw,
                 TokenHistory* history = nullptr) {
    const int32_t vocab = static_cast<int32_t>(logits.size());
    scratch_.reserve(vocab);
    std::vector<LogitBias> bias;
    for (size_t i = 0; i < s.bias_token.size(); ++i) bias.push_back({s.bias_token[i], s.bias_value[i]});
    SampledRow sampled{.token = -7};
    SamplingRow row;
    SampleArgs args;
    args.logits = logits.data();
    args.rows = 1;
    args.vocab = vocab;
    row.temperature = s.temperature;
    row.top_k = s.top_k;
    row.top_p = s.top_p;
    row.min_p = s.min_p;
    row.repetition_penalty = s.repetition;
    row.presence_penalty = s.presence;
    row.frequency_penalty = s.frequency;
    row.history_slot = s.history_slot;
    row.seed = seed;
    row.draw = draw;
    row.bias_count = static_cast<int32_t>(bias.size());
    row.allowed_row = s.allowed.empty() ? -1 : 0;
    args.row = &row;
    args.bias = bias.data();
    args.allowed = s.allowed.data();
    args.allowed_words = static_cast<int32_t>(s.allowed.size());
    args.history = history;
    args.out = &sampled;
    sample_row(table_, args, 0, scratch_);
    not_finite = sampled.not_finite != 0;
    return sampled.token;
  }
  bool not_finite = false;  // of the last row

 private:
  const KernelTable& table_;
  SampleScratch scratch_;
};

// Probabilities after temperature, top-k, top-p and min-p, from the definitions.
std::vector<double> defined(const std::vector<float>& logits, const Settings& s) {
  std::vector<std::pair<double, int>> order;
  const double most = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  for (size_t i = 0; i < logits.size(); ++i) {
    order.emplace_back(-std::exp((static_cast<double>(logits[i]) - most) / static_cast<double>(s.temperature)),
                       static_cast<int>(i));
  }
  std::sort(order.begin(), order.end());
  if (s.top_k > 0 && static_cast<size_t>(s.top_k) < order.size()) order.resize(static_cast<size_t>(s.top_k));
  double total = 0;
  for (const auto& [w, id] : order) total -= w;
  double cumulative = 0;
  size_t keep = 0;
  while (keep < order.size() && (keep == 0 || cumulative < static_cast<double>(s.top_p) * total)) {
    cumulative -= order[keep++].first;
  }
  order.resize(keep);
  while (order.size() > 1 && -order.back().first < static_cast<double>(s.min_p)) order.pop_back();
  total = 0;
  for (const auto& [w, id] : order) total -= w;
  std::vector<double> p(logits.size(), 0.0);
  for (const auto& [w, id] : order) p[static_cast<size_t>(id)] = -w / total;
  return p;
}

TEST(Sample, FollowsTheDistribution) {
  Random random(21);
  const std::vector<float> logits = random.normals(50, 2.0f);
  const std::vector<Settings> all = {
      {.temperature = 1.0f}, {.temperature = 0.5f}, {.top_k = 5},
      {.top_p = 0.7f},       {.min_p = 0.1f},       {.temperature = 1.5f, .top_k = 20, .top_p = 0.8f, .min_p = 0.05f},
      {.top_k = 1},          {.top_p = 1e-6f}};
  Fixture fixture(*runnable_tables().back());
  for (const Settings& settings : all) {
    const std::vector<double> want = defined(logits, settings);
    std::vector<int> count(logits.size(), 0);
    constexpr int kDraws = 20000;
    for (uint64_t i = 0; i < kDraws; ++i) ++count[static_cast<size_t>(fixture.sample(logits, settings, 99, i))];
    double chi = 0;
    int degrees = -1;
    double rest_want = 0, rest_got = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      if (want[i] == 0.0) {
        EXPECT_EQ(count[i], 0) << "token " << i << " was cut";
        continue;
      }
      if (want[i] * kDraws < 5) {  // too rare for the statistic alone
        rest_want += want[i] * kDraws;
        rest_got += count[i];
        continue;
      }
      chi += (count[i] - want[i] * kDraws) * (count[i] - want[i] * kDraws) / (want[i] * kDraws);
      ++degrees;
    }
    if (rest_want >= 5) {
      chi += (rest_got - rest_want) * (rest_got - rest_want) / rest_want;
      ++degrees;
    }
    // Mean `degrees`, variance twice that: five standard deviations, with room for the small ones' skew.
    EXPECT_LT(chi, degrees + 5 * std::sqrt(2.0 * degrees + 1) + 5) << "degrees " << degrees;
  }
}

// Whoever of the kept arrives first, by the definitions of race.h alone.
int32_t first_of_kept(const std::vector<float>& logits, const Settings& s, uint64_t seed, uint64_t draw) {
  const std::vector<double> p = defined(logits, s);
  const float most = *std::max_element(logits.begin(), logits.end());
  int32_t first = 0;
  double earliest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] <= 0) continue;
    const uint32_t word = race_word(race_key(seed, draw), static_cast<int32_t>(i));
    const double arrival = arrival_of(word, logits[i], most, 1.0f / s.temperature);
    if (arrival < earliest) {
      earliest = arrival;
      first = static_cast<int32_t>(i);
    }
  }
  return first;
}

TEST(Sample, WhoArrivesFirstIsDrawn) {
  Random random(28);
  for (int round = 0; round < 120; ++round) {
    const int32_t vocab = random.integer(1, round % 4 == 0 ? 9000 : 300);
    const float deviation = round % 5 == 0 ? 0.01f : static_cast<float>(round % 5);  // from flat to peaked
    const std::vector<float> logits = random.normals(static_cast<size_t>(vocab), deviation);
    const Settings settings{.temperature = round % 2 == 0 ? 1.0f : 0.3f + 0.01f * static_cast<float>(round),
                            .top_k = round % 3 == 0 ? random.integer(1, vocab + 2) : 0,
                            .top_p = round % 4 == 1 ? 0.002f + 0.008f * static_cast<float>(round) : 1.0f,
                            .min_p = round % 7 == 0 ? 0.01f * static_cast<float>(round % 30) : 0.0f};
    for (const KernelTable* table : runnable_tables()) {
      for (uint64_t draw = 0; draw < 10; ++draw) {
        const uint64_t place = draw << (draw % 2 == 0 ? 0 : 33);
        ASSERT_EQ(Fixture(*table).sample(logits, settings, ~uint64_t{0} - draw, place),
                  first_of_kept(logits, settings, ~uint64_t{0} - draw, place))
            << table->name << " round " << round;
      }
    }
  }
}

// Rows that nearly agree draw the same token nearly always, whatever the size of the vocabulary.
TEST(Sample, NearRowsDrawTheSameToken) {
  Random random(29);
  Fixture fixture(*runnable_tables().back());
  for (const size_t vocab : {50u, 5000u}) {
    const std::vector<float> a = random.normals(vocab, 1.5f);
    std::vector<float> b = a;
    for (float& x : b) x += 0.1f * random.normals(1)[0];
    const std::vector<double> p = defined(a, {}), q = defined(b, {});
    double distance = 0;
    for (size_t i = 0; i < vocab; ++i) distance += std::fabs(p[i] - q[i]) / 2;
    constexpr int kDraws = 4000;
    int same = 0;
    for (uint64_t i = 0; i < kDraws; ++i) same += fixture.sample(a, {}, 9, i) == fixture.sample(b, {}, 9, i) ? 1 : 0;
    const double bound = (1 - distance) / (1 + distance);
    EXPECT_GE(same, kDraws * bound - 5 * std::sqrt(kDraws * bound * (1 - bound))) << "distance " << distance;
    EXPECT_LT(same, kDraws);
  }
}

TEST(Sample, EveryTableDrawsTheSameTokens) {
  Random random(22);
  for (const int vocab : {1, 15, 1000, 49152}) {
    const std::vector<float> logits = random.normals(static_cast<size_t>(vocab), 3.0f);
    for (const Settings& settings : std::vector<Settings>{{}, {.top_k = 40}, {.top_p = 0.95f}, {.top_p = 0.9999f}}) {
      for (uint64_t draw = 0; draw < 8; ++draw) {
        Fixture reference(scalar_kernels());
        const int32_t want = reference.sample(logits, settings, 5, draw);
        for (const KernelTable* table : runnable_tables()) {
          EXPECT_EQ(Fixture(*table).sample(logits, settings, 5, draw), want) << table->name << " vocab " << vocab;
        }
      }
    }
  }
}

TEST(Sample, TopPKeepsTheSmallestSetThatReachesItsMass) {
  Random random(23);
  for (int round = 0; round < 30; ++round) {
    // From peaked to flat: the flat ones take the path that looks at every token.
    const std::vector<float> logits = random.normals(3000, round % 3 == 0 ? 0.01f : static_cast<float>(round % 5));
    const Settings settings{.top_p = 0.05f + 0.03f * static_cast<float>(round)};
    const std::vector<double> want = defined(logits, settings);
    Fixture fixture(*runnable_tables().back());
    for (uint64_t draw = 0; draw < 200; ++draw) {
      EXPECT_GT(want[static_cast<size_t>(fixture.sample(logits, settings, 3, draw))], 0.0);
    }
  }
}

TEST(Sample, TopPOfZeroIsGreedy) {
  Random random(29);
  for (const float deviation : {0.0f, 0.01f, 1.0f, 5.0f}) {  // from equal logits to peaked ones
    const std::vector<float> logits = random.normals(3000, deviation);
    Fixture fixture(*runnable_tables().back());
    const int32_t greedy = fixture.sample(logits, {.temperature = 0.0f}, 0, 0);
    for (const Settings& settings : {Settings{.top_p = 0.0f},
                                     {.temperature = 50.0f, .top_p = 0.0f},
                                     {.top_k = 40, .top_p = 0.0f, .min_p = 0.1f}}) {
      for (uint64_t draw = 0; draw < 50; ++draw) EXPECT_EQ(fixture.sample(logits, settings, 3, draw), greedy);
    }
  }
}

TEST(Sample, GreedyTakesTheLowestIdAmongEquals) {
  for (const KernelTable* table : runnable_tables()) {
    Fixture fixture(*table);
    const Settings greedy{.temperature = 0.0f};
    for (const size_t vocab : {1u, 7u, 16u, 31u, 33u, 500u}) {
      for (size_t at = 0; at < vocab; ++at) {
        std::vector<float> logits(vocab, -3.0f);
        logits[at] = 4.0f;
        logits[vocab - 1] = 4.0f;
        EXPECT_EQ(fixture.sample(logits, greedy, 0, 0), static_cast<int32_t>(at)) << table->name;
      }
    }
  }
}

TEST(Sample, NaNAndInfinityDoNotCrash) {
  for (const KernelTable* table : runnable_tables()) {
    Fixture fixture(*table);
    for (const Settings& s :
         std::vector<Settings>{{.temperature = 0.0f}, {}, {.top_k = 3}, {.top_p = 0.9f}, {.min_p = 0.1f}}) {
      EXPECT_EQ(fixture.sample(std::vector<float>(40, -kInfinity), s, 1, 1), 0);
      EXPECT_TRUE(fixture.not_finite);
      EXPECT_EQ(fixture.sample(std::vector<float>(40, kNaN), s, 1, 1), 0);
      EXPECT_TRUE(fixture.not_finite);
      std::vector<float> logits(40, kNaN);
      logits[17] = -5.0f;
      EXPECT_EQ(fixture.sample(logits, s, 1, 1), 17) << table->name;
      EXPECT_FALSE(fixture.not_finite);
      logits[30] = kInfinity;
      EXPECT_EQ(fixture.sample(logits, s, 1, 1), 30);
      EXPECT_TRUE(fixture.not_finite);
    }
  }
}

TEST(Sample, BiasAndMask) {
  Random random(24);
  std::vector<float> logits = random.normals(100);
  Fixture fixture(*runnable_tables().back());
  Settings s{.temperature = 0.0f, .bias_token = {42, 3, 1000, -1}, .bias_value = {100.0f, 5.0f, 1.0f, 1.0f}};
  EXPECT_EQ(fixture.sample(logits, s, 0, 0), 42);
  s.bias_value[0] = -kInfinity;
  EXPECT_NE(fixture.sample(logits, s, 0, 0), 42);
  s = {.allowed = {0, 1u << 5, 0, 0}};
  for (uint64_t i = 0; i < 20; ++i) EXPECT_EQ(fixture.sample(logits, s, 0, i), 37);
  s.allowed = {0, 1u << 5};  // words that are not there allow nothing
  EXPECT_EQ(fixture.sample(logits, s, 0, 0), 37);
  EXPECT_FALSE(fixture.not_finite);
  fixture.sample(std::vector<float>(100, kNaN), s, 0, 0);
  EXPECT_TRUE(fixture.not_finite);
}

TEST(Sample, PenaltiesAgainstPlainCode) {
  Random random(25);
  for (int round = 0; round < 20; ++round) {
    const int vocab = 60;
    const std::vector<float> logits = random.normals(static_cast<size_t>(vocab), 2.0f);
    auto history = CpuTokenHistory::create(3, vocab).value();
    std::vector<int32_t> prompt, output;
    for (int i = 0; i < 30; ++i) prompt.push_back(random.integer(0, vocab - 1));
    for (int i = 0; i < 20; ++i) output.push_back(random.integer(0, vocab - 1));
    ASSERT_TRUE(history->reset(1, std::vector<int32_t>{1, 2}, std::vector<int32_t>{5}).ok());  // forgotten again
    ASSERT_TRUE(history->reset(1, prompt, {output.data(), 15}).ok());
    for (size_t i = 15; i < 20; ++i) history->append(1, output[i]);
    const Settings s{.temperature = 0.0f, .repetition = 1.3f, .presence = 0.4f, .frequency = 0.2f, .history_slot = 1};
    std::vector<float> want = logits;
    for (int32_t t = 0; t < vocab; ++t) {
      const auto n = std::count(output.begin(), output.end(), t);
      float& x = want[static_cast<size_t>(t)];
      if (n > 0 || std::count(prompt.begin(), prompt.end(), t) > 0) x = x > 0 ? x / 1.3f : x * 1.3f;
      if (n > 0) x -= 0.4f + 0.2f * static_cast<float>(n);
    }
    Fixture fixture(*runnable_tables().back());
    EXPECT_EQ(fixture.sample(logits, s, 0, 0, history.get()),
              std::max_element(want.begin(), want.end()) - want.begin());
  }
}

TEST(TokenHistory, RefusesTokensOutsideTheVocabulary) {
  auto history = CpuTokenHistory::create(1, 10).value();
  EXPECT_FALSE(history->reset(0, std::vector<int32_t>{10}, {}).ok());
  EXPECT_FALSE(history->reset(0, {}, std::vector<int32_t>{-1}).ok());
}

TEST(Score, LogprobsRanksAndAlternatives) {
  Random random(26);
  for (const int vocab : {1, 5, 300, 5000}) {
    std::vector<float> logits = random.normals(static_cast<size_t>(vocab), 3.0f);
    if (vocab > 10) {
      logits[7] = logits[3];  // a tie
      logits[9] = -kInfinity;
      logits[8] = kNaN;
    }
    double total = 0;
    for (const float v : logits) total += std::isnan(v) ? 0 : std::exp(static_cast<double>(v));
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    for (int32_t i = 0; i < vocab; ++i) order[static_cast<size_t>(i)] = i;
    std::erase_if(order, [&](int32_t i) { return std::isnan(logits[static_cast<size_t>(i)]); });
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    for (const KernelTable* table : runnable_tables()) {
      SampleScratch scratch;
      scratch.reserve(vocab);
      for (const size_t place : {size_t{0}, order.size() / 2, order.size() - 1}) {
        const int32_t target = order[place];
        SampledRow scored;
        std::vector<TokenLogprob> top(128);
        ScoreArgs args;
        args.logits = logits.data();
        args.target = &target;
        args.rows = 1;
        args.vocab = vocab;
        args.top_n = 128;
        args.out = &scored;
        args.top = top.data();
        score_row(*table, args, 0, scratch);
        const double want = static_cast<double>(logits[static_cast<size_t>(target)]) - std::log(total);
        if (std::isinf(want)) {
          EXPECT_EQ(scored.logprob, -kInfinity);
        } else {
          EXPECT_NEAR(scored.logprob, want, 1e-5 * std::max(1.0, std::fabs(want))) << table->name;
        }
        EXPECT_EQ(scored.rank, static_cast<int32_t>(place) + 1) << table->name << " vocab " << vocab;
        for (size_t i = 0; i < 128; ++i) EXPECT_EQ(top[i].token, i < order.size() ? order[i] : -1) << table->name;
        EXPECT_NEAR(top[0].logprob, static_cast<double>(logits[static_cast<size_t>(order[0])]) - std::log(total), 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace nfp::cpu
