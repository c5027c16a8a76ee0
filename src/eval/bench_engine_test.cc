#include "eval/bench_engine.h"

#include <gtest/gtest.h>

#include "eval/device_limits.h"

namespace nfp {
namespace {

TEST(BenchStatistics, OfFewAndOfNone) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 9, 2}), 3);
  EXPECT_EQ(median({7, 5}), 6);
  EXPECT_EQ(percentile({}, 0.99), 0);
  EXPECT_EQ(percentile({5}, 0.99), 5);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 0.5), 2);
  std::vector<double> hundred;
  for (int i = 100; i >= 1; --i) hundred.push_back(i);
  EXPECT_EQ(percentile(hundred, 0.99), 99);
  EXPECT_EQ(percentile(hundred, 1), 100);
  EXPECT_EQ(mean(hundred), 50.5);
}

TEST(BenchStatistics, DecodeStepsAreWholeAndPure) {
  std::vector<StepRecord> steps(4);
  steps[0].sequences = steps[0].prefill_tokens = 2;
  steps[1].sequences = 2;
  steps[1].seconds = 1;
  steps[2].sequences = 2;
  steps[2].seconds = 3;
  steps[3].sequences = 1;
  EXPECT_EQ(step_seconds(decode_steps(steps, 2)), (std::vector<double>{1, 3}));
}

TEST(BenchStatistics, AStepThatWasDoneIsLate) {
  std::vector<StepRecord> steps(4);
  for (StepRecord& step : steps) step.wait_s = 1e-3;
  steps[3].wait_s = 1e-6;
  steps[0].submit_s = steps[1].submit_s = steps[2].submit_s = 2e-6;
  const HostTimes times = host_times(steps);
  EXPECT_DOUBLE_EQ(times.late_share, 0.25);
  EXPECT_DOUBLE_EQ(times.submit_us, 2);
  EXPECT_EQ(host_times({}).late_share, 0);
}

TEST(DeviceLimits, TheSlowerOfReadingAndComputing) {
  const auto h200 = data_sheet_limits("NVIDIA H200, 140 GiB");
  ASSERT_TRUE(h200);
  EXPECT_DOUBLE_EQ(h200->least_seconds(4.8e12, 1, Precision::kFp16), 1);
  EXPECT_DOUBLE_EQ(h200->least_seconds(1, 1979e12, Precision::kFp8W8A8), 1);
  EXPECT_DOUBLE_EQ(h200->least_seconds(1, 1979e12, Precision::kFp16), 2);
  EXPECT_DOUBLE_EQ(h200->least_seconds(1, 1979e12, Precision::kFp8), 2);
  EXPECT_FALSE(data_sheet_limits("Intel(R) Xeon(R) Processor"));
}

}  // namespace
}  // namespace nfp
