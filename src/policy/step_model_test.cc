#include "policy/step_model.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "policy/testing/step_tables.h"

namespace nfp {
namespace {

using testing::synthetic_ms;
using testing::synthetic_table;

TEST(StepModel, PredictsStepsThatItHasNotSeen) {
  const auto model = StepModel::fit(synthetic_table());
  ASSERT_TRUE(model.ok()) << model.error().message;
  std::vector<StepTime> unseen;
  for (const size_t level : {0, 1}) {
    for (const int32_t tokens : {24, 100, 300, 700, 1500}) {
      for (const int32_t context : {0, 512, 3000}) unseen.push_back({level, tokens, context});
    }
    for (const int32_t sequences : {2, 5, 12, 40}) {
      for (const int32_t context : {200, 900}) unseen.push_back({level, 0, 0, sequences, context});
      unseen.push_back({level, 200, 0, sequences, 600});
    }
  }
  for (StepTime& step : unseen) step.ms = synthetic_ms(step);
  const StepModel::FitError error = model->error_on(unseen);
  EXPECT_LE(error.mean, 0.05);
  EXPECT_LE(error.p95, 0.12);
}

// Keys and values are read, and on a CPU widened, once for a chunk however few its tokens are.
TEST(StepModel, KnowsThatAShortChunkBehindALongContextReadsAllOfIt) {
  const auto slower = [](StepTime step) {
    const double chunk_keys = step.prefill_tokens > 0 ? step.prefill_context + step.prefill_tokens : 0;
    step.ms =
        synthetic_ms(step) + 2e-3 * (chunk_keys + static_cast<double>(step.decode_sequences) * step.decode_context);
    return step;
  };
  StepTable table = synthetic_table();
  for (StepTime& step : table.steps) step = slower(step);
  const StepModel model = std::move(StepModel::fit(table)).value();
  std::vector<StepTime> unseen;
  for (const int32_t tokens : {20, 40, 90, 1500}) {
    for (const int32_t context : {0, 700, 3800}) unseen.push_back(slower({0, tokens, context}));
  }
  const StepModel::FitError error = model.error_on(unseen);
  EXPECT_LE(error.mean, 0.02);
  EXPECT_LE(error.worst, 0.06);
}

// What a step does only grows, so its time never falls. rapidcheck draws the steps.
RC_GTEST_PROP(StepModel, NeverFallsWhenAStepGrows, ()) {
  static const StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  const auto level = *rc::gen::element<size_t>(0, 1);
  StepWork work;
  for (int i = *rc::gen::inRange(0, 20); i > 0; --i) work.add(1, *rc::gen::inRange(0, 4000));
  if (*rc::gen::arbitrary<bool>()) work.add(*rc::gen::inRange(2, 4000), *rc::gen::inRange(0, 4000));
  StepWork more = work;
  more.add(*rc::gen::inRange(1, 500), *rc::gen::inRange(0, 4000));
  RC_ASSERT(model.seconds(level, more) >= model.seconds(level, work));
  RC_ASSERT(model.seconds(level, work) >= 0);
}

TEST(StepModel, LargestChunkIsWithinTheLimit) {
  const StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  StepWork decodes;
  for (int i = 0; i < 8; ++i) decodes.add(1, 300);
  for (const double limit : {0.008, 0.02, 0.05, 0.2}) {
    for (const int32_t context : {0, 2000}) {
      const int32_t chunk = model.largest_chunk(0, decodes, context, 2048, limit);
      StepWork both = decodes;
      if (chunk > 0) both.add(chunk, context);
      if (chunk > 0) {
        EXPECT_LE(model.seconds(0, both), limit);
      }
      StepWork larger = decodes;
      larger.add(chunk + std::max(2, chunk / 16), context);
      if (chunk < 2048) {
        EXPECT_GT(model.seconds(0, larger), limit) << chunk;
      }
    }
  }
  EXPECT_EQ(model.largest_chunk(0, decodes, 0, 0, 10), 0);
}

TEST(StepModel, LearnsThatTheMachineIsSlower) {
  StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  StepWork work;
  work.add(256, 0);
  const double truth = 1.5 * model.seconds(0, work);
  for (int i = 0; i < 200; ++i) model.observe(0, work, truth);
  EXPECT_NEAR(model.seconds(0, work), truth, 0.03 * truth);
  // The machine is slower for the level that did not run, too.
  EXPECT_GT(model.seconds(1, work), 1.1 * model.table_seconds(1, work));
  EXPECT_EQ(model.recent_error().steps, 200u);
  EXPECT_LT(model.recent_error().mean, 0.34);
}

TEST(StepModel, LearnsWhatAttentionCosts) {
  // Attention of prompts takes 1.6 times what the table says, and all else what it says: steps at several contexts
  // tell.
  StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  const auto work = [](int32_t tokens, int32_t context) {
    StepWork step;
    step.add(tokens, context);
    return step;
  };
  const auto truth = [&](const StepWork& step) {
    StepWork without = step;
    without.prefill_pairs = 0;
    const double rest = model.table_seconds(0, without);
    return rest + 1.6 * (model.table_seconds(0, step) - rest);
  };
  for (int i = 0; i < 600; ++i) {
    const StepWork step = work(i % 2 == 0 ? 32 : 512, i % 3 * 3000);
    model.observe(0, step, truth(step));
  }
  for (const int32_t context : {0, 3000, 6000}) {
    const StepWork step = work(512, context);
    EXPECT_NEAR(model.seconds(0, step), truth(step), 0.06 * truth(step)) << context;
  }
}

TEST(StepModel, TwoLaunchesTakeWhatEachTakes) {
  const StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  StepWork singles, chunk, both;
  for (int i = 0; i < 8; ++i) singles.add(1, 300), both.add(1, 300);
  chunk.add(500, 100);
  both.add(500, 100);
  both.apart = true;
  EXPECT_NEAR(model.seconds(1, both), model.seconds(0, singles) + model.seconds(1, chunk), 1e-12);
  EXPECT_GT(model.seconds(1, both), model.seconds(1, chunk));
  singles.apart = true;  // nothing to part
  EXPECT_LT(model.seconds(1, singles), model.seconds(0, singles));
}

TEST(StepModel, OutliersAndNonsenseMoveItLittle) {
  StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  StepWork work;
  work.add(256, 0);
  for (uint64_t i = 0; i < StepModel::kFirstSteps; ++i) model.observe(0, work, model.table_seconds(0, work));
  const double before = model.seconds(0, work);
  model.observe(0, work, 1e6);
  EXPECT_LE(model.seconds(0, work), 1.031 * before);
  for (const double wrong : {0.0, -1.0, std::nan(""), HUGE_VAL}) model.observe(0, work, wrong);
  model.observe(7, work, 1.0);
  EXPECT_LE(model.seconds(0, work), 1.031 * before);
  for (int i = 0; i < 10000; ++i) model.observe(0, work, 1e6);
  EXPECT_LE(model.seconds(0, work), StepModel::kMostDrift * before * 1.001);
  for (int i = 0; i < 10000; ++i) model.observe(0, work, 1e-9);
  EXPECT_GE(model.seconds(0, work), before / StepModel::kMostDrift * 0.999);
}

TEST(StepModel, FollowsAMachineThatIsSuddenlyBusy) {
  StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  StepWork work;
  work.add(64, 0);
  const double quiet = model.table_seconds(0, work);
  for (int i = 0; i < 100; ++i) model.observe(0, work, quiet);
  constexpr size_t kFew = StepModel::kLasts / 2;
  for (size_t i = 0; i < kFew; ++i) model.observe(0, work, 8 * quiet);
  EXPECT_LE(model.seconds(0, work), std::pow(1.031, kFew) * quiet);  // so far they may be outliers
  for (int i = 0; i < 12; ++i) model.observe(0, work, 8 * quiet);
  EXPECT_NEAR(model.seconds(0, work), 8 * quiet, 0.25 * 8 * quiet);
  for (size_t i = 0; i < 12 + kFew; ++i) model.observe(0, work, quiet);
  EXPECT_NEAR(model.seconds(0, work), quiet, 0.3 * quiet);
}

TEST(StepModel, AStepThatWasMeasuredWronglyMovesNothing) {
  // Of two steps in flight, the first collected late: it seems to have taken all the time, and the next one none.
  for (const size_t at : {0u, 1u, 5u, 20u}) {
    StepModel model = std::move(StepModel::fit(synthetic_table())).value();
    StepWork work;
    work.add(250, 1500);
    const double truth = 1.04 * model.table_seconds(0, work);
    for (size_t i = 0; i <= at; ++i) {
      const double wrong = i + 1 == at ? 1.9 : i == at ? 0.1 : 1.0;
      model.observe(0, work, wrong * truth);
    }
    EXPECT_NEAR(model.seconds(0, work), truth, 0.05 * truth) << at;
  }
}

TEST(StepModel, SoonKnowsThatTheTableIsOfAnotherMachine) {
  for (const double factor : {300.0, 0.003}) {
    StepModel model = std::move(StepModel::fit(synthetic_table())).value();
    StepWork work;
    work.add(64, 0);
    for (int i = 0; i < 40; ++i) model.observe(0, work, factor * model.table_seconds(0, work));
    EXPECT_NEAR(model.seconds(0, work) / model.table_seconds(0, work), factor, 0.05 * factor);
  }
}

TEST(StepModel, SharesThatWereNotMeasuredAreBetweenThoseThatWere) {
  const StepModel model = std::move(StepModel::fit(synthetic_table())).value();
  const StepModel levels = model.at_shares(std::vector<double>{0.25, 0.5, 1.0});
  ASSERT_EQ(levels.levels().size(), 4u);
  EXPECT_EQ(levels.levels()[2].name(), "fp8-w8a8@0.50");
  for (const int32_t tokens : {1, 30, 500, 3000}) {
    StepWork work;
    work.add(tokens, 700);
    const double exact = model.seconds(0, work), fp8 = model.seconds(1, work);
    EXPECT_DOUBLE_EQ(levels.seconds(0, work), exact);
    EXPECT_NEAR(levels.seconds(1, work), exact + 0.25 * (fp8 - exact), 1e-9);
    EXPECT_NEAR(levels.seconds(2, work), exact + 0.5 * (fp8 - exact), 1e-9);
    EXPECT_DOUBLE_EQ(levels.seconds(3, work), fp8);
  }
  // What was measured is taken as it is, and beyond it nothing is known.
  StepTable table = synthetic_table();
  table.levels[1].fp8_share = 0.5;
  const StepModel half = std::move(StepModel::fit(table)).value().at_shares(std::vector<double>{0.5, 1.0});
  ASSERT_EQ(half.levels().size(), 2u);
  EXPECT_EQ(half.levels()[1].fp8_share, 0.5);
}

// A level's steps are not another's, however little lies between them.
TEST(StepModel, LevelsMayBeCloseTogether) {
  const StepModel fitted = std::move(StepModel::fit(synthetic_table())).value();
  const StepModel levels = fitted.at_shares(std::vector<double>{0.5, 0.503, 0.995, 1.0});
  for (size_t i = 0; i < levels.levels().size(); ++i) {
    EXPECT_EQ(levels.find_level(levels.levels()[i].precision, levels.levels()[i].fp8_share), i);
  }
  const Precision fp8 = levels.levels()[1].precision;
  EXPECT_EQ(levels.find_level(fp8, 0.7), 3u);
  EXPECT_EQ(levels.find_level(fp8, 0.2), 1u);
}

TEST(StepModel, RefusesATableWithoutSteps) {
  StepTable table = synthetic_table();
  std::erase_if(table.steps, [](const StepTime& step) { return step.level == 1; });
  const auto model = StepModel::fit(table);
  ASSERT_FALSE(model.ok());
  EXPECT_NE(model.error().message.find("fp8-w8a8"), std::string::npos);
}

}  // namespace
}  // namespace nfp
