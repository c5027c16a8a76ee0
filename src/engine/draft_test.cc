// Steps that draft tokens and verify them: answers are those of steps that do not, whatever drafts are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "engine/engine.h"
#include "engine/testing/allowed_tokens_of.h"
#include "engine/testing/scripted_runner.h"
#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"
#include "text/testing/small_tokenizers.h"

namespace nfp::drafts {
namespace {

constexpr int32_t kVocab = 270, kContext = 200, kBlock = 4, kEnd = 2;

bool counts(const Sequence& sequence) { return sequence.request.sampling.repetition_penalty != 1.0f; }

// A scripted runner that sees to it that steps draft only what they may, counts tokens for penalties as a device does,
// and fails when told to.
class Runner final : public StepRunner {
 public:
  explicit Runner(int32_t most, ScriptedRunner::Right right = {}, ScriptedRunner::Next next = {})
      : inner_(kVocab, kContext, std::move(next)) {
    inner_.draft(most, std::move(right));
  }
  int32_t vocab() const override { return inner_.vocab(); }
  int32_t max_context() const override { return inner_.max_context(); }
  int32_t max_in_flight() const override { return inner_.max_in_flight(); }
  int32_t max_drafts(int32_t sequences) const override { return inner_.max_drafts(sequences); }
  int32_t hidden() const override { return inner_.hidden(); }
  Status start(const Sequence& sequence) override {
    if (start_error && sequence.request.id == start_error->first) return start_error->second;
    seen_[sequence.history_slot] = sequence.tokens;
    return ok_status();
  }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    steps.push_back(plan.drafts());
    EXPECT_TRUE(plan.drafts() == 0 || in_flight_ == 0);
    for (const ScheduledSequence& item : plan.items) look_at(item, precision);
    if (submit_error && plan.drafts() > 0) return *submit_error;
    for (const ScheduledSequence& item : plan.items) {
      if (item.samples && counts(*item.sequence)) seen_[item.sequence->history_slot].push_back(kPendingToken);
    }
    most_in_flight = std::max(most_in_flight, ++in_flight_);
    drafts_.push_back(plan.drafts());
    return inner_.submit(plan, precision);
  }
  Result<StepOutput> collect(StepTicket ticket) override {
    --in_flight_;
    Result<StepOutput> output = inner_.collect(ticket);
    const int32_t drafts = drafts_.front();
    drafts_.pop_front();
    took += std::chrono::milliseconds(10 + 6 * drafts);
    if (collect_error && drafts > 0) return *collect_error;
    if (collecting) collecting(*output);
    return output;
  }

  std::optional<Error> submit_error, collect_error;  // of steps with drafts
  std::optional<std::pair<std::string, Error>> start_error;
  std::function<void(StepOutput&)> collecting;
  std::vector<int32_t> steps;  // drafts of each
  int most_in_flight = 0;
  EngineClock::duration took{};  // by steps that were collected

 private:
  void look_at(const ScheduledSequence& item, Precision precision) {
    const Sequence& s = *item.sequence;
    if (counts(s) && item.samples) {
      EXPECT_EQ(seen_[s.history_slot].size(), s.tokens.size()) << s.request.id;
    }
    EXPECT_GE(s.blocks.size() * kBlock, static_cast<size_t>(item.first + item.count + item.drafts));
    if (item.drafts == 0) return;
    EXPECT_TRUE(is_exact(precision));
    EXPECT_TRUE(item.count == 1 && item.samples && item.source < 0);
    EXPECT_TRUE(!counts(s) && !s.awaits_token() && !s.no_drafts);
    EXPECT_LE(s.size() + item.drafts + 1, s.limit);
  }

  ScriptedRunner inner_;
  int in_flight_ = 0;
  std::deque<int32_t> drafts_;  // of steps in flight
  std::map<int32_t, std::vector<int32_t>> seen_;
};

// Of the steps, those that draft.
size_t drafting(const Runner& runner) {
  return static_cast<size_t>(std::count_if(runner.steps.begin(), runner.steps.end(), [](int32_t d) { return d > 0; }));
}

EngineConfig options(int32_t drafts, int32_t kv_blocks = 100) {
  EngineConfig o;
  o.limits = {.max_sequences = 8, .max_step_tokens = 64};
  o.kv_blocks = kv_blocks;
  o.block_size = kBlock;
  o.end_ids = {kEnd};
  o.steps_in_flight = 1;
  o.fp8 = Precision::kFp8W8A8;
  o.speculative_tokens = drafts;
  o.speculative_always = true;
  return o;
}

Request request(std::string id, std::vector<int32_t> prompt, int32_t max_tokens) {
  Request r;
  r.id = std::move(id);
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  return r;
}

std::unique_ptr<PrecisionPolicy> policy(const char* text) {
  return std::move(parse_policy(text, Precision::kFp8W8A8)).value();
}

struct Answer {
  std::vector<int32_t> tokens;
  std::string text, error;
  std::optional<FinishReason> finish;
  std::optional<int32_t> stop_token;
  Usage usage;
};

using Answers = std::map<std::string, Answer>;

void take(const std::vector<RequestOutput>& outputs, Answers& answers) {
  for (const RequestOutput& output : outputs) {
    Answer& answer = answers[output.id];
    EXPECT_FALSE(answer.finish) << "output after the end of " << output.id;
    for (const OutputToken& token : output.tokens) answer.tokens.push_back(token.token);
    answer.text += output.text;
    answer.error = output.error;
    answer.finish = output.finish;
    answer.stop_token = output.stop_token;
    answer.usage = output.usage;
    EXPECT_EQ(answer.usage.completion_tokens, static_cast<int32_t>(answer.tokens.size()));
    EXPECT_EQ(answer.usage.completion.fp16 + answer.usage.completion.fp8, answer.usage.completion_tokens);
  }
}

Answers finish(Engine& engine, Answers answers = {}) {
  for (int i = 0; i < 20000 && !engine.idle(); ++i) take(engine.step(), answers);
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(engine.stats().kv_blocks_used, 0);
  return answers;
}

// The answer counts on from 10.
int32_t count_on(const ScriptedState& state) { return 10 + state.output_size(); }

std::vector<int32_t> counted(int32_t tokens) {
  std::vector<int32_t> all(static_cast<size_t>(tokens));
  std::iota(all.begin(), all.end(), 10);
  return all;
}

class Anything final : public TokenConstraint {
 public:
  bool fill(std::span<uint32_t>) override { return false; }
  bool accept(int32_t) override { return true; }
};

struct Counts final : EngineObserver {
  void on_step(const StepRecord& step) override { steps.push_back(step); }
  void on_token_gap(double seconds) override {
    EXPECT_GE(seconds, 0);
    ++gaps;
  }
  void on_first_token(double, int32_t) override { ++firsts; }
  void on_finished(const RequestRecord& record) override { ended.push_back(record); }
  std::vector<StepRecord> steps;
  std::vector<RequestRecord> ended;
  int gaps = 0, firsts = 0;
};

struct Hour {
  Answers answers;
  std::set<std::string> cancelled;
  EngineStats stats;
};

// Requests of all kinds come, end and are cancelled; the same ones whatever `drafts` is.
Hour busy_hour(uint32_t seed, int32_t drafts) {
  std::mt19937 random(seed);
  const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
  const auto next = [](const ScriptedState& s) {
    uint32_t mix = static_cast<uint32_t>(s.prompt_size);
    for (const int32_t token : s.tokens) mix = mix * 31u + static_cast<uint32_t>(token);
    return static_cast<int32_t>(mix % 29u == 0 ? 2u : 4u + mix % 90u);
  };
  std::mt19937 luck(seed + 1);
  const uint32_t right = 1 + seed % 10;  // of ten
  Runner runner(
      drafts, [&](const ScriptedState&) { return luck() % 10 < right; }, next);
  EngineConfig o = options(drafts, 24 + draw(24));
  o.limits = {.max_sequences = 1 + draw(8), .max_step_tokens = 8 + draw(30)};
  o.prefix_caching = draw(2) == 0;
  o.steps_in_flight = 1 + draw(2);
  o.speculative_always = draw(3) > 0;
  EngineClock::time_point now{};
  o.now = [&] { return (now += std::chrono::microseconds(10)) + runner.took; };
  std::unique_ptr<PrecisionPolicy> precision;
  if (draw(3) == 0) {
    auto model = StepModel::fit(testing::synthetic_table());
    precision = std::move(make_slo_policy(std::move(model).value(), {.exact_decode = draw(2) == 0})).value();
  } else {
    precision = policy(draw(3) == 0 ? "alternate:2" : "fp16");
  }
  Engine engine(o, &runner, nullptr, std::move(precision));
  Hour hour;
  for (int i = 0; i < 50; ++i) {
    std::vector<int32_t> prompt;
    for (int32_t t = 0, length = 1 + draw(30); t < length; ++t) prompt.push_back(t < 12 ? 5 : 4 + draw(3));
    Request r = request(std::to_string(i), std::move(prompt), 1 + draw(60));
    if (draw(5) == 0) r.sampling.stop_token_ids = {4 + draw(90)};
    if (draw(8) == 0) r.sampling.ignore_eos = true;
    if (draw(6) == 0) r.sampling.repetition_penalty = 1.1f;
    if (draw(8) == 0) r.constraint = std::make_unique<Anything>();
    if (draw(8) == 0) r.sampling.allowed = allowed_tokens_of(kVocab, {}, {{4}});
    if (draw(8) == 0) r.sampling.allowed = allowed_tokens_of(kVocab, {}, {{4, 5}});
    if (draw(8) == 0) r.sampling.prompt_logprobs = 0;
    if (draw(12) == 0) r.prompt_only = true;
    r.precision = static_cast<PrecisionClass>(draw(3));
    r.priority = draw(3) - 1;
    if (draw(8) == 0) hour.cancelled.insert(r.id);
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    for (int step = draw(6); step > 0; --step) take(engine.step(), hour.answers);
    for (const std::string& id : hour.cancelled) {
      if (hour.answers.contains(id) && !hour.answers[id].finish) engine.cancel(id);
    }
  }
  hour.answers = finish(engine, std::move(hour.answers));
  hour.stats = engine.stats();
  return hour;
}

TEST(Drafts, ChangeNoAnswer) {
  uint64_t drafted = 0, accepted = 0, preemptions = 0;
  for (uint32_t seed = 0; seed < 100 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const Hour plain = busy_hour(seed, 0), with = busy_hour(seed, 1 + static_cast<int32_t>(seed % 8));
    EXPECT_EQ(plain.stats.drafted_tokens, 0u);
    drafted += with.stats.drafted_tokens;
    accepted += with.stats.accepted_tokens;
    preemptions += with.stats.preemptions;
    ASSERT_EQ(with.answers.size(), plain.answers.size());
    for (const auto& [id, want] : plain.answers) {
      SCOPED_TRACE(id);
      const Answer& got = with.answers.at(id);
      if (plain.cancelled.contains(id)) {
        const size_t both = std::min(want.tokens.size(), got.tokens.size());
        EXPECT_TRUE(
            std::equal(want.tokens.begin(), want.tokens.begin() + static_cast<ptrdiff_t>(both), got.tokens.begin()));
        continue;
      }
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_EQ(got.finish, want.finish);
      EXPECT_EQ(got.stop_token, want.stop_token);
    }
  }
  EXPECT_GT(accepted, 5000u);
  EXPECT_GT(drafted, accepted);
  EXPECT_GT(preemptions, 500u);
}

TEST(Drafts, NeverGoBeyondTheLimitOrTheContext) {
  for (int32_t drafts = 1; drafts <= 8; ++drafts) {
    Runner runner(drafts);
    Engine engine(options(drafts), &runner, nullptr, policy("fp16"));
    for (int32_t most = 1; most <= 8; ++most) {
      ASSERT_TRUE(engine.submit(request(std::to_string(most), {5, 6}, most)).ok());
    }
    Answers answers = finish(engine);
    for (int32_t most = 1; most <= 8; ++most) {
      EXPECT_EQ(answers[std::to_string(most)].tokens.size(), static_cast<size_t>(most)) << drafts;
      EXPECT_EQ(answers[std::to_string(most)].finish, FinishReason::kLength);
    }
    Request open = request("open", std::vector<int32_t>(kContext - 11, 5), 1);
    open.sampling.max_tokens.reset();
    ASSERT_TRUE(engine.submit(std::move(open)).ok());
    EXPECT_EQ(finish(engine)["open"].tokens.size(), 11u);
  }
}

TEST(Drafts, StepsGiveATokenMoreThanTheirRightDrafts) {
  Runner runner(
      4, [](const ScriptedState& s) { return s.output_size() % 5 != 4; }, count_on);
  Engine engine(options(4), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("a", {5, 6, 7}, 12)).ok());
  std::vector<size_t> sizes;
  Answers answers;
  while (!engine.idle()) {
    const auto outputs = engine.step();
    sizes.push_back(outputs.size());
    for (const RequestOutput& output : outputs) EXPECT_EQ(output.tokens.size(), 1u);
    take(outputs, answers);
  }
  EXPECT_EQ(answers["a"].tokens, counted(12));
  // The prompt; tokens 1 to 4, as the draft of the fourth is wrong; 5 to 9; 10 and 11, of one draft.
  EXPECT_EQ(sizes, (std::vector<size_t>{1, 4, 5, 2}));
  EXPECT_EQ(runner.steps, (std::vector<int32_t>{0, 4, 4, 1}));
}

TEST(Drafts, AnEndAmongThemDropsTheRest) {
  for (const bool stop_id : {false, true}) {
    Runner runner(8, {},
                  [&](const ScriptedState& s) { return s.output_size() == 5 ? (stop_id ? 99 : kEnd) : count_on(s); });
    Counts counts;
    Engine engine(options(8), &runner, nullptr, policy("fp16"));
    engine.set_observer(&counts);
    Request r = request("a", {5, 6, 7}, 50);
    if (stop_id) r.sampling.stop_token_ids = {99};
    ASSERT_TRUE(engine.submit(std::move(r)).ok());
    ASSERT_TRUE(engine.submit(request("b", {5, 6}, 4)).ok());
    Answers answers = finish(engine);
    std::vector<int32_t> want = counted(5);
    want.push_back(stop_id ? 99 : kEnd);
    EXPECT_EQ(answers["a"].tokens, want);
    EXPECT_EQ(answers["a"].finish, FinishReason::kStop);
    EXPECT_EQ(answers["a"].stop_token, want.back());
    EXPECT_EQ(answers["a"].usage.completion.fp16, 6);
    EXPECT_EQ(answers["b"].tokens, counted(4));
    EXPECT_EQ(counts.firsts + counts.gaps, 10);
    ASSERT_EQ(counts.ended.size(), 2u);
    EXPECT_EQ(counts.ended[0].usage.completion_tokens + counts.ended[1].usage.completion_tokens, 10);
  }
}

TEST(Drafts, AStopStringAmongThemDropsTheRestAndDoesNotCountBeforeMinTokens) {
  const std::string text = "abXYcdXYef and more of the same";
  const auto spell = [&](const ScriptedState& s) {
    return text::byte_id(static_cast<unsigned char>(text.at(static_cast<size_t>(s.output_size()))));
  };
  const auto tokenizer = text::load(text::byte_level_json());
  for (const int32_t least : {0, 6, 8}) {  // 8: the second begins before
    Runner runner(8, {}, spell);
    Engine engine(options(8), &runner, tokenizer, policy("fp16"));
    Request r = request("a", {5, 6, 7}, 30);
    r.sampling.stop = {"XY"};
    r.sampling.min_tokens = least;
    ASSERT_TRUE(engine.submit(std::move(r)).ok());
    Answers answers = finish(engine);
    EXPECT_EQ(answers["a"].text, least == 0 ? "ab" : "abXYcd");
    EXPECT_EQ(answers["a"].tokens.size(), least == 0 ? 4u : 8u);
    EXPECT_EQ(answers["a"].finish, FinishReason::kStop);
  }
}

TEST(Drafts, AStepThatTheyMadeFailIsComputedWithoutThem) {
  for (const bool at_submit : {false, true}) {
    SCOPED_TRACE(at_submit);
    Runner runner(4);
    EngineConfig o = options(4);
    o.steps_in_flight = 2;
    Answers want;
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == 1) {
        runner.steps.clear();
        (at_submit ? runner.submit_error : runner.collect_error) =
            Error{ErrorCode::kUnsupported, "beyond FP16's range"};
      }
      Engine engine(o, &runner, nullptr, policy("fp16"));
      ASSERT_TRUE(engine.submit(request("a", {5, 6, 7}, 9)).ok());
      ASSERT_TRUE(engine.submit(request("b", {8}, 30)).ok());
      Request penal = request("c", {5, 6}, 20);
      penal.sampling.repetition_penalty = 1.2f;
      ASSERT_TRUE(engine.submit(std::move(penal)).ok());
      Request grammar = request("d", {5, 9, 6}, 14);
      grammar.constraint = std::make_unique<Anything>();
      ASSERT_TRUE(engine.submit(std::move(grammar)).ok());
      const Answers got = finish(engine);
      if (turn == 0) {
        want = got;
        EXPECT_GT(engine.stats().accepted_tokens, 10u);
        continue;
      }
      ASSERT_EQ(got.size(), want.size());
      for (const auto& [id, answer] : got) {
        EXPECT_EQ(answer.tokens, want[id].tokens) << id;
        EXPECT_EQ(answer.finish, FinishReason::kLength) << id;
      }
      EXPECT_EQ(engine.stats().drafted_tokens, 0u);
      EXPECT_EQ(drafting(runner), 1u);
      // Whoever comes later has drafts again.
      runner.submit_error.reset();
      runner.collect_error.reset();
      ASSERT_TRUE(engine.submit(request("e", {5, 6, 7}, 9)).ok());
      EXPECT_EQ(finish(engine)["e"].tokens, want["a"].tokens);
      EXPECT_GT(engine.stats().accepted_tokens, 0u);
    }
  }
}

TEST(Drafts, ARequestThatCannotStartAgainEndsAlone) {
  Runner runner(4);
  Engine engine(options(4), &runner, nullptr, policy("fp16"));
  for (const char* id : {"a", "b"}) ASSERT_TRUE(engine.submit(request(id, {5, 6, 7}, 9)).ok());
  Answers answers;
  take(engine.step(), answers);
  runner.collect_error = Error{ErrorCode::kResource, "no memory"};
  runner.start_error = {"a", Error{ErrorCode::kResource, "no memory for its history"}};
  answers = finish(engine, std::move(answers));
  EXPECT_EQ(answers["a"].finish, FinishReason::kError);
  EXPECT_EQ(answers["a"].error, "no memory for its history");
  EXPECT_EQ(answers["b"].finish, FinishReason::kLength);
  EXPECT_EQ(answers["b"].tokens.size(), 9u);
}

TEST(Drafts, ALostDeviceEndsAll) {
  for (const int where : {0, 1, 2}) {  // as the step is submitted, is collected, and as its requests start again
    SCOPED_TRACE(where);
    Runner runner(4);
    EngineConfig o = options(4);
    o.limits.max_sequences = 2;
    Engine engine(o, &runner, nullptr, policy("fp16"));
    for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(engine.submit(request(id, {5, 6, 7}, 9)).ok());
    Answers answers;
    take(engine.step(), answers);
    const Error lost = {ErrorCode::kDevice, "an illegal memory access"};
    if (where == 0) runner.submit_error = lost;
    if (where == 1) runner.collect_error = lost;
    if (where == 2) {
      runner.collect_error = Error{ErrorCode::kResource, "no memory"};
      runner.start_error = {"b", lost};
    }
    answers = finish(engine, std::move(answers));
    for (const char* id : {"a", "b", "c"}) {
      EXPECT_EQ(answers[id].finish, FinishReason::kError) << id;
      EXPECT_EQ(answers[id].error, lost.message) << id;
    }
    EXPECT_TRUE(engine.device_failure().has_value());
  }
}

TEST(Drafts, ATokenThatIsNotFiniteEndsItsRequestBehindThoseBeforeIt) {
  Runner runner(6, {}, count_on);
  runner.collecting = [](StepOutput& output) {
    if (!output.accepted.empty() && output.accepted[0].size() > 2) output.accepted[0][2].finite = false;
  };
  Engine engine(options(6), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("a", {5, 6, 7}, 20)).ok());
  ASSERT_TRUE(engine.submit(request("b", {5, 6, 7}, 5)).ok());
  Answers answers = finish(engine);
  EXPECT_EQ(answers["a"].finish, FinishReason::kError);
  EXPECT_EQ(answers["a"].error, "the logits are not finite");
  EXPECT_EQ(answers["a"].tokens, counted(4));  // the prompt's, the step's own, two drafts'
  EXPECT_EQ(answers["b"].tokens, counted(5));
}

TEST(Drafts, TakeBlocksThatNobodyNeedsOnly) {
  // The first request's drafts reach into a second block, which it never needs, as it ends before: the other one does.
  const auto next = [](const ScriptedState& s) {
    return s.prompt_size == 1 && s.output_size() == 3 ? kEnd : count_on(s);
  };
  for (const int32_t drafts : {0, 1, 3, 8}) {
    SCOPED_TRACE(drafts);
    Runner runner(
        drafts, [](const ScriptedState&) { return false; }, next);
    Engine engine(options(drafts, /*kv_blocks=*/4), &runner, nullptr, policy("fp16"));
    ASSERT_TRUE(engine.submit(request("short", {5}, 9)).ok());
    ASSERT_TRUE(engine.submit(request("long", {5, 6, 7, 8, 9, 10}, 7)).ok());
    Answers answers = finish(engine);
    EXPECT_EQ(answers["long"].tokens, counted(7));
    EXPECT_EQ(answers["short"].tokens.size(), 4u);
    EXPECT_EQ(engine.stats().preemptions, 0u);
    EXPECT_EQ(engine.stats().drafted_tokens > 0, drafts > 0);
  }
}

TEST(Drafts, ShrinkToTheRoomThereIs) {
  Runner runner(8, {}, count_on);
  Engine engine(options(8, /*kv_blocks=*/4), &runner, nullptr, policy("fp16"));
  ASSERT_TRUE(engine.submit(request("a", {5, 6, 7}, 6)).ok());
  ASSERT_TRUE(engine.submit(request("b", {5, 6, 7}, 6)).ok());
  Answers answers = finish(engine);
  for (const char* id : {"a", "b"}) EXPECT_EQ(answers[id].tokens, counted(6));
  EXPECT_EQ(engine.stats().preemptions, 0u);
  // The first: of eight tokens. Behind that it was to be as long as the answer.
  EXPECT_EQ(runner.steps, (std::vector<int32_t>{0, 4}));
}

TEST(Drafts, AreNotForRequestsWhoseNextTokenDependsOnTheLastInAnotherWay) {
  Runner runner(4, {}, count_on);
  Engine engine(options(4), &runner, nullptr, policy("fp16"));
  Request penal = request("penal", {5, 6}, 10), grammar = request("grammar", {5, 6}, 10);
  Request words = request("words", {5, 6}, 10);
  penal.sampling.repetition_penalty = 1.2f;
  grammar.constraint = std::make_unique<Anything>();
  words.sampling.allowed = allowed_tokens_of(kVocab, {}, {{5, 6}});
  ASSERT_TRUE(engine.submit(std::move(penal)).ok());
  ASSERT_TRUE(engine.submit(std::move(words)).ok());
  ASSERT_TRUE(engine.submit(std::move(grammar)).ok());
  Answers answers;
  for (int i = 0; i < 3; ++i) take(engine.step(), answers);
  EXPECT_EQ(runner.steps, (std::vector<int32_t>{0, 0, 0}));
  Request free = request("free", {5, 6}, 11);
  free.sampling.allowed = allowed_tokens_of(kVocab, {}, {{5}});  // of one token: forbidden wherever it is
  ASSERT_TRUE(engine.submit(std::move(free)).ok());
  for (int i = 0; i < 3; ++i) take(engine.step(), answers);
  EXPECT_EQ(runner.steps, (std::vector<int32_t>{0, 0, 0, 0, 4, 4}));
  EXPECT_EQ(answers["free"].finish, FinishReason::kLength);
  EXPECT_EQ(answers["penal"].tokens, counted(6));
  EXPECT_EQ(answers["grammar"].tokens, counted(6));
  answers = finish(engine, std::move(answers));
  EXPECT_EQ(answers["penal"].tokens, counted(10));
  EXPECT_EQ(answers["grammar"].tokens, counted(10));
  EXPECT_EQ(answers["words"].tokens, counted(10));
}

TEST(Drafts, BlocksThatTheyFillAreFoundByLaterRequests) {
  std::array<std::array<int32_t, 3>, 2> found;
  for (const int32_t drafts : {0, 5}) {
    Runner runner(
        drafts, [](const ScriptedState& s) { return s.output_size() % 4 != 2; }, count_on);
    Engine engine(options(drafts), &runner, nullptr, policy("fp16"));
    ASSERT_TRUE(engine.submit(request("a", {5, 6, 7, 8, 9}, 30)).ok());
    Answers answers = finish(engine);
    std::vector<int32_t> prompt = {5, 6, 7, 8, 9};
    prompt.insert(prompt.end(), answers["a"].tokens.begin(), answers["a"].tokens.end());
    Request next = request("b", prompt, 2);
    next.precision = PrecisionClass::kExact;
    ASSERT_TRUE(engine.submit(std::move(next)).ok());
    const Usage usage = finish(engine)["b"].usage;
    found[drafts == 0 ? 0 : 1] = {usage.cached_tokens, usage.prompt.fp16,
                                  static_cast<int32_t>(engine.stats().prefix_hits)};
    EXPECT_EQ(engine.stats().accepted_tokens > 0, drafts > 0);
  }
  EXPECT_EQ(found[0], (std::array<int32_t, 3>{32, 35, 32}));  // all but what its last token's block has
  EXPECT_EQ(found[1], found[0]);
}

TEST(Drafts, AreCounted) {
  Runner runner(
      3, [](const ScriptedState& s) { return s.prompt_size == 2 || s.output_size() % 3 != 2; }, count_on);
  Counts counts;
  Engine engine(options(3), &runner, nullptr, policy("fp16"));
  engine.set_observer(&counts);
  ASSERT_TRUE(engine.submit(request("a", {5, 6}, 9)).ok());     // 1 + (1 + 3) + (1 + 3)
  ASSERT_TRUE(engine.submit(request("b", {5, 6, 7}, 7)).ok());  // 1 + (1 + 1) + (1 + 2) + 1
  Answers answers = finish(engine);
  for (const auto& [id, answer] : answers) {
    EXPECT_EQ(answer.usage.completion.fp16, answer.usage.completion_tokens);
    EXPECT_EQ(answer.usage.prompt.fp16, answer.usage.prompt_tokens);
  }
  struct Step {
    int32_t tokens, sequences, drafted, accepted;
    bool operator==(const Step&) const = default;
  };
  std::vector<Step> steps;
  for (const StepRecord& step : counts.steps) {
    steps.push_back({step.tokens, step.sequences, step.drafted, step.accepted});
    EXPECT_EQ(step.precision, Precision::kFp16);
    EXPECT_FALSE(step.switched);
  }
  EXPECT_EQ(steps, (std::vector<Step>{{5, 2, 0, 0}, {2 + 4, 2, 6, 4}, {2 + 5, 2, 6, 5}, {1, 1, 0, 0}}));
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.drafted_tokens, 12u);
  EXPECT_EQ(stats.accepted_tokens, 9u);
  EXPECT_EQ(stats.steps, 4u);
  EXPECT_EQ(stats.tokens_by_precision[static_cast<size_t>(Precision::kFp16)], 5u + 6u + 7u + 1u);
  EXPECT_EQ(stats.tokens_by_precision[static_cast<size_t>(Precision::kFp8W8A8)], 0u);
  EXPECT_EQ(counts.firsts, 2);
  EXPECT_EQ(counts.gaps, 8 + 6);
}

TEST(Drafts, WaitForThoseThatWait) {
  for (const bool always : {false, true}) {
    Runner runner(4, {}, count_on);
    EngineConfig o = options(4);
    o.limits.max_sequences = 1;
    o.speculative_always = always;
    Engine engine(o, &runner, nullptr, policy("fp16"));
    for (const char* id : {"a", "b"}) ASSERT_TRUE(engine.submit(request(id, {5, 6}, 20)).ok());
    Answers answers;
    while (!answers["a"].finish) take(engine.step(), answers);
    EXPECT_EQ(engine.stats().drafted_tokens > 0, always);
    finish(engine, std::move(answers));
    EXPECT_GT(engine.stats().drafted_tokens, 0u);
  }
}

TEST(Drafts, WaitForThoseWhoseTurnIsNext) {
  Runner runner(4, {}, count_on);
  EngineConfig o = options(4);
  o.speculative_always = false;
  o.now = [&] { return EngineClock::time_point{} + runner.took; };
  Engine engine(o, &runner, nullptr, policy("fp8"));
  Request exact = request("exact", {5, 6}, 120);
  exact.precision = PrecisionClass::kExact;
  ASSERT_TRUE(engine.submit(std::move(exact)).ok());
  ASSERT_TRUE(engine.submit(request("other", {5, 6}, 40)).ok());
  Answers answers;
  while (!answers["other"].finish) take(engine.step(), answers);
  EXPECT_GT(answers["exact"].tokens.size(), 30u);
  EXPECT_EQ(drafting(runner), 0u);
  EXPECT_EQ(finish(engine, std::move(answers))["exact"].tokens, counted(120));
  EXPECT_GT(drafting(runner), 0u);
}

TEST(Drafts, AreOfFp16StepsOnly) {
  for (const char* name : {"fp8", "alternate:1"}) {
    Runner runner(4, {}, count_on);  // sees to it
    Engine engine(options(4), &runner, nullptr, policy(name));
    ASSERT_TRUE(engine.submit(request("a", {5, 6}, 60)).ok());
    const Answers answers = finish(engine);
    EXPECT_EQ(answers.at("a").tokens, counted(60));
    EXPECT_EQ(engine.stats().drafted_tokens > 0, std::string_view(name) != "fp8");
    EXPECT_GT(answers.at("a").usage.completion.fp8, 0);
  }
}

TEST(Drafts, StepsRunAheadWhereTheyGainNothing) {
  for (const bool right : {true, false}) {
    Runner runner(2, [&](const ScriptedState&) { return right; });
    EngineConfig o = options(2, 600);
    o.steps_in_flight = 2;
    o.speculative_always = false;
    o.now = [&] { return EngineClock::time_point{} + runner.took; };
    Engine engine(o, &runner, nullptr, policy("fp16"));
    int made = 0;
    const auto play = [&](int requests) {
      runner.steps.clear();
      runner.most_in_flight = 0;
      for (int i = 0; i < requests; ++i) {
        ASSERT_TRUE(engine.submit(request(std::to_string(made++), {5, 6}, 190)).ok());
        finish(engine);
      }
    };
    play(10);
    play(1);
    const size_t steps = runner.steps.size();
    if (right) {
      EXPECT_GT(drafting(runner), steps * 9 / 10);
    } else {
      EXPECT_LT(drafting(runner), steps / 10);
      EXPECT_EQ(runner.most_in_flight, 2);
    }
  }
}

TEST(Drafts, AreLeftWhereOthersOfTheBatchWouldWaitForThem) {
  for (const int penal : {0, 7}) {
    Runner runner(2);
    EngineConfig o = options(2, 600);
    o.speculative_always = false;
    o.now = [&] { return EngineClock::time_point{} + runner.took; };
    Engine engine(o, &runner, nullptr, policy("fp16"));
    for (int i = 0; i < 8; ++i) {
      Request r = request(std::to_string(i), {5, 6}, 190);
      if (i < penal) r.sampling.repetition_penalty = 1.2f;
      ASSERT_TRUE(engine.submit(std::move(r)).ok());
    }
    finish(engine);
    if (penal == 0) {
      EXPECT_GT(drafting(runner), runner.steps.size() / 2);
    } else {
      EXPECT_LT(drafting(runner), runner.steps.size() / 10);
    }
  }
}

}  // namespace
}  // namespace nfp::drafts
