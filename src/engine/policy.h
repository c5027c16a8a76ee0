// Which precision the next step is computed in. Pure: numbers in, a precision out, so policies are tested in
// microseconds and replayed on traces.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "nested/precision.h"

namespace nfp {

// What a policy may know about the step that is about to run.
struct StepLoad {
  int32_t step_tokens = 0;     // tokens that the step will compute
  int32_t prefill_tokens = 0;  // of these, tokens of prompts
  int32_t running = 0;         // sequences in the step
  int32_t waiting = 0;         // requests not yet admitted
  double kv_use = 0;           // share of KV blocks in use, 0..1
  double recent_tpot_s = 0;    // recent time per output token, seconds (exponential mean; 0 = none yet)
  double recent_ttft_s = 0;    // recent time to first token, seconds (likewise)
  uint64_t step_index = 0;     // steps run so far
};

class PrecisionPolicy {
 public:
  virtual ~PrecisionPolicy() = default;
  virtual std::string name() const = 0;  // as parse_policy takes it
  virtual Precision choose(const StepLoad& load) = 0;
  // Of the linear layers' weights that a step with this load computes in FP8, where FP8 is what was chosen: 0..1. Which
  // ones is the model's order of sensitivity (Linear::fp8_from).
  virtual double fp8_share(const StepLoad&) { return 1.0; }
  // Shares between 0 and 1 occur: the model needs an order of sensitivity.
  virtual bool needs_sensitivity() const { return false; }
  // The operator fixed one precision: requests that merely prefer FP8 do not get it.
  virtual bool fixed() const { return false; }
};

// "fp16", "fp8", "fp8-w8a8": always that.
// "threshold:N": FP8 when the step has more than N tokens (NestedFP, NeurIPS 2025, section 5.3).
// "alternate:N": changes between FP16 and FP8 every N steps (for tests and demonstrations).
// "graded:LOW:HIGH": FP16 up to LOW tokens in the step, then FP8 in a share of the weights that grows with the tokens
// and reaches all of them at HIGH: as much precision as the load leaves room for. `fp8` says which FP8 arithmetic the
// last three use.
Result<std::unique_ptr<PrecisionPolicy>> parse_policy(std::string_view text, Precision fp8 = Precision::kFp8);

}  // namespace nfp
