// What the server counts, under vLLM's names (so that its dashboards, routers and autoscalers work) and our own for
// precision. Filled by the engine's thread, written as Prometheus text by whoever asks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "engine/step_log.h"
#include "server/metrics/histogram.h"
#include "server/metrics/http_counts.h"
#include "server/metrics/timeline.h"

namespace nfp::server {

struct GrammarStats;

class Metrics final : public EngineObserver {
 public:
  Metrics();

  void on_step(const StepRecord& step) override;
  void on_token_gap(double seconds) override;
  void on_first_token(double seconds, int32_t prompt_tokens) override;
  void on_finished(const RequestRecord& request) override;

  struct Facts {
    std::string model_name;
    EngineStats engine;
    uint64_t connections = 0;
    uint64_t slow_readers_cut = 0;
    uint64_t request_bytes = 0;
    const GrammarStats* grammars = nullptr;  // null = none
    const HttpCounts* http = nullptr;        // likewise
  };
  std::string prometheus(const Facts& facts) const;

  // A request for text came: how many answers it wants of each prompt.
  void on_request(int n) { params_n_.observe(n); }
  // All answers to one of its prompts have come: how many tokens the longest has.
  void on_answered(int32_t longest) { longest_.observe(longest); }

  // Before the first request.
  void set_prefix_caching(bool on) { prefix_caching_ = on; }
  void set_step_log(std::unique_ptr<StepLog> log) { step_log_ = std::move(log); }  // likewise
  Timeline& timeline() { return timeline_; }

 private:
  static constexpr size_t kFinishReasons = 4;

  void count_tokens(double fp8_share, int32_t tokens);

  Timeline timeline_;
  std::unique_ptr<StepLog> step_log_;  // null = none
  bool prefix_caching_ = true;
  std::atomic<uint64_t> prompt_tokens_{0};
  std::atomic<uint64_t> generation_tokens_{0};
  std::array<std::atomic<uint64_t>, kFinishReasons> finished_{};
  Histogram ttft_, token_gap_, tpot_, e2e_, queue_, prefill_, decode_, inference_;
  Histogram step_tokens_, prompt_length_, generation_length_, max_tokens_, longest_, computed_prompt_, params_n_;
  std::array<Histogram, kPrecisionCount> step_time_;
  // Tokens by share of FP8, in the order in which the shares occur. Engine's thread writes.
  struct Level {
    std::atomic<double> share{-1};
    std::atomic<uint64_t> tokens{0};
  };
  std::array<Level, 16> levels_;
  std::array<std::atomic<uint64_t>, kLevelChangeNames.size()> changes_{};
  std::atomic<double> oldest_wait_{0};
  Histogram prediction_off_;
  std::atomic<double> by_table_{0};  // seconds
  std::atomic<uint64_t> shed_{0};
  Histogram predicted_, between_;
  std::atomic<double> level_{0};             // share of the last step's weights in FP8
  uint64_t predictions_ = 0;                 // engine's thread only
  std::atomic<double> prediction_error_{0};  // mean over about the last 100 steps, of what was measured
  // Requests by tier: those that named their own targets, and those that got the server's.
  std::array<std::atomic<uint64_t>, 2> judged_{}, attained_{}, attained_tokens_{};
};

}  // namespace nfp::server
