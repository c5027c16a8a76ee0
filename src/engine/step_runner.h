// Computes planned steps: what stands between the engine's bookkeeping and a model on a backend. Tests and the server's
// load tests put a scripted one in its place.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/pooling.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "nested/precision.h"

namespace nfp {

struct StepOutput {
  // One entry for each item of the plan with `samples`, in order.
  std::vector<OutputToken> sampled;
  // Empty, or one entry for each of `sampled`: what follows it, a token for each draft that was what was sampled in its
  // place.
  std::vector<std::vector<OutputToken>> accepted;
  // One entry for each item of the plan: log-probabilities of prompt tokens first+1 .. first+count, as far as they are
  // prompt tokens and the request asks for them.
  std::vector<std::vector<OutputToken>> prompt_logprobs;
  // Empty, or one entry for each item of the plan: the hidden states that the item's pooling needs.
  std::vector<HiddenRows> hidden;
};

// How many of an item's hidden states its pooling needs, the last ones: what StepOutput::hidden must have.
inline int32_t pooled_rows(const ScheduledSequence& item) {
  const bool ends = item.first + item.count == item.sequence->size();
  switch (item.sequence->request.pooling) {
    case Pooling::kNone:
      return 0;
    case Pooling::kLast:
      return ends ? 1 : 0;
    case Pooling::kMean:
      return item.count;
  }
  return 0;
}

// Steps that are kept to be replayed, and the device memory that they take.
struct CapturedUse {
  size_t steps = 0;
  size_t bytes = 0;
};

// A step that was submitted and is to be collected.
using StepTicket = uint64_t;

class StepRunner {
 public:
  virtual ~StepRunner() = default;
  virtual int32_t vocab() const = 0;
  // Tokens that a sequence may have in all (prompt and output).
  virtual int32_t max_context() const = 0;
  // Size of the hidden states that pooled requests get; 0 = none.
  virtual int32_t hidden() const { return 0; }
  // Steps that may be submitted and not yet collected.
  virtual int32_t max_in_flight() const { return 1; }
  // Draft tokens that each of so many items may have; 0 = it does not draft.
  virtual int32_t max_drafts(int32_t sequences) const {
    (void)sequences;
    return 0;
  }
  // How a step asked for in this precision is computed.
  virtual Precision computed(Precision asked) const { return asked; }
  virtual CapturedUse captured() const { return {}; }
  // A sequence (re)starts in this slot: its penalties count from these tokens.
  virtual Status start(const Sequence& sequence) = 0;
  // Takes a step in; it may run at any time until it is collected. Nothing of the plan is read once this has returned.
  virtual Result<StepTicket> submit(const StepPlan& plan, Precision precision) = 0;
  // What the requests end with whose `results` ("logits", "hidden states") of a step are not finite.
  virtual Error overflow(std::string_view results) const {
    return error(ErrorCode::kUnsupported, "the {} are not finite", results);
  }
  // Waits for the oldest step in flight, which this ticket must name.
  virtual Result<StepOutput> collect(StepTicket ticket) = 0;
};

}  // namespace nfp
