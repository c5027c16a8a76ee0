// Where the time of a prefill and of a decode step goes, by kind of operation.
//
// Each operation is timed by itself, with nothing running ahead of it or beside it, so the times add up to more than a
// step takes that runs as served: they say what an operation costs, and how near it is to what the device can do.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

#include "eval/bench_engine.h"
#include "eval/device_limits.h"

namespace nfp {

struct StageCost {
  std::string stage;
  double us = 0;              // a step
  double calls = 0;           // a step
  double weight_bytes = 0;    // read a step
  double kv_bytes = 0;        // likewise; of attention
  double flops = 0;           // a step, 2 a multiply-add
  double share_of_limit = 0;  // the least time these bytes or FLOPs allow, over the time taken; 0 = not known
};

struct StepBreakdown {
  std::string step;  // "prefill": all steps of the prompts together; "decode": one step on average
  Precision precision = Precision::kFp16;
  int32_t batch = 1;
  int32_t input = 0;   // tokens of each prompt
  double context = 0;  // tokens a sequence, on average over the steps
  std::vector<StageCost> stages;
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
std::string to_text(const StepBreakdown& breakdown);

}  // namespace nfp
