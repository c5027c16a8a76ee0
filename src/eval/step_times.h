// Measures a step-time table through the engine: steps of prompts alone, steps that decode, and steps that do both.
#pragma once

#include <string>
#include <vector>

#include "eval/bench_engine.h"
#include "policy/step_table.h"

namespace nfp {

struct StepTimesOptions {
  std::vector<BenchLevel> levels = {{Precision::kFp16}, {Precision::kFp8}};
  // Prompts from an idle engine; longer ones than a step takes give a row for each of their chunks.
  std::vector<int32_t> prefill = {16, 64, 256, 512, 1024, 2048};
  std::vector<int32_t> sequences = {1, 8, 32, 64};  // decoded together,
  std::vector<int32_t> contexts = {128, 1024};      // each with each
  std::vector<int32_t> mixed = {256, 1024};         // prompt tokens beside each of these
  int32_t repeats = 5;                              // prefill and mixed steps of a kind
  int32_t decode_steps = 16;                        // of a kind

  int32_t context_needed() const;    // tokens of a sequence at most
  int32_t sequences_needed() const;  // at once at most
};

using StepTimesCallback = std::function<void(const std::string& done)>;

// Steps that have no room (in the engine's step, or its KV cache) are left out and told of.
Result<StepTable> measure_step_times(BenchEngine& engine, const StepTimesOptions& options,
                                     const StepTimesCallback& on_done);

}  // namespace nfp
