// The last minutes in slices of a quarter second, for the page's live view.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace nfp::server {

class Timeline {
 public:
  static constexpr int64_t kSliceMs = 250;
  static constexpr size_t kSlices = 480;  // two minutes

  // On the engine's thread.
  void add_step(const StepRecord& step);
  void add_ttft(double seconds) { add_sample(ttft_, seconds); }
  void add_tpot(double seconds) { add_sample(tpot_, seconds); }

  // What decides on precision, and by which numbers. Before the first step.
  void set_policy(std::string_view name, const LatencyTargets& targets);

  // {"started_ms" (Unix time: which server's), "now" (the slice, from that time on), "slice_ms", "policy": {"name",
  // "ttft_ms", "itl_ms"},
  //  "slices": [{"i", "fp16", "fp8", "prefill_fp16", "prefill_fp8", "steps", "running", "waiting", "kv", "ms",
  //              "most_tokens", "most_ms"}, ...],
  //  "switches": [{"i", "at_ms", "precision", "share", "tokens", "prefill", "running", "waiting", "lost",
  //                "predicted_ms", "why"}, ...], why: of kLevelChangeNames,
  //  "ttft_ms": {"count", "p50", "p90", "p99"}, "tpot_ms": {...}}
  // with the slices and the switches of precision after number `after`; percentiles of the last minute, null where
  // there are too few requests for one: 1, 10 and 100.
  std::string json(int64_t after) const;

 private:
  struct Slice {
    int64_t index = -1;
    int64_t fp16 = 0;  // tokens
    int64_t fp8 = 0;
    int64_t prefill_fp16 = 0;  // of these, tokens of prompts
    int64_t prefill_fp8 = 0;
    int32_t steps = 0;
    int32_t sequences = 0;    // most at once
    int32_t waiting = 0;      // likewise
    double kv_use = 0;        // likewise
    double seconds = 0;       // of steps
    int32_t most_tokens = 0;  // of one step
    double most_seconds = 0;  // likewise
  };
  // A step that was computed in another precision, or with another share of FP8, than the one before it.
  struct Switch {
    int64_t index = 0;  // slice
    int64_t at_ms = 0;  // since the start
    StepRecord step;
  };
  static constexpr size_t kSwitches = 256;
  struct Sample {
    EngineClock::time_point when;
    double seconds = 0;
  };
  struct Samples {
    std::vector<Sample> ring;
    size_t next = 0;
  };
  static constexpr size_t kSamples = 1024;

  int64_t slice_of(EngineClock::time_point when) const;
  void add_sample(Samples& samples, double seconds);
  std::string percentiles(const Samples& samples) const;

  const EngineClock::time_point start_ = EngineClock::now();
  const std::chrono::system_clock::time_point started_ = std::chrono::system_clock::now();
  mutable std::mutex mutex_;
  std::array<Slice, kSlices> slices_;
  std::deque<Switch> switches_;
  std::string policy_ = "null";  // JSON
  Samples ttft_;
  Samples tpot_;
};

}  // namespace nfp::server
