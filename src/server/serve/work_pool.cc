#include "server/serve/work_pool.h"

#include <malloc.h>

#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

#include "base/log.h"

namespace nfp::server {

WorkPool::WorkPool(int threads, size_t max_queue)
    : max_queue_(max_queue), running_(static_cast<size_t>(threads), std::stop_source(std::nostopstate)) {
  try {
    for (size_t i = 0; i < running_.size(); ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (const std::system_error&) {  // the system has no more threads
    end();
    throw;
  }
}

WorkPool::~WorkPool() { end(); }

void WorkPool::end() {
  std::vector<std::stop_source> running;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    running = running_;
  }
  for (auto& source : running) source.request_stop();
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

bool WorkPool::submit(std::function<void(const std::stop_token&)> work, std::stop_source stop, bool heavy) {
  {
    const std::lock_guard lock(mutex_);
    auto& queue = heavy ? heavy_ : queue_;
    if (queue.size() >= max_queue_) return false;
    queue.push_back({std::move(work), std::move(stop)});
  }
  heavy ? wake_.notify_all() : wake_.notify_one();  // one thread alone might be the one that takes no heavy work
  return true;
}

std::deque<WorkPool::Item>* WorkPool::next(size_t thread) {
  const bool any = thread > 0 || running_.size() == 1;
  if (any && !heavy_.empty()) return &heavy_;
  return queue_.empty() ? nullptr : &queue_;
}

void WorkPool::loop(size_t thread) {
  int trims = 0;
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      running_[thread] = std::stop_source(std::nostopstate);
      const auto something = [this, thread] { return stop_ || next(thread) != nullptr; };
      // Large bodies leave holes that the allocator keeps; one and two seconds after the last of them, when also its
      // connection and its answer have gone, they go back to the system.
      while (trims > 0 && !wake_.wait_for(lock, std::chrono::seconds(1), something)) {
        --trims;
        lock.unlock();
        malloc_trim(0);
        lock.lock();
      }
      wake_.wait(lock, something);
      if (stop_) return;
      std::deque<Item>& queue = *next(thread);
      item = std::move(queue.front());
      queue.pop_front();
      running_[thread] = item.stop;
    }
    try {
      item.work(item.stop.get_token());
    } catch (const std::exception& e) {  // of a library; the request is answered 500 as its exchange is dropped
      log::error("a request ended by an exception: {}", e.what());
    }
    trims = 2;
  }
}

}  // namespace nfp::server
