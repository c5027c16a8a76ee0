#include "policy/slo_policy.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "policy/testing/step_tables.h"

namespace nfp {
namespace {

StepModel model() { return std::move(StepModel::fit(testing::synthetic_table())).value(); }

std::unique_ptr<PrecisionPolicy> slo(const SloOptions& options = {}) {
  return std::move(make_slo_policy(model(), options)).value();
}

uint64_t next_serial() {
  static uint64_t last = 0;
  return ++last;
}

SequenceState prompt(int32_t tokens, double arrival, double ttft, double itl = 0.05) {
  SequenceState state;
  state.serial = next_serial();
  state.missing = tokens;
  state.arrival_s = arrival;
  state.ttft_s = ttft;
  state.itl_s = itl;
  state.due_s = arrival + ttft;
  return state;
}

SequenceState decoding(int32_t context, double due, double itl = 0.05) {
  SequenceState state;
  state.context = context;
  state.missing = 1;
  state.emitted = 3;
  state.running = true;
  state.itl_s = itl;
  state.ttft_s = 0.5;
  state.due_s = due;
  return state;
}

StepState state_of(const std::vector<SequenceState>& sequences, double now) {
  StepState state;
  state.now_s = now;
  state.sequences = sequences;
  state.max_step_tokens = 2048;
  state.max_sequences = 64;
  state.free_tokens = 1 << 20;
  return state;
}

TEST(SloPolicy, ComputesInFp16WhenNothingIsInDanger) {
  const auto policy = slo();
  EXPECT_EQ(policy->decide(state_of({prompt(100, 0, 1)}, 0)).precision, Precision::kFp16);
  EXPECT_EQ(policy->decide(state_of({decoding(100, 0.1)}, 0)).precision, Precision::kFp16);
  EXPECT_TRUE(policy->decide(state_of({}, 0)).chunks.empty());
}

TEST(SloPolicy, LowersPrecisionForADeadlineThatOnlyFp8Keeps) {
  // 1000 tokens: about 60 ms in FP16 and 35 ms in FP8 on this machine.
  const StepDecision decision = slo()->decide(state_of({prompt(1000, 0, 0.05)}, 0));
  EXPECT_EQ(decision.precision, Precision::kFp8W8A8);
  EXPECT_EQ(decision.fp8_share, 1);
  EXPECT_TRUE(decision.lost.empty());
}

// Their steps are in FP16, and what is planned for FP8 would make them too long.
TEST(SloPolicy, PlansForFp16WhereAllRequestsAreExact) {
  const auto decide = [](bool all) {
    std::vector<SequenceState> sequences(8, decoding(200, 0.03, 0.03));
    sequences.push_back(prompt(1000, 0, 0.05));
    sequences.push_back(prompt(500, 0, 0.05));
    for (SequenceState& sequence : sequences) sequence.exact = all;
    return slo()->decide(state_of(sequences, 0));
  };
  const StepDecision exact = decide(true), other = decide(false);
  EXPECT_EQ(other.precision, Precision::kFp8W8A8);
  EXPECT_EQ(exact.precision, Precision::kFp16);
  EXPECT_LE(exact.predicted_s, 0.06);
  EXPECT_EQ(exact.lost, (std::vector<size_t>{8}));  // FP8 would have kept both
  EXPECT_TRUE(other.lost.empty());
}

// Steps with FP8 and those of exact requests take turns, in which each gets its token in time.
TEST(SloPolicy, LeavesExactRequestsTheirTurn) {
  std::vector<SequenceState> sequences;
  sequences.reserve(9);
  for (int i = 0; i < 8; ++i) sequences.push_back(decoding(200, 0.03, 0.03));
  for (int i = 0; i < 2; ++i) sequences[static_cast<size_t>(i)].exact = true;
  sequences.push_back(prompt(1000, 0, 0.06));  // 63 ms in FP16
  const auto policy = slo();
  double seconds = 0;
  for (const bool turn : {true, false, true}) {
    const StepDecision decision = policy->decide(state_of(sequences, 0));
    std::vector<size_t> chosen;
    for (const StepChunk& chunk : decision.chunks) chosen.push_back(chunk.sequence);
    EXPECT_EQ(is_exact(decision.precision), turn);
    EXPECT_EQ(policy->choose({}), decision.precision);
    EXPECT_EQ(chosen, turn ? (std::vector<size_t>{0, 1}) : (std::vector<size_t>{2, 3, 4, 5, 6, 7, 8}));
    EXPECT_TRUE(decision.lost.empty());
    EXPECT_LE(seconds + decision.predicted_s, 0.031);  // of two steps, one after the other
    seconds = decision.predicted_s;
  }
  // An exact prompt that is the most urgent is not computed 16 tokens at a time.
  sequences.push_back(prompt(300, 0, 0.05));
  sequences.back().exact = true;
  const StepDecision decision = policy->decide(state_of(sequences, 0));
  EXPECT_EQ(decision.precision, Precision::kFp16);
  ASSERT_GE(decision.chunks.size(), 9u);
  EXPECT_EQ(decision.chunks[8].sequence, 9u);
  EXPECT_GT(decision.chunks[8].tokens, 200);
}

// Such a step of all waits for no step of others just before it, and is as much shorter as the exact requests' turn, in
// which the others got nothing. The next one is not.
TEST(SloPolicy, AStepOfAllLeavesExactAndOtherRequestsTheirPace) {
  std::vector<SequenceState> sequences;
  sequences.reserve(10);
  for (int i = 0; i < 8; ++i) sequences.push_back(decoding(200, 0.03, 0.03));
  for (int i = 0; i < 2; ++i) sequences[static_cast<size_t>(i)].exact = true;
  sequences.push_back(prompt(1000, 0, 0.06));
  const auto policy = slo();
  const auto decide = [&] { return policy->decide(state_of(sequences, 0)); };
  while (is_exact(decide().precision)) {
  }
  sequences.push_back(prompt(300, 0, 0.05));
  sequences.back().exact = true;
  const StepDecision turn = decide(), first = decide(), next = decide();
  EXPECT_EQ(turn.precision, Precision::kFp16);
  ASSERT_EQ(turn.chunks.size(), 3u);
  EXPECT_LE(turn.chunks[2].tokens, 16);
  EXPECT_EQ(first.chunks.size(), 10u);  // all
  EXPECT_LE(turn.predicted_s + first.predicted_s, 0.031);
  EXPECT_GT(turn.predicted_s + first.predicted_s, 0.027);
  EXPECT_LE(next.predicted_s, 0.031);
  EXPECT_GT(next.predicted_s, 0.027);
}

// FP8 would keep the deadline of one that is exact, which is not computed in FP8.
TEST(SloPolicy, CountsExactPromptsAtFp16sPace) {
  for (const bool exact : {false, true}) {
    std::vector<SequenceState> sequences = {prompt(800, 0, 0.036), prompt(50, 0, 0.2)};
    sequences[0].exact = exact;
    EXPECT_EQ(slo()->decide(state_of(sequences, 0)).lost, exact ? std::vector<size_t>{0} : std::vector<size_t>())
        << exact;
  }
}

// Where all deadlines are lost the shortest prompt is the first in line, exact or not.
TEST(SloPolicy, AnExactPromptThatIsLostIsNotLeftToItsTurns) {
  std::vector<SequenceState> sequences(8, decoding(200, 0.03, 0.03));
  sequences.push_back(prompt(2000, -100, 0.06));
  sequences.push_back(prompt(400, -100, 0.06));
  sequences.back().exact = true;
  const auto policy = slo();
  int32_t most = 0;
  for (int i = 0; i < 4; ++i) {
    for (const StepChunk& chunk : policy->decide(state_of(sequences, 0)).chunks) {
      if (chunk.sequence == 9) most = std::max(most, chunk.tokens);
    }
  }
  EXPECT_GT(most, 200);
}

TEST(SloPolicy, GivesUpTheLongestAndServesTheOthers) {
  // All are due in 60 ms, which is enough for about 1800 tokens in FP8.
  const std::vector<SequenceState> sequences = {prompt(2000, 0, 0.06), prompt(300, 0.001, 0.06),
                                                prompt(300, 0.002, 0.06)};
  const StepDecision decision = slo()->decide(state_of(sequences, 0.003));
  EXPECT_EQ(decision.lost, (std::vector<size_t>{0}));
  ASSERT_GE(decision.chunks.size(), 2u);
  EXPECT_EQ(decision.chunks[0].sequence, 1u);
  EXPECT_EQ(decision.chunks[1].sequence, 2u);
}

TEST(SloPolicy, APromptsChunkLeavesRunningRequestsTheirPace) {
  std::vector<SequenceState> sequences(4, decoding(200, 0.05));
  sequences.push_back(prompt(3900, 0, 10));
  const StepDecision decision = slo()->decide(state_of(sequences, 0));
  ASSERT_EQ(decision.chunks.size(), 5u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(decision.chunks[i].sequence, i);
  EXPECT_GT(decision.chunks[4].tokens, 100);
  EXPECT_LE(decision.predicted_s, 1.9 * 0.05 + 1e-9);
}

TEST(SloPolicy, APaceThatNothingKeepsDoesNotStarvePrompts) {
  // 16 sequences want a token every millisecond, and no level computes 16 tokens in that. The prompt gets about as long
  // a part of the step as they do, not the few tokens that steps of a millisecond have room for.
  std::vector<SequenceState> sequences(16, decoding(200, -1, 0.001));
  StepWork decodes;
  for (int i = 0; i < 16; ++i) decodes.add(1, 200);
  const double alone = std::min(model().seconds(0, decodes), model().seconds(1, decodes));
  ASSERT_GT(alone, 0.002);
  sequences.push_back(prompt(2000, 0, 1, 0.001));
  const StepDecision decision = slo()->decide(state_of(sequences, 0));
  ASSERT_EQ(decision.chunks.size(), 17u);
  EXPECT_GT(decision.predicted_s, 1.5 * alone);
  EXPECT_LE(decision.predicted_s, 2 * alone + 1e-9);
  EXPECT_GT(decision.chunks.back().tokens, 16);
}

TEST(SloPolicy, ATargetThatNothingKeepsLeavesOthersTheirs) {
  // FP8 keeps the pace of the 63, FP16 does not. No level keeps that of one more.
  std::vector<SequenceState> sequences(64, decoding(1000, 0.010, 0.010));
  StepWork decodes;
  for (int i = 0; i < 64; ++i) decodes.add(1, 1000);
  ASSERT_GT(model().seconds(0, decodes), 0.010);
  ASSERT_LT(model().seconds(1, decodes), 0.009);
  ASSERT_LT(model().seconds(0, decodes), 2 * model().seconds(1, decodes));
  const StepDecision before = slo()->decide(state_of(sequences, 0));
  EXPECT_EQ(before.precision, Precision::kFp8W8A8);
  sequences.back() = decoding(1000, -1, 0.001);
  EXPECT_EQ(slo()->decide(state_of(sequences, 0)).precision, Precision::kFp8W8A8);
  sequences.push_back(prompt(2000, 0, 10));
  const StepDecision decision = slo()->decide(state_of(sequences, 0));
  EXPECT_EQ(decision.precision, Precision::kFp8W8A8);
  EXPECT_LE(decision.predicted_s, 0.010 + 1e-9);
}

TEST(SloPolicy, WithStepsAheadEachIsShorter) {
  // A newcomer waits for all of them.
  const auto predicted = [](int32_t ahead) {
    const std::vector<SequenceState> sequences = {prompt(2000, 0, 0.4), prompt(2000, 0, 0.4)};
    StepState state = state_of(sequences, 0);
    state.steps_ahead = ahead;
    return slo()->decide(state).predicted_s;
  };
  EXPECT_LE(predicted(1), 0.25 * 0.4 + 1e-9);
  EXPECT_GT(predicted(0), predicted(1));
}

TEST(SloPolicy, WhatIsLostIsNoReasonForFp8UntilItHasWaitedLong) {
  // The first is far beyond any deadline of its own; the second has all the time there is.
  const auto share = [](double waited) {
    const std::vector<SequenceState> sequences = {prompt(30000, -waited, 0.1), prompt(10, 0, 10)};
    SloOptions options;
    options.longest_wait_s = 1e-3;
    return slo(options)->decide(state_of(sequences, 0)).fp8_share;
  };
  EXPECT_EQ(share(5), 0);
  EXPECT_EQ(share(31), 1);
}

// An answer that came long ago and had its last token `ago` seconds before now.
SequenceState preempted(int32_t tokens, double now, double ago) {
  SequenceState state = decoding(0, now - ago + 0.05);
  state.missing = tokens;
  state.emitted = 900;
  state.running = false;
  state.arrival_s = now - 45;
  state.last_s = now - ago;
  return state;
}

TEST(SloPolicy, APreemptedAnswerHasWaitedSinceItsLastToken) {
  std::vector<SequenceState> sequences(4, decoding(200, 100.04));
  sequences.push_back(preempted(500, 100, 0.07));
  EXPECT_EQ(slo()->decide(state_of(sequences, 100)).precision, Precision::kFp16);
}

TEST(SloPolicy, AnAnswerThatStopsForLongGoesBeforeAllPrompts) {
  const auto first = [](double ago, double ahead) {
    std::vector<SequenceState> sequences(40, prompt(1000, 99.9, 0.5));  // more than can be in time
    sequences.push_back(preempted(4000, 100, ago));
    sequences.back().due_s += ahead;
    return slo()->decide(state_of(sequences, 100)).chunks.front().sequence;
  };
  for (const double ahead : {0.0, 20.0}) {  // seconds by which it was faster than its target
    EXPECT_NE(first(0.5, ahead), 40u);      // the longest, so given up before the others
    EXPECT_EQ(first(2.5, ahead), 40u);
  }
}

TEST(SloPolicy, LowerPriorityNumbersGoFirst) {
  std::vector<SequenceState> sequences = {prompt(500, 0, 1), prompt(500, 0, 1)};
  sequences[0].priority = 1;
  EXPECT_EQ(slo()->decide(state_of(sequences, 0)).chunks.front().sequence, 1u);
}

TEST(SloPolicy, PromptsWaitForRoomInTheCache) {
  StepState state = state_of({}, 0);
  const std::vector<SequenceState> sequences = {decoding(100, 1), prompt(500, 0, 1), prompt(50, 0, 2)};
  state.sequences = sequences;
  state.free_tokens = 200;
  const StepDecision decision = slo()->decide(state);
  ASSERT_EQ(decision.chunks.size(), 2u);
  EXPECT_EQ(decision.chunks[1].sequence, 2u);
}

// A prefix that nobody uses is room for others until it is taken.
TEST(SloPolicy, ACachedPromptNeedsRoomForAllOfIt) {
  SequenceState cached = prompt(20, 0, 1);
  cached.context = 480;
  const std::vector<SequenceState> sequences = {decoding(100, 0.1), cached, prompt(60, 0, 1)};
  StepState state = state_of(sequences, 0);
  state.free_tokens = 400;
  StepDecision decision = slo()->decide(state);
  ASSERT_EQ(decision.chunks.size(), 2u);
  EXPECT_EQ(decision.chunks[1].sequence, 2u);
  state.free_tokens = 600;
  decision = slo()->decide(state);
  ASSERT_EQ(decision.chunks.size(), 3u);
  EXPECT_EQ(decision.chunks[1].tokens, 20);
}

// Or shorter ones, which come and go, would keep it out for as long as they come.
TEST(SloPolicy, RoomIsHeldForWhatHasWaitedLongOneAfterTheOther) {
  const auto policy = slo();
  std::vector<SequenceState> sequences;
  const auto admitted = [&](double now, int64_t free_tokens) {
    sequences.back().serial = next_serial();  // a short one that has just come
    sequences.back().arrival_s = now;
    sequences.back().due_s = now + 1;
    sequences[0].due_s = now + 1;
    StepState state = state_of(sequences, now);
    state.free_tokens = free_tokens;
    std::set<size_t> waiting;
    for (const StepChunk& chunk : policy->decide(state).chunks) {
      if (!sequences[chunk.sequence].running) waiting.insert(chunk.sequence);
    }
    return waiting;
  };
  using Set = std::set<size_t>;
  sequences = {decoding(100, 1), prompt(500, 0, 1), prompt(600, 1, 1), prompt(50, 0, 1)};
  EXPECT_EQ(admitted(10, 200), Set{3});
  EXPECT_EQ(admitted(29.9, 200), Set{3});
  EXPECT_EQ(admitted(30, 200), Set{});
  EXPECT_EQ(admitted(32, 400), Set{});
  EXPECT_EQ(admitted(33, 520), Set{1});  // though others would be in time
  sequences = {decoding(600, 1), prompt(600, 1, 1), prompt(50, 0, 1)};
  EXPECT_EQ(admitted(34, 200), Set{2});  // the next one's turn is later
  EXPECT_EQ(admitted(62, 200), Set{2});
  EXPECT_EQ(admitted(64, 200), Set{});
  sequences = {decoding(600, 1), prompt(50, 0, 1)};  // it was cancelled
  EXPECT_EQ(admitted(65, 200), Set{1});
}

// As n answers to one prompt, or requests of one trace, do.
TEST(SloPolicy, RoomIsHeldForOneOfThoseThatCameTogether) {
  const std::vector<SequenceState> sequences = {decoding(100, 31), prompt(500, 0, 1), prompt(50, 0, 1)};
  StepState state = state_of(sequences, 31);
  state.free_tokens = 200;
  EXPECT_EQ(slo()->decide(state).chunks.size(), 1u);
}

TEST(SloPolicy, RoomIsHeldForAnAnswerThatIsAheadOfItsPace) {
  const auto policy = slo();
  const uint64_t serial = next_serial();
  const auto admitted = [&](double now, double stopped) {
    std::vector<SequenceState> sequences = {decoding(100, now + 1), preempted(500, now, now - stopped),
                                            prompt(50, now, 1)};
    sequences[1].serial = serial;
    sequences[1].due_s = 1000;
    StepState state = state_of(sequences, now);
    state.free_tokens = 200;
    return policy->decide(state).chunks.size() - 1;
  };
  EXPECT_EQ(admitted(29, 0), 1u);
  EXPECT_EQ(admitted(30, 0), 0u);
  EXPECT_EQ(admitted(31, 0), 0u);
}

TEST(SloPolicy, NeedsTheLevelsThatItIsToChooseFrom) {
  StepTable table = testing::synthetic_table();
  table.levels.pop_back();
  std::erase_if(table.steps, [](const StepTime& step) { return step.level == 1; });
  StepModel only = std::move(StepModel::fit(table)).value();
  EXPECT_FALSE(make_slo_policy(only, {.levels = SloOptions::Levels::kFp8Only}).ok());
  const auto made = make_slo_policy(only, {});
  ASSERT_TRUE(made.ok());
  EXPECT_EQ((*made)->decide(state_of({prompt(2000, 0, 0.001)}, 0)).precision, Precision::kFp16);
}

// What exact requests take, and decodes beside prompts in FP8, is looked up there.
TEST(SloPolicy, NeedsFp16) {
  StepTable table = testing::synthetic_table();
  table.levels.erase(table.levels.begin());
  std::erase_if(table.steps, [](const StepTime& step) { return step.level == 0; });
  for (StepTime& step : table.steps) step.level = 0;
  const StepModel only = std::move(StepModel::fit(table)).value();
  for (const auto levels : {SloOptions::Levels::kAll, SloOptions::Levels::kFp8Only}) {
    const auto made = make_slo_policy(only, {.levels = levels});
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code, ErrorCode::kUsage);
    EXPECT_NE(made.error().message.find("no FP16 level"), std::string::npos);
  }
}

StepModel where_fp8_is_not_faster() {
  StepTable table = testing::synthetic_table();
  for (StepTime& step : table.steps) {
    StepTime exact = step;
    exact.level = 0;
    step.ms = testing::synthetic_ms(exact);
  }
  return std::move(StepModel::fit(table)).value();
}

TEST(SloPolicy, NeverComputesInFp8WhereThatIsNotFaster) {
  const auto policy = std::move(make_slo_policy(where_fp8_is_not_faster(), {})).value();
  for (const double ttft : {0.001, 0.05, 0.2}) {
    EXPECT_EQ(policy->decide(state_of({prompt(1500, 0, ttft), decoding(100, 0.001)}, 0)).precision, Precision::kFp16);
  }
}

TEST(SloPolicy, MoreRequestsOfAKindNeverMeanLessFp8) {
  double before = 0;
  for (int count = 1; count <= 40; ++count) {
    std::vector<SequenceState> sequences;
    sequences.reserve(40);
    for (int i = 0; i < count; ++i) sequences.push_back(prompt(200, 0.0001 * i, 0.3));
    const double share = slo()->decide(state_of(sequences, 0.0001 * count)).fp8_share;
    EXPECT_GE(share, before) << count;
    before = share;
  }
  EXPECT_EQ(before, 1);
}

TEST(SloPolicy, AStepEndsBeforeAPromptThatEndsInItIsLate) {
  // The short prompt is due in 30 ms; all 2000 tokens of the other in the same step would take some 100 ms.
  const std::vector<SequenceState> sequences = {prompt(100, 0, 0.03), prompt(2000, 0, 2)};
  const StepDecision decision = slo()->decide(state_of(sequences, 0));
  ASSERT_GE(decision.chunks.size(), 1u);
  EXPECT_EQ(decision.chunks[0].sequence, 0u);
  EXPECT_EQ(decision.chunks[0].tokens, 100);
  EXPECT_LE(decision.predicted_s, 0.03);
  ASSERT_EQ(decision.chunks.size(), 2u);
  EXPECT_LT(decision.chunks[1].tokens, 2000);
}

std::unique_ptr<PrecisionPolicy> slo_with_levels(const SloOptions& options = {}) {
  return std::move(make_slo_policy(model().at_shares(std::vector<double>{0.5, 0.88, 1.0}), options)).value();
}

TEST(SloPolicy, TakesTheSmallestLevelThatKeepsTheDeadlines) {
  // 1000 tokens take 61 ms in FP16, 47 at half of the weights, 37 at 88 % and 35 in FP8 on this machine.
  std::set<double> seen;
  double before = 0;
  for (int ms = 90; ms > 36; --ms) {
    const double ttft = 0.001 * ms;
    const StepDecision decision = slo_with_levels()->decide(state_of({prompt(1000, 0, ttft)}, 0));
    EXPECT_GE(decision.fp8_share, before) << ttft;
    before = decision.fp8_share;
    seen.insert(decision.fp8_share);
  }
  EXPECT_TRUE(seen.contains(0));
  EXPECT_TRUE(seen.contains(0.5));
  EXPECT_GT(*seen.rbegin(), 0.5);
}

TEST(SloPolicy, ToldToShedItRefusesWhatCannotBeInTime) {
  const std::vector<SequenceState> sequences = {prompt(2000, 0, 0.06), prompt(300, 0.001, 0.06),
                                                prompt(300, 0.002, 0.06)};
  const StepDecision decision = slo({.missed = SloOptions::Missed::kShed})->decide(state_of(sequences, 0.003));
  EXPECT_EQ(decision.shed, (std::vector<size_t>{0}));
  for (const StepChunk& chunk : decision.chunks) EXPECT_NE(chunk.sequence, 0u);
  EXPECT_GT(decision.busy_s, 0);
  // 2000 tokens take 70 ms in FP8 without the others, too; 1000 take 35 ms.
  EXPECT_EQ(decision.hopeless, decision.shed);
  const std::vector<SequenceState> crowd = {prompt(1000, 0, 0.06), prompt(1000, 0.001, 0.06)};
  const StepDecision busy = slo({.missed = SloOptions::Missed::kShed})->decide(state_of(crowd, 0.003));
  EXPECT_EQ(busy.shed.size(), 1u);
  EXPECT_TRUE(busy.hopeless.empty());
  // What is being computed is not thrown away, nor is one of which preemption took that.
  std::vector<SequenceState> begun = sequences;
  begun[0].started = true;
  EXPECT_TRUE(slo({.missed = SloOptions::Missed::kShed})->decide(state_of(begun, 0.003)).shed.empty());
  begun[0].running = true;
  begun[0].context = 100;
  EXPECT_TRUE(slo({.missed = SloOptions::Missed::kShed})->decide(state_of(begun, 0.003)).shed.empty());
}

TEST(SloPolicy, AsTheyComeNobodyIsPutBehind) {
  const std::vector<SequenceState> sequences = {prompt(2000, 0, 0.06), prompt(300, 0.001, 0.06)};
  const StepDecision decision = slo({.missed = SloOptions::Missed::kAsTheyCome})->decide(state_of(sequences, 0.003));
  ASSERT_FALSE(decision.chunks.empty());
  EXPECT_EQ(decision.chunks.front().sequence, 0u);
  EXPECT_EQ(decision.lost, (std::vector<size_t>{0}));
}

TEST(SloPolicy, PromptsMayBeInFp8BesideFp16) {
  // 64 sequences decode in 15 ms, and 1000 tokens take 61 ms in FP16 and 35 ms in FP8: together 65 ms in FP16, 50 ms
  // apart and 37 ms in FP8. What decodes has time for all of that.
  std::vector<SequenceState> sequences(64, decoding(100, 10, 1));
  sequences.push_back(prompt(1000, 0, 0));
  const auto at = [&](double ttft, bool exact_decode = true) {
    sequences.back().ttft_s = ttft;
    sequences.back().due_s = ttft;
    StepState state = state_of(sequences, 0);
    state.max_sequences = 128;
    return slo({.exact_decode = exact_decode})->decide(state);
  };
  EXPECT_EQ(at(1).precision, Precision::kFp16);
  bool seen = false;
  for (int ms = 100; ms > 45; --ms) {
    const double ttft = 0.001 * ms;
    const StepDecision decision = at(ttft);
    seen = seen || decision.exact_singles;
    if (decision.exact_singles) {
      EXPECT_FALSE(is_exact(decision.precision));
      EXPECT_GT(ttft, 0.05);
    }
    EXPECT_FALSE(at(ttft, false).exact_singles);
  }
  EXPECT_TRUE(seen);
  EXPECT_FALSE(at(0.045).exact_singles);
  EXPECT_EQ(at(0.045).fp8_share, 1);
}

// How a long prompt gets on beside sequences that decode, on a machine that takes what the model says or, unevenly,
// more.
struct Shared {
  double seconds = 0, longest_step = 0, fp8 = 0;  // the last: of the weights, in the mean over the prompt's tokens
  int steps = 0, changes = 0;
};
Shared beside(const StepModel& machine, int32_t tokens, int decodes, double itl, double noise = 0,
              const SloOptions& options = {}) {
  const auto policy = std::move(make_slo_policy(machine, options)).value();
  std::mt19937 random(7);
  std::uniform_real_distribution<double> late(0, noise);
  SequenceState long_one = prompt(tokens, 0, 1000, itl);
  Shared shared;
  double last = 0;
  while (long_one.missing > 0) {
    std::vector<SequenceState> sequences(static_cast<size_t>(decodes),
                                         decoding(200 + shared.steps, shared.seconds + 10, itl));
    sequences.push_back(long_one);
    const StepDecision decision = policy->decide(state_of(sequences, shared.seconds));
    StepWork work;
    for (const StepChunk& chunk : decision.chunks) work.add(chunk.tokens, sequences[chunk.sequence].context);
    const double taken =
        machine.seconds(machine.find_level(decision.precision, decision.fp8_share), work) * (1 + late(random));
    policy->observe(decision.precision, decision.fp8_share, work, taken);
    const int32_t count = decision.chunks.back().sequence + 1 == sequences.size() ? decision.chunks.back().tokens : 0;
    EXPECT_GT(count, 0);
    if (count < 1) break;
    long_one.running = true;
    long_one.context += count;
    long_one.missing -= count;
    shared.seconds += taken;
    shared.longest_step = std::max(shared.longest_step, taken);
    shared.fp8 += decision.fp8_share * count / tokens;
    shared.changes += decision.fp8_share != last ? 1 : 0;
    last = decision.fp8_share;
    ++shared.steps;
  }
  return shared;
}

// Eight sequences decode every 8 ms or later, which cuts 8000 tokens into some hundred steps: each of them computes
// these too. FP8 pays for that, and for no more than that.
TEST(SloPolicy, APromptInManyStepsTakesLittleLongerThanAlone) {
  const StepModel machine = model().at_shares(std::vector<double>{0.5, 0.88, 1.0});
  const double alone = machine.prompt_seconds(machine.exact_level(), 8000, 0, 2048);
  const Shared shared = beside(machine, 8000, 8, 0.008);
  EXPECT_GT(shared.steps, 32);
  EXPECT_LT(shared.seconds, 1.15 * alone);
  EXPECT_GT(shared.seconds, 0.9 * alone);
  EXPECT_GT(shared.fp8, 0);
  EXPECT_LT(shared.fp8, 1);
  EXPECT_LE(shared.changes, 6);
  EXPECT_LT(shared.longest_step, 1.3001 * 0.008);
  const Shared uneven = beside(machine, 8000, 8, 0.008, 0.4);
  EXPECT_LT(uneven.longest_step, 2 * 0.008);
  EXPECT_LT(uneven.seconds, 1.25 * 1.15 * alone);
  EXPECT_LE(uneven.changes, uneven.steps / 10);
  // Less of it where less decodes beside, and none where nothing does or the steps are few.
  double before = 0;
  for (const int decodes : {0, 1, 4, 8, 16}) {
    const double fp8 = beside(machine, 8000, decodes, 0.008).fp8;
    EXPECT_GE(fp8, before - 0.02) << decodes;
    before = fp8;
  }
  EXPECT_EQ(beside(machine, 8000, 0, 0.008).fp8, 0);
  EXPECT_EQ(beside(machine, 1000, 8, 0.008).fp8, 0);
  EXPECT_EQ(beside(machine, 8000, 8, 0.008, 0, {.levels = SloOptions::Levels::kFp16Only}).fp8, 0);
}

TEST(SloPolicy, APromptInManyStepsStaysInFp16WhereFp8IsNotFaster) {
  EXPECT_EQ(beside(where_fp8_is_not_faster(), 8000, 8, 0.008).fp8, 0);
}

// Twenty requests come and lose their deadlines; then one comes that has some time to spare. What FP8 alone would have
// kept is a reason to keep more of that in reserve, what it would have lost too is none.
TEST(SloPolicy, ReservesGrowOnlyWhereFp8WouldHaveKeptWhatWasLost) {
  const auto share_after = [](int losses, int32_t tokens, double wait) {
    const auto policy = slo();
    double now = 0;
    for (int i = 0; i < losses; ++i) {
      const std::vector<SequenceState> sequences = {prompt(tokens, now, 0.1)};
      policy->decide(state_of(sequences, now));
      policy->decide(state_of(sequences, now + wait));  // nothing of it was computed
      now += 10;
    }
    policy->decide(state_of({}, now));
    return policy->decide(state_of({prompt(1000, now, 0.08)}, now)).fp8_share;  // 61 ms in FP16
  };
  EXPECT_EQ(share_after(0, 1000, 0.2), 0);
  EXPECT_EQ(share_after(20, 1000, 0.0), 0);  // not lost
  EXPECT_EQ(share_after(20, 9000, 0.2), 0);  // more than FP8 can compute in time
  EXPECT_EQ(share_after(1, 1000, 0.2), 0);   // one is chance
  EXPECT_EQ(share_after(20, 1000, 0.2), 1);
}

// A burst is the first that a policy sees: FP8 alone would have kept no more of it than the three that are in time.
TEST(SloPolicy, AFirstBurstIsNotTakenForWhatFp8WouldHaveKept) {
  const auto policy = slo();
  std::vector<SequenceState> burst;
  burst.reserve(200);
  for (int i = 0; i < 200; ++i) burst.push_back(prompt(1000, 0, 0.1));  // 32 ms in FP8
  policy->decide(state_of(burst, 0));
  burst.erase(burst.begin(), burst.begin() + 3);
  policy->decide(state_of(burst, 10));  // lost
  policy->decide(state_of({}, 20));
  EXPECT_EQ(policy->decide(state_of({prompt(1000, 20, 0.08)}, 20)).fp8_share, 0);  // 61 ms in FP16
}

// Likewise where each comes with a short one, which is in time: it is not the short one that is lost. Nor is one that
// was not seen before counted less for having come with one that was.
TEST(SloPolicy, WhatCameTogetherIsLostByItself) {
  const auto share_after = [](int32_t first, int32_t second) {
    const auto policy = slo();
    double now = 0;
    for (int i = 0; i < 20; ++i) {
      policy->decide(state_of({prompt(first, now, 0.1)}, now));
      const std::vector<SequenceState> sequences = {prompt(second, now, 0.1)};
      policy->decide(state_of(sequences, now + 0.001));
      policy->decide(state_of(sequences, now + 0.2));
      now += 10;
    }
    policy->decide(state_of({}, now));
    return policy->decide(state_of({prompt(1000, now, 0.08)}, now)).fp8_share;
  };
  EXPECT_EQ(share_after(10, 9000), 0);
  EXPECT_EQ(share_after(9000, 10), 0);
  EXPECT_EQ(share_after(10, 1000), 1);
}

// A steady load: the same prompt every 70 ms, which FP16 alone could just not keep up with, beside four sequences.
TEST(SloPolicy, DoesNotFlapOnASteadyLoad) {
  const auto policy = slo_with_levels();
  std::vector<SequenceState> queue;
  double now = 0, next = 0;
  int changes = 0, steps = 0;
  double last = -1;
  while (now < 30) {
    while (next <= now) {
      queue.push_back(prompt(1000, next, 0.5));
      next += 0.07;
    }
    std::vector<SequenceState> sequences(4, decoding(200, now + 0.05));
    sequences.insert(sequences.end(), queue.begin(), queue.end());
    const StepDecision decision = policy->decide(state_of(sequences, now));
    if (last >= 0 && decision.fp8_share != last) ++changes;
    last = decision.fp8_share;
    ++steps;
    now += std::max(decision.predicted_s, 0.001);
    std::vector<SequenceState> left;
    for (const StepChunk& chunk : decision.chunks) {
      if (chunk.sequence >= 4) sequences[chunk.sequence].missing -= chunk.tokens;
      if (chunk.sequence >= 4) sequences[chunk.sequence].context += chunk.tokens;
    }
    for (size_t i = 4; i < sequences.size(); ++i) {
      if (sequences[i].missing > 0) left.push_back(sequences[i]);
    }
    queue = std::move(left);
  }
  ASSERT_GT(steps, 100);
  EXPECT_LT(changes, steps / 10) << "of " << steps << " steps";
}

// The same levels on a machine that another program makes eight times slower for a while, unevenly: nothing is in time
// then, and which level is predicted to be the fastest changes with every step.
TEST(SloPolicy, DoesNotFlapWhereAnotherProgramSlowsTheMachine) {
  StepTable table = testing::synthetic_table();
  for (StepTime& step : table.steps) {  // as on CPUs whose products are what takes long: FP8 saves little
    StepTime exact = step;
    exact.level = 0;
    step.ms = testing::synthetic_ms(exact) * (step.level == 1 ? 0.95 : 1.0);
  }
  const StepModel machine = std::move(StepModel::fit(table)).value().at_shares(std::vector<double>{0.5, 0.88, 1.0});
  for (const unsigned seed : {1u, 2u, 3u}) {
    const auto policy = std::move(make_slo_policy(machine, {})).value();
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<SequenceState> queue;
    double now = 0, next = 0, last = -1;
    int changes = 0, steps = 0;
    while (now < 60) {
      while (next <= now) {
        queue.push_back(prompt(1000, next, 0.5));
        next += now > 10 && now < 40 ? 1.0 : 0.07;
      }
      std::vector<SequenceState> sequences(4, decoding(200, now + 0.05));
      sequences.insert(sequences.end(), queue.begin(), queue.end());
      const StepDecision decision = policy->decide(state_of(sequences, now));
      const bool slow = now > 10 && now < 40;
      if (slow) {
        changes += last >= 0 && decision.fp8_share != last ? 1 : 0;
        ++steps;
      }
      last = decision.fp8_share;
      StepWork work;
      for (const StepChunk& chunk : decision.chunks) work.add(chunk.tokens, sequences[chunk.sequence].context);
      const size_t level = machine.find_level(decision.precision, decision.fp8_share);
      const double taken = machine.seconds(level, work) * (slow ? 8 * std::exp(0.3 * normal(random)) : 1.0);
      policy->observe(decision.precision, decision.fp8_share, work, taken);
      now += taken;
      queue.clear();
      for (const StepChunk& chunk : decision.chunks) {
        sequences[chunk.sequence].missing -= chunk.tokens;
        sequences[chunk.sequence].context += chunk.tokens;
      }
      for (size_t i = 4; i < sequences.size(); ++i) {
        if (sequences[i].missing > 0) queue.push_back(sequences[i]);
      }
    }
    ASSERT_GT(steps, 50);
    EXPECT_LT(changes, steps / 10) << "of " << steps << " steps";
  }
}

// Whatever the state: a decision names each sequence once, ready ones only, within the step's and the engine's limits,
// decoding ones first and all of them, and lowers precision only where that is predicted to be faster.
RC_GTEST_PROP(SloPolicy, DecisionsAreSound, ()) {
  static const StepModel fitted = model().at_shares(std::vector<double>{0.5, 0.88, 1.0});
  const auto missed =
      *rc::gen::element(SloOptions::Missed::kLast, SloOptions::Missed::kShed, SloOptions::Missed::kAsTheyCome);
  const auto policy = slo_with_levels({.missed = missed, .exact_decode = *rc::gen::arbitrary<bool>()});
  const double now = 1000;
  const auto in = [](double low, double high) { return low + (high - low) * *rc::gen::inRange(0, 1001) / 1000.0; };
  const int most_exact = *rc::gen::element(1, 3, 20);  // none, some, nearly all
  for (int step = 0; step < 3; ++step) {
    std::vector<SequenceState> sequences;
    const int running = *rc::gen::inRange(0, 12), waiting = *rc::gen::inRange(0, 12);
    for (int i = 0; i < running + waiting; ++i) {
      SequenceState s = prompt(*rc::gen::inRange(1, 5000), now - in(0, 40), in(0.001, 5), in(0.001, 0.2));
      s.running = s.started = i < running;
      s.ready = *rc::gen::inRange(0, 5) > 0;
      s.priority = *rc::gen::inRange(-2, 3);
      s.exact = *rc::gen::inRange(0, most_exact) > 1;
      if (s.running && *rc::gen::arbitrary<bool>()) {
        s.context = *rc::gen::inRange(1, 5000);
        s.missing = 1;
        s.emitted = 1;
        s.due_s = now + in(-5, 5);
      }
      sequences.push_back(s);
    }
    StepState state = state_of(sequences, now);
    state.max_step_tokens = *rc::gen::element(16, 256, 2048);
    state.max_sequences = *rc::gen::element(12, 16, 64);
    state.free_tokens = *rc::gen::element(0, 500, 100000);
    const StepDecision decision = policy->decide(state);

    std::set<size_t> seen;
    int32_t tokens = 0, admitted = running;
    StepWork work;
    bool prompts_began = false;
    for (const StepChunk& chunk : decision.chunks) {
      RC_ASSERT(chunk.sequence < sequences.size());
      const SequenceState& s = sequences[chunk.sequence];
      RC_ASSERT(seen.insert(chunk.sequence).second);
      RC_ASSERT(s.ready);
      RC_ASSERT(chunk.tokens >= 1 && chunk.tokens <= s.missing);
      const bool decodes = s.running && s.missing == 1 && s.emitted > 0;
      RC_ASSERT(!(decodes && prompts_began));
      RC_ASSERT(!s.exact || is_exact(decision.precision) || (decision.exact_singles && chunk.tokens == 1));
      prompts_began = prompts_began || !decodes;
      admitted += s.running ? 0 : 1;
      tokens += chunk.tokens;
      work.add(chunk.tokens, s.context);
    }
    // Exact requests and others may take turns.
    std::set<size_t> next;
    const bool some_exact = std::any_of(sequences.begin(), sequences.end(), [](const auto& s) { return s.exact; });
    if (some_exact) {
      for (const StepChunk& chunk : policy->decide(state).chunks) next.insert(chunk.sequence);
    }
    RC_ASSERT(tokens <= state.max_step_tokens);
    RC_ASSERT(admitted <= std::max(state.max_sequences, running));
    for (size_t i = 0; i < sequences.size() && tokens < state.max_step_tokens; ++i) {
      const SequenceState& s = sequences[i];
      const bool decodes = s.running && s.ready && s.missing == 1 && s.emitted > 0;
      RC_ASSERT(!decodes || seen.contains(i) || next.contains(i));
    }
    const size_t level = fitted.find_level(decision.precision, decision.fp8_share);
    RC_ASSERT(level < fitted.levels().size());
    work.apart = decision.exact_singles;
    for (size_t lower = 0; lower < level; ++lower) {
      StepWork other = work;
      other.apart = false;
      if (decision.chunks.empty()) break;
      RC_ASSERT(fitted.seconds(level, work) < fitted.seconds(lower, other));
    }
    if (decision.exact_singles) RC_ASSERT(level > 0);
    for (const size_t gone : decision.shed) {
      RC_ASSERT(missed == SloOptions::Missed::kShed && !seen.contains(gone) && !sequences[gone].running);
    }
    if (!decision.chunks.empty()) RC_ASSERT(decision.predicted_s > 0);
    for (const size_t lost : decision.lost) RC_ASSERT(lost < sequences.size());
  }
}

// As many as no sort keeps in their places by itself.
TEST(SloPolicy, EqualPromptsGoInTheirOrder) {
  for (const double arrival : {0.0, -15.0}) {  // in time, and lost
    const std::vector<SequenceState> sequences(60, prompt(30, arrival, 1));
    const StepDecision decision = slo()->decide(state_of(sequences, 0.001));
    EXPECT_EQ(decision.lost.empty(), arrival == 0);
    ASSERT_GT(decision.chunks.size(), 40u);
    for (size_t i = 0; i < decision.chunks.size(); ++i) EXPECT_EQ(decision.chunks[i].sequence, i);
  }
}

// Of those that can be in time no more, whoever finds room starts in order of priority and length.
TEST(SloPolicy, WhatIsLostStartsByLengthAsFarAsThereIsRoom) {
  size_t started = 0, passed_over = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
    std::vector<SequenceState> sequences;
    const int32_t running = draw(4), waiting = 1 + draw(200), levels = 1 + draw(3);
    for (int32_t i = 0; i < running + waiting; ++i) {
      SequenceState s = prompt(1 + draw(draw(2) == 0 ? 20 : 400), -12 - 0.5 * draw(10), 0.1);
      s.running = s.started = i < running;
      s.context = 16 * draw(20);
      s.priority = draw(levels);
      sequences.push_back(s);
    }
    StepState state = state_of(sequences, 0);
    state.max_sequences = draw(2) == 0 ? 64 : running + draw(8);
    state.free_tokens = draw(6000);
    const StepDecision decision = slo()->decide(state);
    ASSERT_EQ(decision.lost.size(), sequences.size());

    std::vector<size_t> order(sequences.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const SequenceState &one = sequences[a], &other = sequences[b];
      return std::tuple(one.priority, one.missing, one.arrival_s) <
             std::tuple(other.priority, other.missing, other.arrival_s);
    });
    int64_t room = state.free_tokens;
    for (int32_t i = 0; i < running; ++i) room -= sequences[static_cast<size_t>(i)].missing;
    int32_t places = running;
    size_t next = 0;
    for (const size_t i : order) {
      const SequenceState& s = sequences[i];
      const bool fits = s.context + s.missing <= room || places == 0;
      if (!s.running && (places >= state.max_sequences || !fits)) {
        passed_over += next < decision.chunks.size() ? 1 : 0;
        continue;
      }
      if (next == decision.chunks.size()) break;  // the step is full
      ASSERT_EQ(decision.chunks[next++].sequence, i);
      if (s.running) continue;
      room -= s.context + s.missing;
      ++places;
      ++started;
    }
    ASSERT_EQ(next, decision.chunks.size());
  }
  EXPECT_GT(started, 1000u);
  EXPECT_GT(passed_over, 1000u);
}

}  // namespace
}  // namespace nfp
