#include "server/serve/demo_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace nfp::server {

DemoLoad::DemoLoad(EngineThread& engine, int32_t vocab, int32_t max_context)
    : engine_(engine), vocab_(vocab), max_context_(max_context), thread_([this] { loop(); }) {}

DemoLoad::~DemoLoad() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DemoLoad::set_rate(double requests_per_s) {
  {
    const std::lock_guard lock(mutex_);
    rate_ = std::isfinite(requests_per_s) ? std::clamp(requests_per_s, 0.0, kMostRate) : 0.0;
  }
  changed_.notify_all();
}

double DemoLoad::rate() const {
  const std::lock_guard lock(mutex_);
  return rate_;
}

Request DemoLoad::next_request() {
  // Lengths as in conversation traces: many short prompts, few long ones.
  std::lognormal_distribution<double> prompt(std::log(100.0), 0.9), answer(std::log(40.0), 0.6);
  const auto length = [&](double drawn, int32_t most) {
    return static_cast<int32_t>(std::clamp<double>(drawn, 4, std::max(4, most)));
  };
  Request request;
  request.id = fmt::format("demo-load-{}", serial_++);
  request.prompt.resize(static_cast<size_t>(length(prompt(random_), max_context_ / 2 - 8)));
  std::uniform_int_distribution<int32_t> token(0, vocab_ - 1);
  for (int32_t& id : request.prompt) id = token(random_);
  request.sampling.max_tokens = length(answer(random_), max_context_ / 4);
  request.sampling.temperature = 0;
  request.sampling.ignore_eos = true;
  return request;
}

void DemoLoad::loop() {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (rate_ <= 0) {
      changed_.wait(lock);
      continue;
    }
    // Users come independently of each other; a new rate counts from now on.
    const double wait = std::exponential_distribution<double>(rate_)(random_);
    const double rate = rate_;
    const auto due = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait));
    if (changed_.wait_until(lock, due, [&] { return stop_ || rate_ != rate; })) continue;
    lock.unlock();
    if (open_->load(std::memory_order_relaxed) < kMostOpen) {
      open_->fetch_add(1, std::memory_order_relaxed);
      const Status taken = engine_.submit(next_request(), [open = open_](RequestOutput&& output) {
        if (output.finish) open->fetch_sub(1, std::memory_order_relaxed);
      });
      if (!taken.ok()) open_->fetch_sub(1, std::memory_order_relaxed);  // the queue is full
    }
    lock.lock();
  }
}

}  // namespace nfp::server
