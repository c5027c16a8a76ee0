// Looks, from a thread of its own, whether the engine still moves: for when its thread is stuck in a driver's call and
// can report nothing by itself.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/awake_time.h"

namespace nfp::server {

class StallWatch {
 public:
  // `progress`: a number that changes as the engine moves. Once it has stayed the same for more than `limit_s` seconds
  // in which this process ran, `then` is called, once, with these seconds. Both are called on the watch's thread, and
  // must live as long as it.
  StallWatch(std::function<int64_t()> progress, double limit_s, std::function<void(double)> then,
             std::chrono::milliseconds every = std::chrono::seconds(1))
      : thread_([this, progress = std::move(progress), limit_s, then = std::move(then), every] {
          watch(progress, limit_s, then, every);
        }) {}
  ~StallWatch() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

 private:
  void watch(const std::function<int64_t()>& progress, double limit_s, const std::function<void(double)>& then,
             std::chrono::milliseconds every) {
    using Clock = AwakeTime::Clock;
    std::unique_lock lock(mutex_);
    int64_t last = progress();
    AwakeTime still(Clock::now(), 2 * every);
    while (!wake_.wait_for(lock, every, [this] { return stop_; })) {
      const Clock::time_point now = Clock::now();
      if (const int64_t seen = progress(); seen != last) {
        last = seen;
        still = AwakeTime(now, 2 * every);
        continue;
      }
      const double seconds = std::chrono::duration<double>(still.at(now)).count();
      if (seconds <= limit_s) continue;
      then(seconds);
      return;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace nfp::server
