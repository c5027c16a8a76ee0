#include "policy/draft_length.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace nfp {
namespace {

// A machine: seconds of a plain step, of an FP8 step, and of one that verifies so many tokens.
struct Machine {
  double fp16_s = 10, fp8_s = 6, verified_s = 0.1;
  double acceptance = 0.95;
  double round_s(int32_t sequences, int32_t drafts) const {
    return drafts * fp8_s + fp16_s + sequences * drafts * verified_s;
  }
};

struct Outcome {
  double seconds = 0;
  int64_t tokens = 0, plains = 0, drafts = 0, rounds = 0;
};

Outcome play(DraftLength& length, const Machine& machine, int32_t sequences, int32_t most, int steps,
             uint32_t seed = 7) {
  std::mt19937 random(seed);
  std::bernoulli_distribution right(machine.acceptance);
  Outcome run;
  for (int i = 0; i < steps; ++i) {
    const int32_t drafts = length.choose(sequences, sequences, most);
    EXPECT_GE(drafts, 0);
    EXPECT_LE(drafts, most);
    if (drafts == 0) {
      length.plain(sequences, machine.fp16_s);
      run.seconds += machine.fp16_s;
      run.tokens += sequences;
      ++run.plains;
      continue;
    }
    int32_t tried = 0, accepted = 0;
    for (int32_t s = 0; s < sequences; ++s) {
      for (int32_t d = 0; d < drafts; ++d) {
        ++tried;
        if (!right(random)) break;
        ++accepted;
      }
    }
    const double seconds = machine.round_s(sequences, drafts);
    length.drafted(sequences, drafts, tried, accepted, seconds);
    run.seconds += seconds;
    run.tokens += sequences + accepted;
    run.drafts += drafts;
    ++run.rounds;
  }
  return run;
}

TEST(DraftLength, OffDraftsNothing) {
  DraftLength length(0);
  EXPECT_FALSE(length.on());
  for (int i = 0; i < 10; ++i) length.plain(1, 1.0);
  EXPECT_EQ(length.choose(1, 1, 8), 0);
}

TEST(DraftLength, MeasuresPlainStepsFirst) {
  DraftLength length(4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(length.choose(1, 1, 4), 0) << i;
    length.plain(1, 1.0);
  }
  EXPECT_GT(length.choose(1, 1, 4), 0);
  EXPECT_EQ(length.choose(64, 64, 4), 0) << "another size of batch has a time of its own";
}

TEST(DraftLength, ComesNearTheBestLength) {
  for (const double acceptance : {0.7, 0.9, 0.97}) {
    Machine machine;
    machine.acceptance = acceptance;
    double best = 1 / machine.fp16_s;
    for (int32_t d = 1; d <= 8; ++d) {
      double tokens = 1, all = 1;
      for (int32_t i = 0; i < d; ++i) tokens += all *= acceptance;
      best = std::max(best, tokens / machine.round_s(1, d));
    }
    DraftLength length(8);
    play(length, machine, 1, 8, 500);
    const Outcome run = play(length, machine, 1, 8, 4000, 8);
    EXPECT_GT(static_cast<double>(run.tokens) / run.seconds, 0.95 * best) << acceptance;
    EXPECT_NEAR(length.acceptance(), acceptance, 0.1);
  }
}

TEST(DraftLength, StopsWhereItGainsNothingAndLooksAgainNowAndThen) {
  Machine machine;
  machine.acceptance = 0.1;
  DraftLength length(4);
  EXPECT_LT(play(length, machine, 2, 4, 500).drafts, 40) << "a few wrong drafts tell";
  play(length, machine, 2, 4, 2000);
  const Outcome run = play(length, machine, 2, 4, 2000, 8);
  EXPECT_LT(run.rounds, 2000 / 100);
  EXPECT_GT(run.rounds, 2000 / 300);
  machine.acceptance = 0.98;  // another text
  play(length, machine, 2, 4, 1000, 9);
  EXPECT_GT(length.choose(2, 2, 4), 0);
}

TEST(DraftLength, VerificationOfManyTokensThatCostsTooMuchIsLeft) {
  Machine machine;
  machine.verified_s = 0.5;  // of 32 sequences each draft takes 16 s more
  DraftLength length(4);
  play(length, machine, 32, 4, 500);
  EXPECT_LT(play(length, machine, 32, 4, 2000, 8).rounds, 2000 / 20);
  play(length, machine, 1, 4, 500);
  EXPECT_GT(play(length, machine, 1, 4, 2000, 8).rounds, 2000 / 2) << "one sequence gains all the same";
}

TEST(DraftLength, ThoseThatMayNotDraftGainNothing) {
  Machine machine;
  DraftLength length(4);
  play(length, machine, 8, 4, 500);
  int32_t all = 0, few = 0;
  for (int i = 0; i < 8; ++i) {
    all = length.choose(8, 8, 4);
    few = length.choose(8, 1, 4);
    length.plain(8, machine.fp16_s);
  }
  EXPECT_GT(all, 0);
  EXPECT_EQ(few, 0) << "seven wait for one's drafts";
}

// However many drafts a step tells of.
TEST(DraftLength, AcceptanceIsTheShareThatWasRight) {
  for (const int32_t sequences : {1, 8, 64}) {
    DraftLength length(4, true);
    play(length, Machine{.acceptance = 0.9}, sequences, 4, 500);
    EXPECT_NEAR(length.acceptance(), 0.9, 0.06) << sequences;
  }
}

TEST(DraftLength, StepsThatLoadAndCaptureTellNothing) {
  DraftLength length(4);
  for (const double seconds : {30.0, 200.0, 10.0, 10.0}) length.plain(1, seconds);
  for (const double seconds : {90.0, 300.0, 36.0}) length.drafted(1, 2, 2, 2, seconds);
  EXPECT_EQ(length.choose(1, 1, 2), 0) << "3 tokens in the time of 3.6";
}

TEST(DraftLength, AStepThatWasHeldUpChangesLittle) {
  Machine machine;
  DraftLength length(1);
  play(length, machine, 1, 1, 60);
  ASSERT_EQ(length.choose(1, 1, 1), 1);
  length.drafted(1, 1, 1, 1, 100 * machine.round_s(1, 1));
  EXPECT_EQ(length.choose(1, 1, 1), 1);
}

TEST(DraftLength, MeasuresPlainStepsAgain) {
  Machine machine;
  DraftLength length(4);
  play(length, machine, 1, 4, 200);
  EXPECT_GT(play(length, machine, 1, 4, 1000).plains, 1000 / 80);
  machine.fp8_s = 12;  // FP8 is no faster any more
  play(length, machine, 1, 4, 500);
  EXPECT_LT(play(length, machine, 1, 4, 1000).rounds, 1000 / 20);
}

}  // namespace
}  // namespace nfp
