#include "server/serve/stall_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace nfp::server {
namespace {

TEST(StallWatch, SpeaksOnceWhenTheLimitIsPassed) {
  std::atomic<double> stalled{0};
  std::atomic<int> looked{0}, spoke{0};
  std::promise<double> said;
  const StallWatch watch(
      [&] {
        ++looked;
        return stalled.load();
      },
      5,
      [&](double seconds) {
        ++spoke;
        said.set_value(seconds);
      },
      std::chrono::milliseconds(1));
  while (looked < 3) std::this_thread::yield();
  EXPECT_EQ(spoke, 0);
  stalled = 5.5;
  EXPECT_EQ(said.get_future().get(), 5.5);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(spoke, 1);
}

TEST(StallWatch, EndsWithoutWaitingForItsNextLook) {
  const auto start = std::chrono::steady_clock::now();
  {
    const StallWatch watch([] { return 0.0; }, 5, [](double) {}, std::chrono::hours(1));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
}

}  // namespace
}  // namespace nfp::server
