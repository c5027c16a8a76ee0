// What the tests of calibration and of smoothing share: a tiny model, a cache in a folder of their own, and logits.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/testing/scratch_test.h"
#include "calibrate/calibrate.h"
#include "eval/sequence_runner.h"
#include "tiny_model.h"

namespace nfp::testing {

// Of every position of a fixed sequence.
inline std::vector<float> logits(Model& model, Precision precision) {
  std::vector<int32_t> tokens(48);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 37 % 251);
  const auto count = static_cast<int32_t>(tokens.size());
  const auto runner = SequenceRunner::create(model, count, count);
  EXPECT_TRUE(runner.ok());
  EXPECT_TRUE((*runner)->feed(tokens, precision).ok());
  std::vector<float> out(tokens.size() * static_cast<size_t>(model.config().vocab));
  EXPECT_TRUE((*runner)->logits(0, count, precision, out.data()).ok());
  return out;
}

class TinyCalibrationTest : public ScratchTest {
 protected:
  explicit TinyCalibrationTest(std::string model) : name_(std::move(model)) {}
  void SetUp() override {
    model_ = tiny_model_folder(name_);
    if (model_.empty()) GTEST_SKIP() << "the tiny models were not made (python3 with numpy makes them)";
  }
  CalibrationOptions options(const std::string& cache, int threads = 2) const {
    CalibrationOptions options;
    options.tokens = 1024;
    options.threads = threads;
    options.cache = path(cache);
    return options;
  }

  const std::string name_;
  std::string model_;
};

}  // namespace nfp::testing
