#include "eval/start_steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

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

}  // namespace
}  // namespace nfp
