#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "engine/testing/allowed_tokens_of.h"
#include "engine/testing/scripted_runner.h"
#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"

namespace nfp {
namespace {

constexpr int32_t kVocab = 100;

struct Answer {
  std::vector<int32_t> tokens;
  std::string precisions;  // 'x' or '8' a token
  std::optional<FinishReason> finish;
  Usage usage;
  std::string error;
};

EngineConfig options(int32_t kv_blocks = 64, SchedulerLimits limits = {.max_sequences = 8, .max_step_tokens = 64}) {
  EngineConfig o;
  o.limits = limits;
  o.kv_blocks = kv_blocks;
  o.block_size = 4;
  o.end_ids = {2};
  return o;
}

Request request(std::string id, std::vector<int32_t> prompt, int32_t max_tokens,
                PrecisionClass precision = PrecisionClass::kAuto) {
  Request r;
  r.id = std::move(id);
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.precision = precision;
  return r;
}

void collect(const std::vector<RequestOutput>& outputs, std::map<std::string, Answer>& answers) {
  for (const RequestOutput& output : outputs) {
    Answer& answer = answers[output.id];
    EXPECT_FALSE(answer.finish.has_value()) << "output after the end of " << output.id;
    for (const OutputToken& token : output.tokens) {
      answer.tokens.push_back(token.token);
      answer.precisions += is_exact(token.precision) ? 'x' : '8';
    }
    answer.usage = output.usage;
    answer.finish = output.finish;
    answer.error = output.error;
  }
}

std::map<std::string, Answer> run(Engine& engine) {
  std::map<std::string, Answer> answers;
  for (int i = 0; i < 10000 && !engine.idle(); ++i) collect(engine.step(), answers);
  EXPECT_TRUE(engine.idle());
  return answers;
}

std::unique_ptr<PrecisionPolicy> policy(const char* text) { return std::move(parse_policy(text).value()); }

// Allows everything, from the third time on that it is asked whether it is ready.
class LateConstraint final : public TokenConstraint {
 public:
  bool ready(std::chrono::microseconds) override { return ++asked_ % 3 == 0; }
  bool fill(std::span<uint32_t>) override { return false; }
  bool accept(int32_t) override { return accepted_++ < 5; }
  std::string_view failure() const override { return accepted_ > 5 ? "it took too long" : ""; }

 private:
  int asked_ = 0;
  int accepted_ = 0;
};

TEST(Engine, SequencesWhoseGrammarIsNotReadySitOut) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  auto slow = request("slow", {5, 6, 7}, 20);
  slow.constraint = std::make_unique<LateConstraint>();
  ASSERT_TRUE(engine.submit(std::move(slow)).ok());
  ASSERT_TRUE(engine.submit(request("quick", {5, 6, 7}, 9)).ok());
  std::map<std::string, Answer> answers;
  int steps = 0;
  for (; !answers["quick"].finish && steps < 100; ++steps) collect(engine.step(), answers);
  EXPECT_EQ(steps, 9);  // a token in every step
  EXPECT_EQ(answers["slow"].tokens.size(), 3u);
  while (!engine.idle() && ++steps < 1000) collect(engine.step(), answers);
  EXPECT_EQ(answers["slow"].finish, FinishReason::kError);
  EXPECT_EQ(answers["slow"].error, "it took too long");
}

// Takes time of a clock: while it is not ready, and on the engine's thread once it is.
class DearConstraint final : public TokenConstraint {
 public:
  DearConstraint(EngineClock::time_point* now, int late) : now_(*now), late_(late) {}
  bool ready(std::chrono::microseconds) override {
    now_ += std::chrono::milliseconds(late_ > 0 ? 2 : 30);
    return late_-- <= 0;
  }
  bool fill(std::span<uint32_t>) override { return false; }
  bool accept(int32_t) override { return true; }

 private:
  EngineClock::time_point& now_;
  int late_;
};

TEST(Engine, ReportsWhatRequestsTakeOfItsThreadBetweenSteps) {
  struct Watch final : EngineObserver {
    void on_step(const StepRecord& step) override { between_ms.push_back(std::lround(step.between_s * 1e3)); }
    std::vector<long> between_ms;
  };
  ScriptedRunner runner(kVocab, 1000);
  EngineConfig config = options();
  EngineClock::time_point now = EngineClock::now();
  config.now = [&] { return now; };
  Engine engine(config, &runner, nullptr, policy("fp16"));
  Watch watch;
  engine.set_observer(&watch);
  auto dear = request("dear", {5, 6, 7}, 2);
  dear.constraint = std::make_unique<DearConstraint>(&now, /*late=*/100);
  ASSERT_TRUE(engine.submit(std::move(dear)).ok());
  run(engine);
  now += std::chrono::seconds(1);  // idle
  ASSERT_TRUE(engine.submit(request("cheap", {5, 6, 7}, 2)).ok());
  now += std::chrono::milliseconds(5);
  run(engine);
  // The 200 ms in which there was nothing else to do do not count, but for the last wait.
  EXPECT_EQ(watch.between_ms, (std::vector<long>{32, 30, 5, 0}));
}

// Under a policy that does not plan too. Of one that leaves the queue, its wait there is what it had.
TEST(Engine, ReportsHowLongRequestsWait) {
  struct Watch final : EngineObserver {
    void on_step(const StepRecord& step) override { oldest_s.push_back(std::lround(step.oldest_wait_s)); }
    void on_first_token(double seconds, int32_t prompt_tokens) override {
      first.emplace_back(std::lround(seconds), prompt_tokens);
    }
    void on_finished(const RequestRecord& request) override { queue_s[request.id] = std::lround(request.queue_s); }
    std::vector<long> oldest_s;
    std::vector<std::pair<long, int32_t>> first;
    std::map<std::string, long> queue_s;
  };
  ScriptedRunner runner(kVocab, 1000);
  EngineConfig config = options(64, {.max_sequences = 1, .max_step_tokens = 64});
  EngineClock::time_point now = EngineClock::now();
  config.now = [&] { return now; };
  Engine engine(config, &runner, nullptr, policy("threshold:10"));
  Watch watch;
  engine.set_observer(&watch);
  for (const char* id : {"runs", "waits", "leaves"}) {
    Request r = request(id, {5, 6, 7}, 2);
    r.arrival = now;
    ASSERT_TRUE(engine.submit(std::move(r)).ok());
  }
  now += std::chrono::seconds(1);
  engine.step();
  now += std::chrono::seconds(2);
  engine.step();
  engine.cancel("leaves");
  now += std::chrono::seconds(4);
  run(engine);
  EXPECT_EQ(watch.oldest_s, (std::vector<long>{1, 3, 7, 0}));
  EXPECT_EQ(watch.first, (std::vector<std::pair<long, int32_t>>{{1, 3}, {7, 3}}));
  EXPECT_EQ(watch.queue_s, (std::map<std::string, long>{{"runs", 1}, {"waits", 7}, {"leaves", 3}}));
}

TEST(Engine, APromptOfOneTokenHasItsLogprobs) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  auto one = request("one", {5}, 2);
  one.sampling.prompt_logprobs = 0;
  ASSERT_TRUE(engine.submit(std::move(one)).ok());
  const auto outputs = engine.step();
  ASSERT_EQ(outputs.size(), 1u);
  ASSERT_EQ(outputs[0].prompt_logprobs.size(), 1u);
  EXPECT_EQ(outputs[0].prompt_logprobs[0].token, 5);
}

Request pooled(std::string id, std::vector<int32_t> prompt, Pooling pooling,
               PrecisionClass precision = PrecisionClass::kAuto) {
  Request r = request(std::move(id), std::move(prompt), 1, precision);
  r.pooling = pooling;
  return r;
}

std::map<std::string, RequestOutput> run_pooled(Engine& engine) {
  std::map<std::string, RequestOutput> ends;
  for (int i = 0; i < 10000 && !engine.idle(); ++i) {
    for (RequestOutput& output : engine.step()) {
      if (output.finish) ends[output.id] = std::move(output);
    }
  }
  EXPECT_TRUE(engine.idle());
  return ends;
}

// The scripted runner's hidden state of a token is (token, position).
TEST(Engine, PooledRequestsGetHiddenStatesAndNoToken) {
  for (const int32_t in_flight : {1, 2}) {
    for (const int32_t step_tokens : {8, 9, 64}) {
      ScriptedRunner runner(kVocab, 1000);
      EngineConfig config = options(64, {.max_sequences = 8, .max_step_tokens = step_tokens});
      config.steps_in_flight = in_flight;
      Engine engine(config, &runner, nullptr, policy("alternate:1"));
      const std::vector<int32_t> prompt = {5, 9, 6, 7, 8, 5, 5, 5, 4, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 3};
      ASSERT_TRUE(engine.submit(pooled("last", prompt, Pooling::kLast, PrecisionClass::kExact)).ok());
      ASSERT_TRUE(engine.submit(pooled("mean", prompt, Pooling::kMean)).ok());
      ASSERT_TRUE(engine.submit(request("text", {5, 6, 7}, 30)).ok());
      ASSERT_TRUE(engine.submit(pooled("one", {7}, Pooling::kMean, PrecisionClass::kFast)).ok());
      auto ends = run_pooled(engine);
      ASSERT_EQ(ends.size(), 4u);
      EXPECT_EQ(ends["last"].embedding, (std::vector<float>{3, 19}));
      EXPECT_EQ(ends["mean"].embedding, (std::vector<float>{302.0f / 20, 9.5f}));
      EXPECT_EQ(ends["one"].embedding, (std::vector<float>{7, 0}));
      EXPECT_EQ(ends["text"].usage.completion_tokens, 30);
      for (const char* id : {"last", "mean", "one"}) {
        EXPECT_EQ(ends[id].finish, FinishReason::kStop);
        EXPECT_TRUE(ends[id].tokens.empty());
        EXPECT_EQ(ends[id].usage.completion_tokens, 0);
        EXPECT_TRUE(ends[id].usage.slo_met.has_value());
        EXPECT_EQ(ends[id].usage.prompt.fp16 + ends[id].usage.prompt.fp8, ends[id].usage.prompt_tokens);
      }
      EXPECT_EQ(ends["last"].usage.prompt.fp8, 0);
      EXPECT_EQ(engine.stats().kv_blocks_used, 0);
    }
  }
}

TEST(Engine, PooledRequestsUseThePrefixCacheWhereTheyMay) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  const std::vector<int32_t> prompt = {5, 9, 6, 7, 8, 5, 5, 5, 4};
  for (const char* id : {"first", "second"}) {
    ASSERT_TRUE(engine.submit(pooled(id, prompt, Pooling::kLast)).ok());
    auto ends = run_pooled(engine);
    EXPECT_EQ(ends[id].embedding, (std::vector<float>{4, 8}));
    EXPECT_EQ(ends[id].usage.cached_tokens, id == std::string("first") ? 0 : 8);
  }
  ASSERT_TRUE(engine.submit(pooled("mean", prompt, Pooling::kMean)).ok());
  auto ends = run_pooled(engine);
  EXPECT_EQ(ends["mean"].usage.cached_tokens, 0);
  EXPECT_EQ(ends["mean"].embedding, (std::vector<float>{6, 4}));
}

TEST(Engine, PooledRequestsSurviveAFullCacheAndEndWhenTheyAreCancelled) {
  for (const int32_t in_flight : {1, 2}) {
    ScriptedRunner runner(kVocab, 1000);
    EngineConfig config = options(12, {.max_sequences = 8, .max_step_tokens = 5});
    config.steps_in_flight = in_flight;
    Engine engine(config, &runner, nullptr, policy("fp16"));
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(engine.submit(request("text" + std::to_string(i), {5, 6, 7}, 24)).ok());
      ASSERT_TRUE(
          engine.submit(pooled("mean" + std::to_string(i), std::vector<int32_t>(21, 5 + i), Pooling::kMean)).ok());
    }
    ASSERT_TRUE(engine.submit(pooled("gone", std::vector<int32_t>(21, 9), Pooling::kMean)).ok());
    engine.step();
    EXPECT_TRUE(engine.cancel("gone"));
    auto ends = run_pooled(engine);
    EXPECT_EQ(ends["gone"].finish, FinishReason::kCancelled);
    EXPECT_TRUE(ends["gone"].embedding.empty());
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(ends["mean" + std::to_string(i)].embedding, (std::vector<float>{5.0f + static_cast<float>(i), 10}));
    }
    EXPECT_GT(engine.stats().preemptions, 0u);
    EXPECT_EQ(engine.stats().kv_blocks_used, 0);
  }
}

TEST(Engine, APooledPromptMayFillTheContext) {
  ScriptedRunner runner(kVocab, 16);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  EXPECT_TRUE(engine.submit(pooled("full", std::vector<int32_t>(16, 5), Pooling::kLast)).ok());
  EXPECT_FALSE(engine.submit(pooled("more", std::vector<int32_t>(17, 5), Pooling::kLast)).ok());
  EXPECT_FALSE(engine.submit(pooled("none", {}, Pooling::kLast)).ok());
  EXPECT_FALSE(engine.submit(pooled("bad", {kVocab}, Pooling::kLast)).ok());
  EXPECT_EQ(run_pooled(engine)["full"].embedding, (std::vector<float>{5, 15}));
}

TEST(Engine, CachedPrefixesStayInTheirScope) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  const auto cached = [&](const char* id, uint64_t scope) {
    auto r = request(id, std::vector<int32_t>(17, 5), 1);
    r.cache_scope = {scope, scope};
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    return run(engine)[id].usage.cached_tokens;
  };
  EXPECT_EQ(cached("a", 1), 0);
  EXPECT_EQ(cached("b", 1), 16);
  EXPECT_EQ(cached("c", 2), 0);
  EXPECT_EQ(cached("d", 2), 16);
}

TEST(Engine, AnswersAreTheSameAloneAndTogetherAndUnderPreemption) {
  ScriptedRunner runner(kVocab, 1000);
  std::map<std::string, std::vector<int32_t>> alone;
  const auto make = [](int i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t <= i * 3; ++t) prompt.push_back(5 + (t * i) % 90);
    return request("r" + std::to_string(i), prompt, 10 + i);
  };
  for (int i = 0; i < 8; ++i) {
    Engine engine(options(), &runner, nullptr, policy("fp16"));
    ASSERT_TRUE(engine.submit(make(i)).ok());
    auto answers = run(engine);
    alone[answers.begin()->first] = answers.begin()->second.tokens;
    EXPECT_EQ(answers.begin()->second.finish, FinishReason::kLength);
  }
  Engine engine(options(16, {.max_sequences = 8, .max_step_tokens = 7}), &runner, nullptr, policy("alternate:1"));
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(engine.submit(make(i)).ok());
  const auto together = run(engine);
  ASSERT_EQ(together.size(), 8u);
  for (const auto& [id, answer] : together) {
    EXPECT_EQ(answer.tokens, alone[id]) << id;
    EXPECT_EQ(answer.usage.prompt.fp16 + answer.usage.prompt.fp8, answer.usage.prompt_tokens);
    EXPECT_EQ(answer.usage.completion.fp16 + answer.usage.completion.fp8, answer.usage.completion_tokens);
  }
  EXPECT_GT(engine.stats().preemptions, 0u);
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
}

// Requests of many kinds arrive, end by themselves, are cancelled and preempted, while the precision changes: what each
// was answered, by the step() after which it happened only where that is decided by a count of tokens.
std::map<std::string, Answer> busy_hour(int32_t steps_in_flight, uint32_t seed, EngineStats& stats) {
  const auto next = [](const ScriptedState& s) {
    uint32_t mix = static_cast<uint32_t>(s.prompt_size);
    for (const int32_t token : s.tokens) mix = mix * 31u + static_cast<uint32_t>(token);
    return static_cast<int32_t>(mix % 23u == 0 ? 2u : 4u + mix % 90u);  // ends now and then
  };
  ScriptedRunner runner(kVocab, 200, next);
  EngineConfig o = options(24, {.max_sequences = 6, .max_step_tokens = 9});
  o.steps_in_flight = steps_in_flight;
  Engine engine(o, &runner, nullptr, policy("alternate:2"));
  std::mt19937 random(seed);
  const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
  std::map<std::string, Answer> answers;
  std::map<std::string, size_t> cancel_at;  // tokens
  for (int i = 0; i < 40; ++i) {
    std::vector<int32_t> prompt;
    const int32_t length = 1 + draw(30);
    prompt.reserve(static_cast<size_t>(length));
    for (int32_t t = 0; t < length; ++t) prompt.push_back(4 + draw(3));
    Request r = request("r" + std::to_string(i), std::move(prompt), 1 + draw(40), PrecisionClass::kAuto);
    r.sampling.min_tokens = draw(4) == 0 ? std::min(3, *r.sampling.max_tokens) : 0;
    if (draw(5) == 0) r.sampling.stop_token_ids = {4 + draw(90)};
    if (draw(6) == 0) r.precision = PrecisionClass::kExact;
    if (draw(6) == 0) cancel_at[r.id] = size_t{1} + static_cast<size_t>(draw(10));
    if (draw(5) == 0) {  // n = 2: another answer to the same prompt
      Request twin;
      twin.id = r.id + "b";
      twin.prompt = r.prompt;
      twin.sampling = r.sampling;
      twin.sampling.seed = 1;
      twin.precision = r.precision;
      EXPECT_TRUE(engine.submit(std::move(twin)).ok());
    }
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    for (int step = draw(6); step > 0; --step) collect(engine.step(), answers);
    for (const auto& [id, count] : cancel_at) {
      if (answers[id].tokens.size() >= count && !answers[id].finish) engine.cancel(id);
    }
  }
  for (auto& [id, answer] : run(engine)) {
    Answer& whole = answers[id];
    whole.tokens.insert(whole.tokens.end(), answer.tokens.begin(), answer.tokens.end());
    whole.finish = answer.finish;
  }
  stats = engine.stats();
  return answers;
}

TEST(Engine, RunningAheadGivesTheSameTokens) {
  uint64_t preemptions = 0, cancelled = 0, stopped = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    EngineStats one, two;
    const auto alone = busy_hour(1, seed, one), ahead = busy_hour(2, seed, two);
    ASSERT_EQ(alone.size(), ahead.size());
    for (const auto& [id, answer] : alone) {
      const Answer& other = ahead.at(id);
      if (answer.finish == FinishReason::kCancelled || other.finish == FinishReason::kCancelled) {
        const size_t common = std::min(answer.tokens.size(), other.tokens.size());  // it takes effect a step later
        EXPECT_TRUE(std::equal(answer.tokens.begin(), answer.tokens.begin() + static_cast<std::ptrdiff_t>(common),
                               other.tokens.begin()));
        ++cancelled;
        continue;
      }
      EXPECT_EQ(answer.tokens, other.tokens) << id << " seed " << seed;
      EXPECT_EQ(answer.finish, other.finish) << id << " seed " << seed;
      stopped += answer.finish == FinishReason::kStop ? 1 : 0;
    }
    EXPECT_EQ(two.kv_blocks_used, 0);
    preemptions += two.preemptions;
  }
  EXPECT_GT(preemptions, 20u);
  EXPECT_GT(cancelled, 5u);
  EXPECT_GT(stopped, 50u);
}

// A request's last token is known to be the last, so no step is wasted on the one after it.
TEST(Engine, RunningAheadComputesNothingBeyondTheLimit) {
  ScriptedRunner runner(kVocab, 1000);
  for (const int32_t in_flight : {1, 2}) {
    EngineConfig o = options();
    o.steps_in_flight = in_flight;
    Engine engine(o, &runner, nullptr, policy("fp16"));
    ASSERT_TRUE(engine.submit(request("a", {5, 6}, 7)).ok());
    run(engine);
    EXPECT_EQ(engine.stats().steps, 7u);
    EXPECT_EQ(engine.stats().tokens_by_precision[0], 8u);
  }
}

TEST(Engine, EndsAtEosStopIdsAndTheContext) {
  const auto eos_at_5 = [](const ScriptedState& s) { return s.output_size() == 4 ? 2 : 50; };
  ScriptedRunner runner(kVocab, 20, eos_at_5);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  Request stop = request("stop", {9, 9}, 10);
  stop.sampling.stop_token_ids = {50};
  Request ignore = request("ignore", {9, 9}, 10);
  ignore.sampling.ignore_eos = true;
  Request full = request("full", std::vector<int32_t>(15, 9), 5);
  full.sampling.max_tokens.reset();
  full.sampling.ignore_eos = true;
  ASSERT_TRUE(engine.submit(request("eos", {9, 9}, 10)).ok());
  ASSERT_TRUE(engine.submit(std::move(stop)).ok());
  ASSERT_TRUE(engine.submit(std::move(ignore)).ok());
  ASSERT_TRUE(engine.submit(std::move(full)).ok());
  auto answers = run(engine);
  EXPECT_EQ(answers["eos"].tokens.size(), 5u);
  EXPECT_EQ(answers["eos"].finish, FinishReason::kStop);
  EXPECT_EQ(answers["stop"].tokens.size(), 1u);
  EXPECT_EQ(answers["stop"].finish, FinishReason::kStop);
  EXPECT_EQ(answers["ignore"].tokens.size(), 10u);
  EXPECT_EQ(answers["full"].tokens.size(), 5u);
  EXPECT_EQ(answers["full"].finish, FinishReason::kLength);
}

TEST(Engine, ExactRequestsNeverSeeAnFp8Step) {
  ScriptedRunner runner(kVocab, 1000);
  for (const char* name : {"fp8", "alternate:3", "threshold:2"}) {
    Engine engine(options(), &runner, nullptr, policy(name));
    ASSERT_TRUE(engine.submit(request("exact", {5, 6, 7}, 12, PrecisionClass::kExact)).ok());
    ASSERT_TRUE(engine.submit(request("auto", {5, 6, 7, 8}, 12)).ok());
    ASSERT_TRUE(engine.submit(request("fast", {5, 6, 7, 8, 9}, 12, PrecisionClass::kFast)).ok());
    auto answers = run(engine);
    EXPECT_EQ(answers["exact"].precisions, std::string(12, 'x')) << name;
    EXPECT_EQ(answers["exact"].usage.prompt.fp8, 0) << name;
    EXPECT_EQ(answers["auto"].tokens.size(), 12u);
    EXPECT_EQ(answers["fast"].tokens.size(), 12u);
  }
}

TEST(Engine, ExactAndOthersAlternateWhenThePolicyWantsFp8) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp8"));
  ASSERT_TRUE(engine.submit(request("exact", {5}, 10, PrecisionClass::kExact)).ok());
  ASSERT_TRUE(engine.submit(request("auto", {6}, 10)).ok());
  std::map<std::string, Answer> answers;
  for (int step = 0; step < 10; ++step) collect(engine.step(), answers);
  EXPECT_EQ(answers["exact"].tokens.size(), 5u);
  EXPECT_EQ(answers["auto"].tokens.size(), 5u);
  EXPECT_EQ(answers["auto"].precisions, "88888");
}

TEST(Engine, FastRequestsGetFp8UnlessAnOperatorFixedFp16) {
  ScriptedRunner runner(kVocab, 1000);
  Engine load(options(), &runner, nullptr, policy("threshold:1000"));
  ASSERT_TRUE(load.submit(request("fast", {5}, 4, PrecisionClass::kFast)).ok());
  EXPECT_EQ(run(load)["fast"].precisions, "8888");
  Engine fixed(options(), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(fixed.submit(request("fast", {5}, 4, PrecisionClass::kFast)).ok());
  EXPECT_EQ(run(fixed)["fast"].precisions, "xxxx");
}

TEST(Engine, CountsCachedTokensByTheirPrecision) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp8"));
  const std::vector<int32_t> prompt = {5, 6, 7, 8, 9, 10, 11, 12, 13};
  ASSERT_TRUE(engine.submit(request("a", prompt, 1)).ok());
  EXPECT_EQ(run(engine)["a"].usage.prompt.fp8, 9);
  engine.set_policy(policy("fp16"));
  ASSERT_TRUE(engine.submit(request("b", prompt, 1)).ok());
  const Usage b = run(engine)["b"].usage;
  EXPECT_EQ(b.cached_tokens, 8);
  EXPECT_EQ(b.prompt.fp8, 8);
  EXPECT_EQ(b.prompt.fp16, 1);
  ASSERT_TRUE(engine.submit(request("c", prompt, 1, PrecisionClass::kExact)).ok());
  const Usage c = run(engine)["c"].usage;
  EXPECT_EQ(c.cached_tokens, 0);
  EXPECT_EQ(c.prompt.fp16, 9);
}

// FP16 until `fp8` is set.
class SetPolicy final : public PrecisionPolicy {
 public:
  explicit SetPolicy(const bool* fp8) : fp8_(fp8) {}
  std::string name() const override { return "set"; }
  Precision choose(const StepLoad&) override { return *fp8_ ? Precision::kFp8 : Precision::kFp16; }

 private:
  const bool* fp8_;
};

// Behind an FP8 step's tokens no block is exact, but those of FP16 steps stay what they are.
TEST(Engine, CountsCachedTokensOfMixedPrefixesAsTheyWereComputed) {
  bool fp8 = true;
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(64, {.max_sequences = 2, .max_step_tokens = 6}), &runner, nullptr,
                std::make_unique<SetPolicy>(&fp8));
  const std::vector<int32_t> prompt(18, 7);
  ASSERT_TRUE(engine.submit(request("a", prompt, 1)).ok());
  engine.step();
  fp8 = false;
  EXPECT_EQ(run(engine)["a"].usage.prompt.fp8, 6);
  ASSERT_TRUE(engine.submit(request("b", prompt, 1)).ok());
  const Usage b = run(engine)["b"].usage;
  EXPECT_EQ(b.cached_tokens, 16);
  EXPECT_EQ(b.prompt.fp8, 6);
  EXPECT_EQ(b.prompt.fp16, 12);
}

// Its first token comes from the keys and values that were computed last.
TEST(Engine, APromptThatIsComputedAgainCountsAsTheSecondTime) {
  bool fp8 = false;
  ScriptedRunner runner(kVocab, 1000);
  EngineConfig config = options(12, {.max_sequences = 2, .max_step_tokens = 5});
  config.prefix_caching = false;
  Engine engine(config, &runner, nullptr, std::make_unique<SetPolicy>(&fp8));
  std::map<std::string, Answer> answers;
  ASSERT_TRUE(engine.submit(request("old", {5, 6}, 20)).ok());
  collect(engine.step(), answers);
  ASSERT_TRUE(engine.submit(request("young", std::vector<int32_t>(40, 7), 2)).ok());
  while (engine.stats().preemptions == 0 && !engine.idle()) collect(engine.step(), answers);
  ASSERT_EQ(engine.stats().preemptions, 1u);
  EXPECT_FALSE(answers.contains("young"));
  fp8 = true;
  answers = run(engine);
  EXPECT_EQ(answers.at("young").usage.prompt.fp8, 40);
  EXPECT_EQ(answers.at("young").usage.prompt.fp16, 0);
}

TEST(Engine, RefusesWhatCannotWork) {
  ScriptedRunner runner(kVocab, 16);
  EngineConfig o = options();
  o.limits.max_queue = 1;
  Engine engine(o, &runner, nullptr, policy("fp16"));
  EXPECT_FALSE(engine.submit(request("empty", {}, 1)).ok());
  EXPECT_FALSE(engine.submit(request("id", {kVocab}, 1)).ok());
  EXPECT_FALSE(engine.submit(request("long", std::vector<int32_t>(16, 5), 1)).ok());
  EXPECT_FALSE(engine.submit(request("room", std::vector<int32_t>(10, 5), 7)).ok());
  Request stop = request("stop", {5}, 1);
  stop.sampling.stop = {"x"};
  EXPECT_EQ(engine.submit(std::move(stop)).error().code, ErrorCode::kUnsupported);
  EXPECT_TRUE(engine.submit(request("a", {5}, 1)).ok());
  EXPECT_EQ(engine.submit(request("b", {5}, 1)).error().code, ErrorCode::kResource);
  (void)engine.step();
  EXPECT_TRUE(engine.idle());
}

std::unique_ptr<PrecisionPolicy> slo() {
  return std::move(make_slo_policy(std::move(StepModel::fit(testing::synthetic_table())).value(), {})).value();
}

// About 60 ms for 1000 tokens in FP16 on this machine. Time stands still: nothing else is learnt of it.
TEST(Engine, APromptThatThePrefixCacheHasIsInTime) {
  ScriptedRunner runner(kVocab, 3000);
  EngineConfig config = options(1000, {.max_sequences = 8, .max_step_tokens = 2048});
  config.now = [] { return EngineClock::time_point{}; };
  config.fp8 = Precision::kFp8W8A8;
  SloOptions shed;
  shed.missed = SloOptions::Missed::kShed;
  Engine engine(
      config, &runner, nullptr,
      std::move(make_slo_policy(std::move(StepModel::fit(testing::synthetic_table())).value(), shed)).value());
  const auto ask = [&](double ttft_s, int32_t first) {
    Request r = request("r", std::vector<int32_t>(2000, first), 2);
    r.slo_ttft_s = ttft_s;
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    return run(engine).at("r");
  };
  EXPECT_EQ(ask(10, 5).finish, FinishReason::kLength);
  const Answer again = ask(0.03, 5);
  EXPECT_EQ(again.finish, FinishReason::kLength) << again.error;
  EXPECT_EQ(again.precisions, "xx");
  const Answer other = ask(0.03, 6);
  EXPECT_EQ(other.finish, FinishReason::kError);
  EXPECT_EQ(other.error, "the first token cannot come within 30 ms: the prompt takes longer than that");
  // So it does beside others, which have nothing to do with it: to try again is no use. Of two that are in time alone
  // one may.
  const auto submit = [&](const char* id, double ttft_s, int32_t tokens, int32_t first) {
    Request r = request(id, std::vector<int32_t>(static_cast<size_t>(tokens), first), 2);
    r.slo_ttft_s = ttft_s;
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
  };
  submit("short", 10, 500, 7);
  submit("long", 0.03, 2000, 8);
  submit("one", 0.06, 1000, 9);
  submit("two", 0.06, 1000, 10);
  std::map<std::string, double> retry_after_s;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step()) {
      EXPECT_EQ(output.shed, output.finish == FinishReason::kError);
      if (output.shed) retry_after_s[output.id] = output.retry_after_s;
    }
  }
  ASSERT_EQ(retry_after_s.size(), 2u);
  ASSERT_TRUE(retry_after_s.contains("long"));
  EXPECT_EQ(retry_after_s["long"], 0);
  retry_after_s.erase("long");
  EXPECT_GT(retry_after_s.begin()->second, 0);
}

// As `replay --as-served` has them.
TEST(Engine, TargetsAreAtLeastSoManyTimesTheRequestAlone) {
  struct Record final : EngineObserver {
    void on_finished(const RequestRecord& record) override { last = record; }
    RequestRecord last;
  } seen;
  ScriptedRunner runner(kVocab, 3000);
  EngineConfig config = options(1000, {.max_sequences = 8, .max_step_tokens = 64});
  config.targets = {.ttft_s = 1e-3, .itl_s = 1e-3, .least_ttft = 3, .least_itl = 2};
  Engine engine(config, &runner, nullptr, slo());
  engine.set_observer(&seen);
  const StepModel model = std::move(StepModel::fit(testing::synthetic_table())).value();
  StepWork next;
  next.add(1, 2000);
  ASSERT_TRUE(engine.submit(request("r", std::vector<int32_t>(2000, 5), 1)).ok());
  run(engine);
  EXPECT_DOUBLE_EQ(seen.last.ttft_target_s, 3 * model.prompt_seconds(model.exact_level(), 2000, 0, 64));
  EXPECT_DOUBLE_EQ(seen.last.itl_target_s, 2 * model.seconds(model.exact_level(), next));
}

// The token that is sampled behind a prompt that alone is wanted is nobody's: nothing counts it.
TEST(Engine, OfAPromptAloneNoTokenCounts) {
  struct Record final : EngineObserver {
    void on_first_token(double, int32_t) override { ++first_tokens; }
    void on_finished(const RequestRecord& record) override { last = record; }
    int first_tokens = 0;
    RequestRecord last;
  } seen;
  ScriptedRunner runner(kVocab, 1000, [](const ScriptedState&) { return 2; });  // ends answers
  EngineConfig config = options();
  config.end_ids = {2};
  Engine engine(config, &runner, nullptr, policy("fp16"));
  engine.set_observer(&seen);
  Request prompt = request("r", {5, 6, 7}, 1);
  prompt.prompt_only = true;
  prompt.sampling.prompt_logprobs = 0;
  ASSERT_TRUE(engine.submit(std::move(prompt)).ok());
  run(engine);
  EXPECT_EQ(seen.first_tokens, 0);
  EXPECT_TRUE(seen.last.prompt_only);
  EXPECT_EQ(seen.last.finish, FinishReason::kLength);
  EXPECT_EQ(seen.last.usage.prompt_tokens, 3);
  EXPECT_EQ(seen.last.usage.completion_tokens, 0);
  EXPECT_EQ(seen.last.usage.completion.fp16, 0);
  EXPECT_EQ(seen.last.max_tokens, 0);
  EXPECT_TRUE(seen.last.attained);
}

// All is late, so the policy wants what is the fastest for those that decode: FP16 while an exact request is there, as
// two steps in turn take longer than one, then FP8.
TEST(Engine, ExactRequestsStayInFp16UnderDeadlines) {
  ScriptedRunner runner(kVocab, 1000);
  EngineConfig config = options();
  config.fp8 = Precision::kFp8W8A8;
  config.targets = {.ttft_s = 1e-9, .itl_s = 0.004, .whole_answer = true};  // FP8 alone decodes in that
  config.now = [] { return EngineClock::time_point{}; };  // time stands still: nothing else is learnt of the machine
  Engine engine(config, &runner, nullptr, slo());
  Request exact = request("exact", {5, 6, 7, 8}, 12, PrecisionClass::kExact), other = request("auto", {9, 8, 7}, 24);
  exact.arrival = other.arrival = EngineClock::time_point{} - std::chrono::seconds(100);
  ASSERT_TRUE(engine.submit(std::move(exact)).ok());
  ASSERT_TRUE(engine.submit(std::move(other)).ok());
  const auto answers = run(engine);
  EXPECT_EQ(answers.at("exact").usage.prompt.fp8 + answers.at("exact").usage.completion.fp8, 0);
  EXPECT_EQ(answers.at("exact").usage.completion.fp16, 12);
  EXPECT_EQ(answers.at("auto").precisions.substr(12), std::string(12, '8'));
  EXPECT_EQ(answers.at("exact").usage.slo_met, false);
}

// A prompt that is in time in FP8 alone beside an exact request that decodes: 29 ms in FP16, and 22 in both turns.
TEST(Engine, ExactRequestsKeepTheirTurnBesideAPromptInFp8) {
  ScriptedRunner runner(kVocab, 1000);
  EngineConfig config = options(400, {.max_sequences = 8, .max_step_tokens = 2048});
  config.fp8 = Precision::kFp8W8A8;
  config.targets = {.ttft_s = 10, .itl_s = 0.2};
  config.now = [] { return EngineClock::time_point{}; };
  Engine engine(config, &runner, nullptr, slo());
  std::map<std::string, Answer> answers;
  ASSERT_TRUE(engine.submit(request("exact", {5, 6, 7, 8}, 12, PrecisionClass::kExact)).ok());
  for (int step = 0; step < 3; ++step) collect(engine.step(), answers);
  Request prompt = request("auto", std::vector<int32_t>(480, 9), 3);
  prompt.slo_ttft_s = 0.026;
  ASSERT_TRUE(engine.submit(std::move(prompt)).ok());
  for (int i = 0; i < 100 && !engine.idle(); ++i) collect(engine.step(), answers);
  EXPECT_EQ(answers.at("auto").usage.prompt.fp8, 480);
  EXPECT_EQ(answers.at("auto").tokens.size(), 3u);
  EXPECT_EQ(answers.at("exact").precisions, std::string(12, 'x'));
}

// Order, chunks and precision of steps are the policy's; tokens are the model's.
TEST(Engine, DeadlinesDoNotChangeTokens) {
  std::map<std::string, Answer> expected;
  for (const bool planned : {false, true}) {
    for (const int32_t in_flight : {1, 2}) {
      for (const int32_t blocks : {24, 200}) {  // 24: requests are preempted
        ScriptedRunner runner(kVocab, 1000);
        EngineConfig config = options(blocks, {.max_sequences = 4, .max_step_tokens = 24});
        config.steps_in_flight = in_flight;
        config.fp8 = Precision::kFp8W8A8;
        Engine engine(config, &runner, nullptr, planned ? slo() : policy("fp16"));
        for (int i = 0; i < 12; ++i) {
          Request r = request(std::to_string(i), std::vector<int32_t>(static_cast<size_t>(3 + 7 * i % 40), 4 + i), 9);
          r.slo_ttft_s = i % 3 == 0 ? 1e-6 : 10;
          r.priority = i % 2;
          ASSERT_TRUE(engine.submit(std::move(r)).ok());
        }
        const auto answers = run(engine);
        if (expected.empty()) expected = answers;
        for (const auto& [id, answer] : answers) {
          EXPECT_EQ(answer.tokens, expected.at(id).tokens) << id;
          EXPECT_EQ(answer.finish, FinishReason::kLength) << answer.error;
        }
      }
    }
  }
}

// On a cache that holds no more than that.
TEST(Engine, APromptThatIsOnlyScoredMayFillTheContext) {
  for (const bool planned : {false, true}) {
    for (const int32_t in_flight : {1, 2}) {
      ScriptedRunner runner(kVocab, 16);
      EngineConfig config = options(4, {.max_sequences = 4, .max_step_tokens = 7});
      config.steps_in_flight = in_flight;
      Engine engine(config, &runner, nullptr, planned ? slo() : policy("fp16"));
      const auto scored = [](const char* id, size_t tokens) {
        Request r = request(id, std::vector<int32_t>(tokens, 5), 9);
        r.prompt_only = true;
        return r;
      };
      EXPECT_FALSE(engine.submit(scored("more", 17)).ok());
      for (const char* id : {"one", "two", "three"}) EXPECT_TRUE(engine.submit(scored(id, 16)).ok());
      const auto answers = run(engine);
      ASSERT_EQ(answers.size(), 3u);
      for (const auto& [id, answer] : answers) {
        EXPECT_EQ(answer.finish, FinishReason::kLength) << answer.error;
        EXPECT_EQ(answer.tokens.size(), 1u);
      }
      EXPECT_EQ(engine.stats().kv_blocks_used, 0);
    }
  }
}

// Targets are judged by the engine's clock, from when the request came.
TEST(Engine, SaysWhetherTargetsWereMet) {
  ScriptedRunner runner(kVocab, 1000);
  EngineConfig config = options();
  EngineClock::time_point now{};
  config.now = [&] { return now += std::chrono::milliseconds(10); };
  Engine engine(config, &runner, nullptr, policy("fp16"));
  const auto ask = [&](double ttft, double itl) {
    Request r = request("r", {5, 6}, 4);
    r.slo_ttft_s = ttft;
    r.slo_itl_s = itl;
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    return run(engine).at("r").usage.slo_met;
  };
  EXPECT_EQ(ask(10, 10), true);
  EXPECT_EQ(ask(0.001, 10), false);
  EXPECT_EQ(ask(10, 0.001), false);
}

TEST(Engine, CancellationGivesBlocksBack) {
  ScriptedRunner runner(kVocab, 1000);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("a", {5, 6}, 100)).ok());
  std::map<std::string, Answer> answers;
  for (int i = 0; i < 3; ++i) collect(engine.step(), answers);
  EXPECT_GT(engine.stats().kv_blocks_used, 0);
  EXPECT_TRUE(engine.cancel("a"));
  EXPECT_FALSE(engine.cancel("a"));
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
  collect(engine.step(), answers);
  EXPECT_EQ(answers["a"].finish, FinishReason::kCancelled);
  EXPECT_EQ(answers["a"].usage.completion_tokens, 3);
  EXPECT_TRUE(engine.idle());
}

// Has no memory for what some requests' penalties count.
class NarrowRunner final : public StepRunner {
 public:
  int32_t vocab() const override { return inner_.vocab(); }
  int32_t max_context() const override { return inner_.max_context(); }
  int32_t max_in_flight() const override { return inner_.max_in_flight(); }
  Status start(const Sequence& sequence) override {
    if (sequence.tokens.front() == 13) return error(ErrorCode::kResource, "no memory for it");
    started_.insert(&sequence);
    return ok_status();
  }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    for (const ScheduledSequence& item : plan.items) EXPECT_TRUE(started_.contains(item.sequence));
    return inner_.submit(plan, precision);
  }
  Result<StepOutput> collect(StepTicket ticket) override { return inner_.collect(ticket); }

 private:
  ScriptedRunner inner_{kVocab, 1000};
  std::set<const Sequence*> started_;
};

TEST(Engine, ARequestThatCannotStartEndsAlone) {
  NarrowRunner runner;
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("running", {5, 6, 7}, 9)).ok());
  std::map<std::string, Answer> answers;
  collect(engine.step(), answers);
  ASSERT_TRUE(engine.submit(request("bad", {13, 6, 7}, 9)).ok());
  ASSERT_TRUE(engine.submit(request("good", {5, 6}, 9)).ok());
  auto late = request("late", {5}, 4);  // sits out the step that the bad one would start in
  late.constraint = std::make_unique<LateConstraint>();
  ASSERT_TRUE(engine.submit(std::move(late)).ok());
  for (int i = 0; i < 100 && !engine.idle(); ++i) collect(engine.step(), answers);
  EXPECT_EQ(answers["bad"].finish, FinishReason::kError);
  EXPECT_EQ(answers["bad"].error, "no memory for it");
  EXPECT_TRUE(answers["bad"].tokens.empty());
  for (const char* id : {"running", "good", "late"}) EXPECT_EQ(answers[id].finish, FinishReason::kLength) << id;
  EXPECT_EQ(answers["running"].tokens.size(), 9u);
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
}

class FailingRunner final : public StepRunner {
 public:
  int32_t vocab() const override { return kVocab; }
  int32_t max_context() const override { return 100; }
  Status start(const Sequence&) override { return ok_status(); }
  int32_t max_in_flight() const override { return 2; }
  Result<StepTicket> submit(const StepPlan&, Precision) override { return submitted_++; }
  Result<StepOutput> collect(StepTicket) override { return error(ErrorCode::kResource, "the device is gone"); }

 private:
  StepTicket submitted_ = 0;
};

class LostDevice final : public StepRunner {
 public:
  int32_t vocab() const override { return kVocab; }
  int32_t max_context() const override { return 100; }
  int32_t max_in_flight() const override { return 2; }
  Status start(const Sequence&) override { return ok_status(); }
  Result<StepTicket> submit(const StepPlan&, Precision) override { return submitted_++; }
  Result<StepOutput> collect(StepTicket) override { return error(ErrorCode::kDevice, "an illegal memory access"); }

 private:
  StepTicket submitted_ = 0;
};

TEST(Engine, ALostDeviceEndsEveryRequestAndRefusesNewOnes) {
  LostDevice runner;
  EngineConfig o = options(64, {.max_sequences = 1, .max_step_tokens = 64});
  o.steps_in_flight = 2;
  Engine engine(o, &runner, nullptr, policy("fp16"));
  for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(engine.submit(request(id, {5}, 4)).ok());
  auto answers = run(engine);
  for (const char* id : {"a", "b", "c"}) {
    EXPECT_EQ(answers[id].finish, FinishReason::kError) << id;
    EXPECT_EQ(answers[id].error, "an illegal memory access");
  }
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
  ASSERT_TRUE(engine.device_failure().has_value());
  EXPECT_EQ(engine.submit(request("d", {5}, 4)).error().code, ErrorCode::kDevice);
}

TEST(Engine, ABackendErrorEndsTheStepsRequests) {
  FailingRunner runner;
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("a", {5}, 4)).ok());
  auto answers = run(engine);
  EXPECT_EQ(answers["a"].finish, FinishReason::kError);
  EXPECT_EQ(answers["a"].error, "the device is gone");
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
}

// As ScriptedRunner, but the results of requests called "bad" are not finite once they have so many tokens.
class Overflowing final : public StepRunner {
 public:
  explicit Overflowing(int32_t after) : after_(after) {}
  int32_t vocab() const override { return kVocab; }
  int32_t max_context() const override { return 100; }
  int32_t max_in_flight() const override { return 2; }
  int32_t hidden() const override { return 2; }
  Status start(const Sequence&) override { return ok_status(); }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    Result<StepTicket> ticket = inner_.submit(plan, precision);
    Bad& bad = bad_.emplace_back();
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const Sequence& sequence = *plan.items[i].sequence;
      const bool is_bad = sequence.request.id == "bad" && sequence.size() >= after_;
      if (is_bad && plan.items[i].samples) bad.row = rows_of(plan, i);
      if (is_bad) bad.item = static_cast<int>(i);
    }
    return ticket;
  }
  Result<StepOutput> collect(StepTicket ticket) override {
    Result<StepOutput> output = inner_.collect(ticket);
    const Bad bad = bad_.front();
    bad_.pop_front();
    if (bad.row >= 0) output->sampled[static_cast<size_t>(bad.row)].finite = false;
    if (bad.item >= 0 && output->hidden[static_cast<size_t>(bad.item)].count > 0) {
      output->hidden[static_cast<size_t>(bad.item)].data = kNotFinite.data();
    }
    return output;
  }
  Error overflow(std::string_view results) const override {
    return error(ErrorCode::kUnsupported, "{} beyond all bounds", results);
  }

 private:
  struct Bad {
    int row = -1, item = -1;
  };
  static int rows_of(const StepPlan& plan, size_t end) {
    return static_cast<int>(std::count_if(plan.items.begin(), plan.items.begin() + static_cast<ptrdiff_t>(end),
                                          [](const ScheduledSequence& item) { return item.samples; }));
  }
  static constexpr std::array<float, 20> kNotFinite = {1.0f, std::numeric_limits<float>::infinity()};
  int32_t after_;
  ScriptedRunner inner_{kVocab, 100};
  std::deque<Bad> bad_;
};

struct EndCounts final : EngineObserver {
  int errors = 0, lengths = 0;
  void on_finished(const RequestRecord& record) override {
    errors += record.finish == FinishReason::kError ? 1 : 0;
    lengths += record.finish == FinishReason::kLength ? 1 : 0;
  }
};

TEST(Engine, ResultsThatAreNotFiniteEndTheirRequestAlone) {
  ScriptedRunner finite(kVocab, 100);
  for (const int32_t after : {0, 6}) {  // at once, or where a step with another token of it is in flight already
    Overflowing runner(after);
    EngineConfig o = options();
    o.steps_in_flight = 2;
    Engine engine(o, &runner, nullptr, policy("fp16"));
    EndCounts counts;
    engine.set_observer(&counts);
    Engine beside(o, &finite, nullptr, policy("fp16"));
    for (const char* id : {"a", "bad", "b"}) ASSERT_TRUE(engine.submit(request(id, {5, 6, id[0]}, 12)).ok());
    for (const char* id : {"a", "b"}) ASSERT_TRUE(beside.submit(request(id, {5, 6, id[0]}, 12)).ok());
    auto answers = run(engine), want = run(beside);
    EXPECT_EQ(answers["bad"].finish, FinishReason::kError);
    EXPECT_EQ(answers["bad"].error, "logits beyond all bounds");
    EXPECT_EQ(answers["bad"].tokens.size(), after == 0 ? 0u : 3u);
    for (const char* id : {"a", "b"}) EXPECT_EQ(answers[id].tokens, want[id].tokens) << id;
    EXPECT_EQ(counts.errors, 1);
    EXPECT_EQ(counts.lengths, 2);
    EXPECT_EQ(engine.stats().kv_blocks_used, 0);
    EXPECT_FALSE(engine.device_failure().has_value());
  }
}

TEST(Engine, AnEmbeddingThatIsNotFiniteIsAnError) {
  Overflowing runner(0);
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  for (const char* id : {"a", "bad"}) {
    Request pooled = request(id, {5, 6, 7}, 0);
    pooled.sampling = {};
    pooled.pooling = Pooling::kMean;
    ASSERT_TRUE(engine.submit(std::move(pooled)).ok());
  }
  auto answers = run(engine);
  EXPECT_EQ(answers["a"].finish, FinishReason::kStop);
  EXPECT_EQ(answers["bad"].finish, FinishReason::kError);
  EXPECT_EQ(answers["bad"].error, "hidden states beyond all bounds");
}

class OnlyEven final : public TokenConstraint {
 public:
  bool fill(std::span<uint32_t> mask) override {
    for (uint32_t& word : mask) word = 0x55555555u;
    return true;
  }
  bool accept(int32_t token) override { return token % 2 == 0; }
};

TEST(Engine, ATokenOutsideTheGrammarEndsTheRequest) {
  ScriptedRunner runner(kVocab, 100, [](const ScriptedState& s) { return s.output_size() < 3 ? 10 : 11; });
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  Request r = request("a", {5}, 10);
  r.constraint = std::make_unique<OnlyEven>();
  ASSERT_TRUE(engine.submit(std::move(r)).ok());
  EXPECT_EQ(run(engine)["a"].finish, FinishReason::kError);
}

TEST(Engine, WhereNoTokenMayComeTheRequestEndsAndSaysSo) {
  // The second row of the second request has no token that it may be.
  class NoChoice final : public StepRunner {
   public:
    int32_t vocab() const override { return kVocab; }
    int32_t max_context() const override { return 100; }
    Status start(const Sequence&) override { return ok_status(); }
    Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
      ids_.clear();
      for (const ScheduledSequence& item : plan.items) ids_.push_back(item.sequence->request.id);
      return inner_.submit(plan, precision);
    }
    Result<StepOutput> collect(StepTicket ticket) override {
      Result<StepOutput> output = inner_.collect(ticket);
      for (size_t i = 0; i < ids_.size(); ++i) {
        if (ids_[i] == "b" && ++rows_ == 2) output->sampled[i].has_choice = output->sampled[i].finite = false;
      }
      return output;
    }

   private:
    ScriptedRunner inner_{kVocab, 100};
    std::vector<std::string> ids_;
    int rows_ = 0;
  };
  NoChoice runner;
  Engine engine(options(), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("a", {5}, 5)).ok());
  ASSERT_TRUE(engine.submit(request("b", {5}, 5)).ok());
  const auto answers = run(engine);
  EXPECT_EQ(answers.at("a").tokens.size(), 5u);
  EXPECT_EQ(answers.at("b").tokens.size(), 1u);
  EXPECT_EQ(answers.at("b").finish, FinishReason::kError);
  EXPECT_NE(answers.at("b").error.find("no token may come after 1 of the answer"), std::string::npos);
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
}

// A grammar sees each token before the next mask is made; rows without one run ahead beside it.
class InOrder final : public TokenConstraint {
 public:
  bool fill(std::span<uint32_t>) override {
    EXPECT_FALSE(std::exchange(waits_, true)) << "a mask was made before the last token was known";
    return false;
  }
  bool accept(int32_t) override {
    waits_ = false;
    return true;
  }

 private:
  bool waits_ = false;
};

class FillingRunner final : public StepRunner {
 public:
  int32_t vocab() const override { return kVocab; }
  int32_t max_context() const override { return 100; }
  int32_t max_in_flight() const override { return 2; }
  Status start(const Sequence&) override { return ok_status(); }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    for (const ScheduledSequence& item : plan.items) {
      if (!item.samples || !item.sequence->masked()) continue;
      std::vector<uint32_t> mask((kVocab + 31) / 32);
      item.sequence->fill_mask(item.first + item.count - item.sequence->prompt_size(), mask);
      EXPECT_TRUE(!item.sequence->awaits_token() || item.sequence->pending == 0);
    }
    return inner_.submit(plan, precision);
  }
  Result<StepOutput> collect(StepTicket ticket) override { return inner_.collect(ticket); }

 private:
  ScriptedRunner inner_{kVocab, 100};
};

TEST(Engine, RowsUnderAGrammarOrBadWordsOfSeveralTokensDoNotRunAhead) {
  FillingRunner runner;
  EngineConfig o = options();
  o.steps_in_flight = 2;
  Engine engine(o, &runner, nullptr, policy("fp16"));
  Request r = request("grammar", {5}, 10);
  r.constraint = std::make_unique<InOrder>();
  ASSERT_TRUE(engine.submit(std::move(r)).ok());
  ASSERT_TRUE(engine.submit(request("free", {6}, 20)).ok());
  Request words = request("words", {7}, 10), listed = request("listed", {8}, 20);
  words.sampling.allowed = allowed_tokens_of(kVocab, {}, {{5, 6}});
  listed.sampling.allowed = allowed_tokens_of(kVocab, {5, 6}, {{5}});
  ASSERT_TRUE(engine.submit(std::move(words)).ok());
  ASSERT_TRUE(engine.submit(std::move(listed)).ok());
  // "free" and "listed" need a step a token, the others each other one.
  int steps = 0;
  std::map<std::string, Answer> answers;
  for (; !engine.idle(); ++steps) collect(engine.step(), answers);
  EXPECT_EQ(answers["grammar"].tokens.size(), 10u);
  EXPECT_EQ(answers["words"].tokens.size(), 10u);
  EXPECT_EQ(answers["free"].tokens.size(), 20u);
  EXPECT_EQ(answers["listed"].tokens.size(), 20u);
  EXPECT_LE(steps, 22);
}

}  // namespace
}  // namespace nfp
