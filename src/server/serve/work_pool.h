// Threads for work that would hold up an event loop: long prompts, grammars to compile.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace nfp::server {

class WorkPool {
 public:
  WorkPool(int threads, size_t max_queue);
  // Drops what has not begun, and joins.
  ~WorkPool();
  // False when the queue is full.
  bool submit(std::function<void()> work);

 private:
  void loop();
  const size_t max_queue_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nfp::server
