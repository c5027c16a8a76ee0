// Computes one planned step: what stands between the engine's bookkeeping and a model on a backend. Tests and the
// server's load tests put a scripted one in its place.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "nested/precision.h"

namespace nfp {

struct StepOutput {
  // One entry for each item of the plan with `samples`, in order.
  std::vector<OutputToken> sampled;
  // One entry for each item of the plan: log-probabilities of prompt tokens first+1 .. first+count, as far as they are
  // prompt tokens and the request asks for them.
  std::vector<std::vector<OutputToken>> prompt_logprobs;
};

class StepRunner {
 public:
  virtual ~StepRunner() = default;
  virtual int32_t vocab() const = 0;
  // Tokens that a sequence may have in all (prompt and output).
  virtual int32_t max_context() const = 0;
  // A sequence (re)starts in this slot: its penalties count from these tokens.
  virtual Status start(const Sequence& sequence) = 0;
  virtual Result<StepOutput> run(const StepPlan& plan, Precision precision) = 0;
};

}  // namespace nfp
