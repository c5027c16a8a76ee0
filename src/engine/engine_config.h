// How requests are computed: one set of options, with one set of defaults, for every program and test.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/dtype.h"
#include "engine/scheduler.h"
#include "nested/precision.h"

namespace nfp {

// Tokens of one sequence that a KV cache on a CPU has room for where nobody says, whatever they take.
inline constexpr int32_t kLeastContext = 4096;
inline constexpr int32_t kMaxDrafts = 16;

// What `serve` has for `least_ttft` and `least_itl` below where the operator gave no targets.
inline constexpr double kServeLeast = 3;

// What a request's latency should be, where it names no target of its own. `least_ttft` and `least_itl` raise these to
// so many times what the machine needs for the request alone, by the policy's step model (0 = never).
struct LatencyTargets {
  double ttft_s = 0.5;
  double itl_s = 0.05;
  double least_ttft = 0;
  double least_itl = 0;
  // Whether token k (from 0) is due k * itl after the first one was due, or after the first one came. Of the former the
  // verdict is on the whole answer's time; of the latter on first token and mean gap, each.
  bool whole_answer = false;
};

struct EngineConfig {
  SchedulerLimits limits;  // max_sequences or max_step_tokens 0 = the backend's default
  // Tokens of prompt and answer together. 0 = the model's default_context(), at most what the KV cache holds.
  int32_t max_context = 0;

  // KV cache. Its size is kv_blocks, or where that is 0 kv_bytes, or where both are 0: on a device with memory of its
  // own what memory_share of it leaves room for, else what all sequences at full length need, but not more than a
  // quarter of free memory (and never less than one such sequence, or kLeastContext where max_context is 0).
  int32_t kv_blocks = 0;
  int64_t kv_bytes = 0;
  double memory_share = 0.9;
  int32_t block_size = 16;  // tokens
  DType kv_dtype = DType::kF16;
  bool prefix_caching = true;

  Precision fp8 = Precision::kFp8;  // which FP8 arithmetic kFast requests get
  // Shares of the weights that a step may compute in FP8, ascending, in (0, 1]: a policy's share is rounded up to one
  // of these (down to the last), so that steps have few shapes.
  std::vector<double> fp8_levels = {0.5, 0.88, 1.0};

  LatencyTargets targets;
  // The clock; empty = std::chrono::steady_clock::now. A simulation has its own.
  std::function<std::chrono::steady_clock::time_point()> now;

  // 2: a step is planned and submitted while the one before it runs. Tokens are the same; outputs come a step later.
  // 0 = what suits the backend.
  int32_t steps_in_flight = 0;
  // Speculative decoding of FP16 steps: at most so many draft tokens a sequence and step, 0 to kMaxDrafts. They are
  // drafted by steps of the same weights in the backend's fastest FP8 and verified in FP16, so answers are those of
  // FP16 steps. How many, and whether any, is decided by what they gain (policy/draft_length.h).
  int32_t speculative_tokens = 0;
  bool speculative_always = false;  // as many as may be, whether they gain or not: for tests and measurements
  // Decode steps may be captured and replayed where the backend prefers that. Without, every operation is enqueued in
  // every step, as Backend::profile() must have it to time them.
  bool graphs = true;

  // Tokens that end an answer, from the model's files (make_engine sets them).
  std::vector<int32_t> end_ids;
};

// Blocks of a cache in which all sequences have room at full length; max_context must be set.
constexpr int32_t full_kv_blocks(const EngineConfig& config) {
  return (config.max_context + config.block_size - 1) / config.block_size * config.limits.max_sequences;
}

}  // namespace nfp
