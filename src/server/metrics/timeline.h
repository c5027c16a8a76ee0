// The last minutes in slices of a quarter second, for the page's live view.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
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

  // {"now", "slice_ms", "slices": [{"i", "fp16", "fp8", "steps", "running", "waiting", "kv", "ms"}, ...],
  //  "ttft_ms": {"p50", "p90", "p99"}, "tpot_ms": {...}} with the slices after number `after`; percentiles of the last
  // minute, null where there is no request.
  std::string json(int64_t after) const;

 private:
  struct Slice {
    int64_t index = -1;
    int64_t fp16 = 0;  // tokens
    int64_t fp8 = 0;
    int32_t steps = 0;
    int32_t sequences = 0;  // most at once
    int32_t waiting = 0;    // likewise
    double kv_use = 0;      // likewise
    double seconds = 0;     // of steps
  };
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
  mutable std::mutex mutex_;
  std::array<Slice, kSlices> slices_;
  Samples ttft_;
  Samples tpot_;
};

}  // namespace nfp::server
