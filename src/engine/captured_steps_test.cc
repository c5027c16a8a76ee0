#include "engine/captured_steps.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

class SizedGraph final : public Graph {
 public:
  explicit SizedGraph(size_t bytes) : bytes_(bytes) {}
  size_t bytes() const override { return bytes_; }

 private:
  size_t bytes_;
};

StepShape shape(int32_t sequences) {
  StepShape s;
  s.tokens = s.sequences = s.single = s.rows = sequences;
  return s;
}

TEST(CapturedSteps, AShapeIsNewOnce) {
  CapturedSteps steps(100);
  EXPECT_TRUE(steps.first(shape(1)));
  EXPECT_FALSE(steps.first(shape(1)));
  EXPECT_EQ(steps.find(shape(1)), nullptr);
  EXPECT_EQ(steps.find(shape(2)), nullptr);
  EXPECT_TRUE(steps.first(shape(2)));
}

TEST(CapturedSteps, ThoseUsedLongestAgoMakeRoom) {
  CapturedSteps steps(100);
  for (int32_t n = 1; n <= 3; ++n) steps.keep(shape(n), std::make_unique<SizedGraph>(30));
  EXPECT_EQ(steps.bytes(), 90u);
  EXPECT_NE(steps.find(shape(1)), nullptr);  // 2 is now the oldest
  Graph& fourth = steps.keep(shape(4), std::make_unique<SizedGraph>(30));
  EXPECT_EQ(steps.find(shape(4)), &fourth);
  EXPECT_EQ(steps.find(shape(2)), nullptr);
  EXPECT_NE(steps.find(shape(1)), nullptr);
  EXPECT_NE(steps.find(shape(3)), nullptr);
  EXPECT_EQ(steps.count(), 3u);
  EXPECT_EQ(steps.bytes(), 90u);
  EXPECT_FALSE(steps.first(shape(2)));  // it may be captured again at once
  steps.keep(shape(2), std::make_unique<SizedGraph>(30));
  EXPECT_NE(steps.find(shape(2)), nullptr);
}

TEST(CapturedSteps, OneLargerThanTheBudgetStaysAlone) {
  CapturedSteps steps(100);
  steps.keep(shape(1), std::make_unique<SizedGraph>(30));
  steps.keep(shape(2), std::make_unique<SizedGraph>(200));
  EXPECT_EQ(steps.count(), 1u);
  EXPECT_EQ(steps.bytes(), 200u);
  EXPECT_NE(steps.find(shape(2)), nullptr);
  steps.keep(shape(3), std::make_unique<SizedGraph>(1));
  EXPECT_EQ(steps.count(), 1u);
  EXPECT_EQ(steps.bytes(), 1u);
}

}  // namespace
}  // namespace nfp
