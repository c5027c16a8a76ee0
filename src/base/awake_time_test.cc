#include "base/awake_time.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

using namespace std::chrono_literals;

TEST(AwakeTime, CountsAPauseAsOneLook) {
  const AwakeTime::Clock::time_point start{};
  AwakeTime time(start, 2s);
  EXPECT_EQ(time.at(start + 1s), 1s);
  EXPECT_EQ(time.at(start + 2500ms), 2500ms);
  EXPECT_EQ(time.at(start + 1h), 4500ms);
  EXPECT_EQ(time.at(start + 1h + 1s), 5500ms);
}

}  // namespace
}  // namespace nfp
