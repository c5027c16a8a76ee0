// Threads for work that would hold up an event loop: large bodies, long prompts, grammars to compile.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

namespace nfp::server {

class WorkPool {
 public:
  WorkPool(int threads, size_t max_queue);
  // Drops what has not begun, asks what runs to stop, and joins.
  ~WorkPool();
  // False when the queue is full. `work` must look at its stop token often and return soon once it is set; `stop` lets
  // the caller set it. `heavy`: it may take seconds, so it has a queue of its own, and where there are several threads
  // one of them takes nothing of it.
  bool submit(std::function<void(const std::stop_token&)> work, std::stop_source stop = {}, bool heavy = false);

 private:
  struct Item {
    std::function<void(const std::stop_token&)> work;
    std::stop_source stop;
  };
  void loop(size_t thread);
  std::deque<Item>* next(size_t thread);  // whose first item this thread is to take; null = there is none
  void end();
  const size_t max_queue_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_, heavy_;
  std::vector<std::stop_source> running_;  // of each thread
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nfp::server
