// Predicted step times through the C interface against the C++ model that they come from.
#include "policy/step_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/atomic_file.h"
#include "base/testing/scratch_folder.h"
#include "nestedfp.h"
#include "policy/testing/step_tables.h"

namespace {

class CApiStepModel : public ::testing::Test {
 protected:
  void SetUp() override {
    // A share that is no power of two, so that the name has to be rounded.
    nfp::StepTable table = nfp::testing::synthetic_table();
    table.levels.push_back({nfp::Precision::kFp8W8A8, 1.0 / 3});
    for (size_t i = 0, count = table.steps.size(); i < count; ++i) {
      nfp::StepTime step = table.steps[i];
      if (step.level != 1) continue;
      step.level = 2;
      step.ms *= 1.2;
      table.steps.push_back(step);
    }
    ASSERT_TRUE(nfp::write_file(file_, nfp::to_json_text(table)).ok());
    expected_ = std::make_unique<nfp::StepModel>(std::move(nfp::StepModel::fit(table)).value());
    ASSERT_EQ(nfp_step_model_load(file_.c_str(), &model_), NFP_OK) << nfp_last_error();
  }
  void TearDown() override { nfp_step_model_destroy(model_); }

  double seconds(int32_t level, const std::vector<int32_t>& tokens, const std::vector<int32_t>& contexts,
                 bool exact_singles = false) const {
    const nfp_step_work work = {sizeof(nfp_step_work), static_cast<int32_t>(tokens.size()), exact_singles ? 1 : 0,
                                tokens.data(), contexts.data()};
    double found = -1;
    EXPECT_EQ(nfp_step_model_seconds(model_, level, &work, &found), NFP_OK) << nfp_last_error();
    return found;
  }

  const nfp::testing::ScratchFolder scratch_;
  const std::string file_ = scratch_.path() + "/steps.json";
  nfp_step_model* model_ = nullptr;
  std::unique_ptr<nfp::StepModel> expected_;
};

TEST_F(CApiStepModel, NamesItsLevels) {
  ASSERT_EQ(nfp_step_model_levels(model_), 3);
  for (int32_t i = 0; i < 3; ++i) {
    nfp_step_level level{};
    level.size = sizeof(level);
    ASSERT_EQ(nfp_step_model_level(model_, i, &level), NFP_OK);
    const nfp::StepLevel& known = expected_->levels()[static_cast<size_t>(i)];
    EXPECT_EQ(std::string(level.name), known.name());
    EXPECT_EQ(level.precision, i == 0 ? NFP_PRECISION_FP16 : NFP_PRECISION_FP8);
    EXPECT_EQ(level.fp8_share, known.fp8_share);
  }
}

TEST_F(CApiStepModel, PredictsWhatTheModelBehindItDoes) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int32_t> tokens, contexts;
    nfp::StepWork work;
    for (int s = 1 + static_cast<int>(random() % 40); s > 0; --s) {
      tokens.push_back(random() % 3 == 0 ? 2 + static_cast<int32_t>(random() % 300) : 1);
      contexts.push_back(static_cast<int32_t>(random() % 5000));
      work.add(tokens.back(), contexts.back());
    }
    for (size_t level = 0; level < 3; ++level) {
      for (const bool apart : {false, true}) {
        work.apart = apart;
        EXPECT_EQ(seconds(static_cast<int32_t>(level), tokens, contexts, apart), expected_->seconds(level, work));
      }
    }
  }
  EXPECT_GT(seconds(0, {1}, {100}), seconds(1, {1}, {100}));
}

TEST_F(CApiStepModel, IsAskedByManyThreads) {
  const double expected = seconds(1, {1, 300}, {900, 0});
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 500; ++n) EXPECT_EQ(seconds(1, {1, 300}, {900, 0}), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CApiStepModel, RefusesWrongArgumentsByName) {
  const std::vector<int32_t> ones = {1, 1}, zeros = {0, 0}, below = {0, -1}, many = {1, INT32_MAX};
  double found = 0;
  const auto refused = [&](int32_t level, int32_t sequences, const int32_t* tokens, const int32_t* contexts,
                           const std::string& message) {
    const nfp_step_work work = {sizeof(nfp_step_work), sequences, 0, tokens, contexts};
    EXPECT_EQ(nfp_step_model_seconds(model_, level, &work, &found), NFP_USAGE);
    EXPECT_NE(std::string(nfp_last_error()).find(message), std::string::npos) << nfp_last_error();
  };
  refused(3, 2, ones.data(), zeros.data(), "level 3: the table has 3");
  refused(-1, 2, ones.data(), zeros.data(), "level -1");
  refused(0, 0, ones.data(), zeros.data(), "sequences");
  refused(0, 2, nullptr, zeros.data(), "tokens");
  refused(0, 2, zeros.data(), zeros.data(), "tokens[0] is 0");
  refused(0, 2, many.data(), zeros.data(), "tokens[1] is 2147483647");
  refused(0, 2, ones.data(), below.data(), "contexts[1] is -1");
  nfp_step_work work = {8, 2, 0, ones.data(), zeros.data()};
  EXPECT_EQ(nfp_step_model_seconds(model_, 0, &work, &found), NFP_USAGE) << "of a caller that knows less";
  EXPECT_EQ(nfp_step_model_seconds(nullptr, 0, &work, &found), NFP_USAGE);
  nfp_step_level level{};
  EXPECT_EQ(nfp_step_model_level(model_, 0, &level), NFP_USAGE);
  EXPECT_EQ(nfp_step_model_levels(nullptr), 0);
  EXPECT_EQ(nfp_step_model_load(nullptr, &model_), NFP_USAGE);
  nfp_step_model_destroy(nullptr);
}

TEST_F(CApiStepModel, RefusesFilesThatAreNoTable) {
  nfp_step_model* none = nullptr;
  EXPECT_EQ(nfp_step_model_load((scratch_.path() + "/nowhere.json").c_str(), &none), NFP_NOT_FOUND);
  EXPECT_NE(std::string(nfp_last_error()).find("nowhere.json"), std::string::npos) << nfp_last_error();
  const std::string bad = scratch_.path() + "/bad.json";
  for (const char* text : {"", "[1]", R"({"format": "nestedfp-step-times", "version": 2})"}) {
    ASSERT_TRUE(nfp::write_file(bad, text).ok());
    EXPECT_EQ(nfp_step_model_load(bad.c_str(), &none), NFP_INVALID_INPUT) << text;
    EXPECT_NE(std::string(nfp_last_error()).find("bad.json"), std::string::npos) << nfp_last_error();
  }
  nfp::StepTable few = nfp::testing::synthetic_table();
  few.steps.resize(1);
  ASSERT_TRUE(nfp::write_file(bad, nfp::to_json_text(few)).ok());
  EXPECT_EQ(nfp_step_model_load(bad.c_str(), &none), NFP_INVALID_INPUT) << "too small to fit";
  EXPECT_NE(std::string(nfp_last_error()).find("bad.json"), std::string::npos) << nfp_last_error();
  EXPECT_EQ(none, nullptr);
}

}  // namespace
