// A machine whose step times are a formula, for tests.
#pragma once

#include "policy/step_table.h"

namespace nfp::testing {

// Milliseconds: reading the weights or computing with them, whichever is longer; attention; what every step costs.
inline double synthetic_ms(const StepTime& step) {
  const double fp8 = step.level == 1 ? 0.55 : 1.0;
  const double tokens = step.tokens();
  const double linear = fp8 * (4 + 0.05 * tokens) + 1;
  const double pairs = step.prefill_tokens * (step.prefill_context + 0.5 * (step.prefill_tokens + 1.0));
  const double keys = static_cast<double>(step.decode_sequences) * step.decode_context;
  return linear + 2e-6 * pairs + 4e-5 * keys + 0.01 * step.sequences();
}

inline StepTable synthetic_table() {
  StepTable table;
  table.model = "synthetic";
  table.device = "formula";
  table.max_step_tokens = 2048;
  table.max_sequences = 64;
  table.kv_dtype = "f16";
  table.levels = {{Precision::kFp16, 0}, {Precision::kFp8W8A8, 1}};
  for (const size_t level : {0, 1}) {
    for (const int32_t tokens : {16, 64, 256, 512, 1024, 2048}) {
      for (const int32_t context : {0, 1024, 4096}) table.steps.push_back({level, tokens, context});
    }
    for (const int32_t sequences : {1, 8, 32, 64}) {
      for (const int32_t context : {128, 1024}) table.steps.push_back({level, 0, 0, sequences, context});
    }
  }
  for (StepTime& step : table.steps) {
    step.ms = synthetic_ms(step);
    step.samples = 1;
  }
  return table;
}

}  // namespace nfp::testing
