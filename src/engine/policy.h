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
  // The operator fixed one precision: requests that merely prefer FP8 do not get it.
  virtual bool fixed() const { return false; }
};

// "fp16", "fp8", "fp8-w8a8": always that.
// "threshold:N": FP8 when the step has more than N tokens (NestedFP, NeurIPS 2025, section 5.3).
// "alternate:N": changes between FP16 and FP8 every N steps (for tests and demonstrations).
// `fp8` says which FP8 arithmetic the last two use.
Result<std::unique_ptr<PrecisionPolicy>> parse_policy(std::string_view text, Precision fp8 = Precision::kFp8);

}  // namespace nfp
