// Looks, from a thread of its own, whether the engine still moves: for when its thread is stuck in a driver's call and
// can report nothing by itself.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace nfp::server {

class StallWatch {
 public:
  // `stalled_s`: seconds without progress; once they are more than `limit_s`, `then` is called, once. Both are called
  // on the watch's thread, and must live as long as it.
  StallWatch(std::function<double()> stalled_s, double limit_s, std::function<void(double)> then,
             std::chrono::milliseconds every = std::chrono::seconds(1))
      : thread_([this, stalled_s = std::move(stalled_s), limit_s, then = std::move(then), every] {
          std::unique_lock lock(mutex_);
          while (!wake_.wait_for(lock, every, [this] { return stop_; })) {
            const double seconds = stalled_s();
            if (seconds <= limit_s) continue;
            then(seconds);
            return;
          }
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
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace nfp::server
