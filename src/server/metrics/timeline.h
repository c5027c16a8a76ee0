// The last minutes in slices of a quarter second, for the page's live view.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
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
  void add_gap(double seconds);  // between two tokens of a request
  // Of the request that ended last; seconds.
  void set_targets(double ttft_s, double itl_s);
  void add_ttft(double seconds) { add_sample(ttft_, seconds); }
  void add_tpot(double seconds) { add_sample(tpot_, seconds); }

  // {"now", "slice_ms", "slices": [{"i", "fp16", "fp8", "steps", "running", "waiting", "kv", "ms", "gap", "share"}, ...],
  //  "changes": [{"i", "from", "to", "why", "running", "waiting", "lost"}, ...],
  //  "ttft_ms": {"p50", "p90", "p99"}, "tpot_ms": {...}, "ttft_target_ms", "itl_target_ms"} with the slices and changes of
  // level after slice `after`; gap: the longest between two tokens, ms; share: of the weights in FP8, mean over tokens.
  // Percentiles are of the last minute, null where there is no request, as targets are.
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
    double gap_s = 0;       // longest between two tokens
    double fp8_weights = 0;  // sum over tokens of the share in FP8
  };
  struct Sample {
    EngineClock::time_point when;
    double seconds = 0;
  };
  struct Samples {
    std::vector<Sample> ring;
    size_t next = 0;
  };
  struct Change {
    int64_t index = -1;  // of the slice
    double from = 0, to = 0;
    LevelChange why = LevelChange::kNone;
    int32_t running = 0, waiting = 0, lost = 0;
  };
  static constexpr size_t kSamples = 1024;
  static constexpr size_t kChanges = 256;

  Slice& slice_at(int64_t index);
  int64_t slice_of(EngineClock::time_point when) const;
  void add_sample(Samples& samples, double seconds);
  std::string percentiles(const Samples& samples) const;

  const EngineClock::time_point start_ = EngineClock::now();
  mutable std::mutex mutex_;
  std::array<Slice, kSlices> slices_;
  std::deque<Change> changes_;
  double last_share_ = 0;
  double ttft_target_s_ = 0, itl_target_s_ = 0;
  Samples ttft_;
  Samples tpot_;
};

}  // namespace nfp::server
