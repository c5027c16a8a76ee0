// One request run to its end on an engine of one's own, with the times a person wants to see. What `generate`, `chat`
// and the quickstart use.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "base/result.h"
#include "engine/engine.h"

namespace nfp {

struct GenerationTimes {
  double ttft_s = 0;                // time to first token
  double decode_s = 0;              // first token to last token
  double prefill_tokens_per_s = 0;  // prompt tokens computed (not cached) over ttft
  double decode_tokens_per_s = 0;   // tokens after the first over decode_s; 0 for a single token
};

struct Generation {
  std::string text;
  std::vector<OutputToken> tokens;
  FinishReason finish = FinishReason::kStop;
  Usage usage;
  GenerationTimes times;
};

// Called for every piece as it comes.
using GenerationCallback = std::function<void(const RequestOutput&)>;

// Runs `request` alone. `stop`, when it becomes true, cancels it (kCancelled). Errors of the request or the backend are
// returned.
Result<Generation> generate(Engine& engine, Request request, const GenerationCallback& on_output,
                            const std::atomic<bool>* stop = nullptr);

}  // namespace nfp
