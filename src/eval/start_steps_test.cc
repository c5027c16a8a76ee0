#include "eval/start_steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <utility>
#include <vector>

#include "policy/step_model.h"

namespace nfp {
namespace {

EngineConfig limits_of(int32_t sequences, int32_t step_tokens, int32_t context) {
  EngineConfig engine;
  engine.limits.max_sequences = sequences;
  engine.limits.max_step_tokens = std::max(step_tokens, sequences);  // as ModelRunner has it
  engine.max_context = context;
  return engine;
}

StepTable table_of(const EngineConfig& engine) {
  StepTable table;
  table.max_step_tokens = engine.limits.max_step_tokens;
  table.max_sequences = engine.limits.max_sequences;
  table.levels = {{Precision::kFp16, 0}, {Precision::kFp8, 1}};
  table.steps = start_step_kinds(engine);
  for (StepTime& step : table.steps) {
    step.ms = 1 + 0.01 * step.tokens();
    step.samples = 1;
  }
  return table;
}

TEST(StartSteps, FitTheLimitsAndAreEnoughAndTheirOwnFileIsRead) {
  for (const int32_t sequences : {1, 2, 3, 8, 256}) {
    for (const int32_t step_tokens : {1, 7, 8, 16, 2048}) {
      for (int32_t context = 1; context <= 600; context += context < 150 ? 1 : 37) {
        SCOPED_TRACE(fmt::format("{} sequences, {} tokens, context {}", sequences, step_tokens, context));
        const EngineConfig engine = limits_of(sequences, step_tokens, context);
        const StepTable table = table_of(engine);
        std::array<int, 2> of_level = {};
        for (const StepTime& step : table.steps) {
          ++of_level.at(step.level);
          EXPECT_LE(step.tokens(), engine.limits.max_step_tokens);
          EXPECT_LE(step.sequences(), sequences);
          EXPECT_LE(step.prefill_context + step.prefill_tokens, context);
          EXPECT_LE(step.decode_context, context);
        }
        EXPECT_GE(of_level[0], 2);
        EXPECT_GE(of_level[1], 2);
        const auto read = parse_step_table(to_json_text(table), "kept");
        ASSERT_TRUE(read.ok()) << read.error().message;
        EXPECT_EQ(read->steps, table.steps);
      }
    }
  }
}

// Each level's steps come beside the other's, so what is left out for want of time is left out of both.
TEST(StartSteps, AStepInFp8FollowsTheSameInFp16) {
  for (const int32_t context : {1, 15, 16, 97, 144, 4096}) {
    const std::vector<StepTime> steps = start_step_kinds(limits_of(64, 2048, context));
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].level == 0) continue;
      ASSERT_GT(i, 0u);
      StepTime same = steps[i];
      same.level = 0;
      EXPECT_EQ(steps[i - 1], same) << context;
    }
  }
}

// However little time there is, what prompts take is among what is measured.
TEST(StartSteps, AChunkOfAPromptComesFirst) {
  for (const int32_t context : {16, 97, 4096}) {
    const std::vector<StepTime> steps = start_step_kinds(limits_of(64, 2048, context));
    for (const size_t level : {0, 1}) EXPECT_EQ(steps[level], (StepTime{level, 16})) << context;
  }
}

TEST(StartSteps, TheSmallestLimitsCanBePredicted) {
  for (const int32_t step_tokens : {1, 8}) {
    for (const int32_t context : {1, 2, 15, 16}) {
      const auto model = StepModel::fit(table_of(limits_of(1, step_tokens, context)));
      EXPECT_TRUE(model.ok()) << step_tokens << " " << context;
    }
  }
}

// A machine that takes `base` ms for few tokens at FP16 and, beyond 64, `per_token` more for each; FP8 half of it.
struct Machine {
  double base, per_token;
  double ms(size_t level, const StepWork& work) const {
    const double tokens = std::max(0, work.tokens - 64);
    return (base + per_token * tokens) * (level > 0 ? 0.5 : 1) + 2e-6 * work.prefill_pairs + 2e-5 * work.keys();
  }
};
constexpr Machine kSmallGpu = {4, 0.02}, kLargeGpu = {11, 0.06}, kCpu = {20, 1.5}, kSlowCpu = {600, 60};

std::vector<StepTime> within(const Machine& machine, const std::vector<StepTime>& kinds, double seconds) {
  return start_steps_within(
      kinds, [&](const StepTime& step) { return 4e-3 * machine.ms(0, work_of(step)); }, seconds);
}

TEST(StartSteps, WhatThereIsTimeForKeepsToIt) {
  const std::vector<StepTime> kinds = start_step_kinds(limits_of(64, 8192, 4096));
  for (const Machine& machine : {kSmallGpu, kLargeGpu, kCpu, kSlowCpu}) {
    for (const double seconds : {0.0, 0.1, 0.5, 1.0, 1.3, 2.3, 20.0, 1000.0}) {
      SCOPED_TRACE(fmt::format("{} ms, {} s", machine.base, seconds));
      const std::vector<StepTime> taken = within(machine, kinds, seconds);
      double sum = 0;
      for (const StepTime& step : taken) sum += 4e-3 * machine.ms(0, work_of(step));
      EXPECT_GE(taken.size(), 8u);
      if (taken.size() > 9) {
        EXPECT_LE(sum, seconds);
      }
      for (const size_t level : {0, 1}) EXPECT_EQ(taken[level], (StepTime{level, 16}));
      size_t place = 0;
      for (const StepTime& step : taken) {
        while (place < kinds.size() && !(kinds[place] == step)) ++place;
        ASSERT_LT(place, kinds.size()) << "out of order";
        if (step.level > 0) {
          EXPECT_EQ(kinds[place - 1], taken[static_cast<size_t>(&step - taken.data()) - 1]);
        }
      }
    }
    EXPECT_EQ(within(machine, kinds, 1e6), kinds);
  }
}

// Steps of a server, most of them of kinds that there was no time for.
TEST(StartSteps, WhatThereIsTimeForTellsOfLongPrompts) {
  const std::vector<StepTime> kinds = start_step_kinds(limits_of(64, 8192, 4096));
  std::mt19937 random(5);
  const auto draw = [&](int most) { return static_cast<int32_t>(random() % static_cast<unsigned>(most)); };
  for (const auto& [machine, seconds] : {std::pair(kSmallGpu, 1.2), std::pair(kLargeGpu, 1.2), std::pair(kCpu, 2.3)}) {
    const std::vector<StepTime> taken = within(machine, kinds, seconds);
    StepTable table = table_of(limits_of(64, 8192, 4096));
    table.steps = taken;
    for (StepTime& step : table.steps) step.ms = machine.ms(step.level, work_of(step));
    const auto model = StepModel::fit(table);
    ASSERT_TRUE(model.ok());
    for (int i = 0; i < 2000; ++i) {
      StepWork work;
      const int32_t sequences = draw(64), context = 1 + draw(2000);
      for (int32_t k = 0; k < sequences; ++k) work.add(1, context);
      for (int32_t chunks = 1 + draw(4); chunks > 0; --chunks) work.add(2 + draw(2000), draw(2000));
      for (const size_t level : {0, 1}) {
        const double real = machine.ms(level, work), told = 1e3 * model->seconds(level, work);
        ASSERT_NEAR(told / real, 1, 0.12) << machine.base << " ms, level " << level << ", " << work.tokens
                                          << " tokens, " << work.prefill_pairs << " pairs";
      }
    }
  }
}

}  // namespace
}  // namespace nfp
