#include "server/serve/work_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

namespace nfp::server {
namespace {

constexpr auto kLong = std::chrono::seconds(30);

// Many large texts must not hold up a prompt.
TEST(WorkPool, HeavyWorkLeavesAThreadToTheRest) {
  std::promise<void> release;
  const std::shared_future<void> released(release.get_future());
  std::atomic<int> begun{0}, ended{0};
  WorkPool pool(2, 16);
  const auto heavy = [&](const std::stop_token&) {
    ++begun;
    released.wait();
    ++ended;
  };
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(pool.submit(heavy, {}, /*heavy=*/true));
  for (int i = 0; i < 4; ++i) {
    std::promise<void> done;
    ASSERT_TRUE(pool.submit([&](const std::stop_token&) { done.set_value(); }));
    const bool in_time = done.get_future().wait_for(kLong) == std::future_status::ready;
    if (!in_time) release.set_value();  // so that the pool can end
    ASSERT_TRUE(in_time);
  }
  EXPECT_LE(begun, 1);
  release.set_value();
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (ended < 16 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_EQ(ended, 16);
}

TEST(WorkPool, AFullQueueOfHeavyWorkRefusesNothingElse) {
  std::promise<void> started, release, done;
  WorkPool pool(1, 1);
  ASSERT_TRUE(pool.submit(
      [&](const std::stop_token&) {
        started.set_value();
        release.get_future().wait();
      },
      {}, /*heavy=*/true));
  started.get_future().wait();
  EXPECT_TRUE(pool.submit([](const std::stop_token&) {}, {}, /*heavy=*/true));
  EXPECT_FALSE(pool.submit([](const std::stop_token&) {}, {}, /*heavy=*/true));
  EXPECT_TRUE(pool.submit([&](const std::stop_token&) { done.set_value(); }));
  release.set_value();
  EXPECT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
}

}  // namespace
}  // namespace nfp::server
