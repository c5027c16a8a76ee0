// Requests that the server makes for itself (`serve --demo-load`), so that a person with one browser can see what
// precision does under load: random prompts at a rate that the page's slider sets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "engine/engine_thread.h"

namespace nfp::server {

class DemoLoad {
 public:
  static constexpr double kMostRate = 1000;  // requests a second
  static constexpr int32_t kMostOpen = 256;  // more are not made until some have ended

  // `vocab`, `max_context`: of the model. Nothing comes before set_rate().
  DemoLoad(EngineThread& engine, int32_t vocab, int32_t max_context);
  ~DemoLoad();  // before the engine's
  DemoLoad(const DemoLoad&) = delete;
  DemoLoad& operator=(const DemoLoad&) = delete;

  void set_rate(double requests_per_s);  // 0 = none
  double rate() const;

 private:
  void loop();
  Request next_request();

  EngineThread& engine_;
  const int32_t vocab_, max_context_;
  std::mt19937_64 random_{20250523};
  uint64_t serial_ = 0;
  // Its requests have it too: they may end after this.
  const std::shared_ptr<std::atomic<int32_t>> open_ = std::make_shared<std::atomic<int32_t>>(0);
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  double rate_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace nfp::server
