#include "policy/policy.h"

#include <gtest/gtest.h>

#include "policy/testing/step_tables.h"

namespace nfp {
namespace {

TEST(Policy, AlwaysIsFixed) {
  for (const auto name : kPrecisionNames) {
    auto policy = parse_policy(name);
    ASSERT_TRUE(policy.ok());
    EXPECT_EQ(name_of((*policy)->choose({})), name);
    EXPECT_TRUE((*policy)->fixed());
    EXPECT_EQ((*policy)->name(), name);
  }
}

TEST(Policy, ThresholdIsOverNTokens) {
  auto policy = parse_policy("threshold:1024", Precision::kFp8W8A8);
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ((*policy)->choose({.step_tokens = 1024}), Precision::kFp16);
  EXPECT_EQ((*policy)->choose({.step_tokens = 1025}), Precision::kFp8W8A8);
  EXPECT_FALSE((*policy)->fixed());
}

TEST(Policy, GradedSharesGrowWithTheStep) {
  auto policy = parse_policy("graded:100:300", Precision::kFp8W8A8);
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ((*policy)->name(), "graded:100:300");
  EXPECT_TRUE((*policy)->needs_sensitivity());
  EXPECT_FALSE((*policy)->fixed());
  EXPECT_EQ((*policy)->choose({.step_tokens = 100}), Precision::kFp16);
  EXPECT_EQ((*policy)->choose({.step_tokens = 101}), Precision::kFp8W8A8);
  EXPECT_DOUBLE_EQ((*policy)->fp8_share({.step_tokens = 150}), 0.25);
  EXPECT_DOUBLE_EQ((*policy)->fp8_share({.step_tokens = 299}), 0.995);
  EXPECT_DOUBLE_EQ((*policy)->fp8_share({.step_tokens = 300}), 1.0);
  EXPECT_DOUBLE_EQ((*policy)->fp8_share({.step_tokens = 5000}), 1.0);
  auto threshold = parse_policy("threshold:10");
  ASSERT_TRUE(threshold.ok());
  EXPECT_DOUBLE_EQ((*threshold)->fp8_share({.step_tokens = 11}), 1.0);
  EXPECT_FALSE((*threshold)->needs_sensitivity());
}

TEST(Policy, AlternatesEveryN) {
  auto policy = parse_policy("alternate:2");
  std::string pattern;
  for (uint64_t i = 0; i < 8; ++i) pattern += is_exact((*policy)->choose({.step_index = i})) ? 'x' : '8';
  EXPECT_EQ(pattern, "xx88xx88");
}

TEST(Policy, StepsOfAFixedOneCanBePredicted) {
  auto policy = parse_policy("fp16");
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ((*policy)->model(), nullptr);
  (*policy)->watch_by(std::move(StepModel::fit(testing::synthetic_table())).value());
  const StepModel* model = (*policy)->model();
  ASSERT_NE(model, nullptr);
  StepWork work;
  work.add(100, 0);
  const double before = model->seconds(0, work);
  for (int i = 0; i < 20; ++i) (*policy)->observe(Precision::kFp16, 0, work, 2 * before);
  EXPECT_NEAR((*policy)->model()->seconds(0, work), 2 * before, 1e-9);
  EXPECT_EQ((*policy)->choose({.step_tokens = 100000}), Precision::kFp16);
}

TEST(Policy, BadNamesAreUsageErrors) {
  for (const char* text :
       {"", "fp4", "threshold", "threshold:", "threshold:x", "threshold:-1", "threshold:99999999999", "alternate:0",
        "slo:1", "threshold:5 ", "graded:5", "graded:5:5", "graded:9:5", "graded::5", "graded:1:2:3"}) {
    auto policy = parse_policy(text);
    ASSERT_FALSE(policy.ok()) << text;
    EXPECT_EQ(policy.error().code, ErrorCode::kUsage);
  }
  // Who refuses shares is not told of them.
  EXPECT_NE(parse_policy("sometimes").error().message.find("graded:LOW:HIGH"), std::string::npos);
  EXPECT_EQ(parse_policy("sometimes", Precision::kFp8, /*shares=*/false).error().message,
            "precision policy 'sometimes' is unknown; use fp16, fp8, fp8-w8a8, threshold:TOKENS or alternate:STEPS");
}

}  // namespace
}  // namespace nfp
