// Where the time of a prefill and of a decode step goes, by kernel or, where an operation has several, by operation.
//
// Each operation is timed by itself, with nothing running ahead of it or beside it, so the times add up to more than a
// step takes that runs as served: they say what an operation costs, and how near it is to what the device can do. Its
// bytes and FLOPs are the least it can do with (backend/operation_cost.h).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

#include "eval/bench_engine.h"
#include "eval/device_limits.h"

namespace nfp {

struct StageCost {
  std::string stage;                        // StageTime's; may be there once a precision
  std::optional<Precision> precision = {};  // likewise
  // All of a step.
  double us = 0;
  double calls = 0;
  double weight_bytes = 0;
  double activation_bytes = 0;
  double kv_bytes = 0;
  double flops = 0;
  // The least time that these bytes, all from memory, or these FLOPs allow, over the time taken; 0 = not known. More
  // than 1 where a cache holds what is counted as read from memory.
  double share_of_limit = 0;
  bool limited_by_memory = true;  // rather than by arithmetic, where the share is known
  double bytes() const { return weight_bytes + activation_bytes + kv_bytes; }
};

struct StepBreakdown {
  std::string step;  // "prefill": all steps of the prompts together; "decode": one step on average
  Precision precision = Precision::kFp16;
  int32_t batch = 1;
  int32_t input = 0;              // tokens of each prompt
  double context = 0;             // tokens a sequence, on average over the steps
  std::vector<StageCost> stages;  // the longest first
  double us() const;              // of all stages
};

struct BreakdownCase {
  int32_t batch = 1;
  int32_t input = 1;
  int32_t decode_steps = 8;
  // Tokens sampled a sequence, so that all of them decode together for so many steps.
  int32_t output(int32_t step_tokens) const;
};

// `engine` must not be as_served. Gives prefill and decode.
Result<std::vector<StepBreakdown>> break_down(BenchEngine& engine, const BreakdownCase& c, Precision precision,
                                              const std::optional<DeviceLimits>& limits);

nlohmann::ordered_json to_json(const StepBreakdown& breakdown);
std::string to_text(const StepBreakdown& breakdown);  // a table

}  // namespace nfp
