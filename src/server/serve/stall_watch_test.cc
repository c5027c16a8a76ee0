#include "server/serve/stall_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace nfp::server {
namespace {

using namespace std::chrono_literals;

TEST(StallWatch, SpeaksOnceWhenNothingHasMovedForTheLimit) {
  std::atomic<bool> moves{true};
  std::atomic<int> looked{0}, spoke{0};
  std::promise<double> said;
  const StallWatch watch([&] { return ++looked, moves ? looked.load() : -1; }, 0.02,
                         [&](double seconds) {
                           ++spoke;
                           said.set_value(seconds);
                         },
                         1ms);
  while (looked < 50) std::this_thread::yield();
  EXPECT_EQ(spoke, 0);
  moves = false;
  const double seconds = said.get_future().get();
  EXPECT_GT(seconds, 0.02);
  EXPECT_LE(seconds, 0.022);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(spoke, 1);
}

// The watch's thread stands still as all threads of a stopped process do; the engine's moves some looks later.
TEST(StallWatch, APauseOfTheProcessIsNoStall) {
  std::atomic<int> looked{0}, spoke{0};
  const StallWatch watch(
      [&] {
        const int look = ++looked;
        if (look == 2) std::this_thread::sleep_for(500ms);
        return look < 10 ? 0 : look;
      },
      0.2, [&](double) { ++spoke; }, 10ms);
  while (looked < 20) std::this_thread::yield();
  EXPECT_EQ(spoke, 0);
}

TEST(StallWatch, EndsWithoutWaitingForItsNextLook) {
  const auto start = std::chrono::steady_clock::now();
  {
    const StallWatch watch([] { return 0; }, 5, [](double) {}, 1h);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 1min);
}

}  // namespace
}  // namespace nfp::server
