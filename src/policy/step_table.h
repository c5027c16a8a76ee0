// How long a step takes, measured: the table that `nestedfp bench MODEL steps` writes and that whoever wants to predict
// a step's time reads. The file's format is described in docs/step-times.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "nested/precision.h"

namespace nfp {

// What the linear layers of a step compute in.
struct StepLevel {
  Precision precision = Precision::kFp16;
  double fp8_share = 0;      // of the weights, 0 in kFp16
  std::string name() const;  // "fp16", "fp8-w8a8", "fp8-w8a8@0.50"
  friend bool operator==(const StepLevel&, const StepLevel&) = default;
};

// A step: a chunk of one prompt, one token each of some sequences, or both.
struct StepTime {
  size_t level = 0;              // index into StepTable::levels
  int32_t prefill_tokens = 0;    // of one prompt
  int32_t prefill_context = 0;   // tokens of that prompt that came in steps before
  int32_t decode_sequences = 0;  // with one token each
  int32_t decode_context = 0;    // tokens of each of them in the KV cache, the step's own included; rounded mean
  double ms = 0;                 // from result to result of an engine that is kept busy
  int32_t samples = 0;           // steps that this is the median of, or the fastest
  int32_t tokens() const { return prefill_tokens + decode_sequences; }
  int32_t sequences() const { return decode_sequences + (prefill_tokens > 0 ? 1 : 0); }
  friend bool operator==(const StepTime&, const StepTime&) = default;
};

struct StepTable {
  std::string model;
  std::string device;
  int64_t weight_bytes = 0;
  int32_t max_step_tokens = 0;
  int32_t max_sequences = 0;
  std::string kv_dtype;
  std::vector<StepLevel> levels;
  std::vector<StepTime> steps;  // no two describe the same step
  // Where steps were measured several times and the fastest counts: by how much of it the median of the times lay
  // above, in the mean. A busy machine shows here. 0 = not told.
  double spread = 0;
  int32_t steps_in_flight = 0;  // of the engine that was measured: 2 where one is planned while one runs; 0 = not told
};

// `where` names the file in errors, which name the field too.
Result<StepTable> parse_step_table(std::string_view json, std::string_view where);
std::string to_json_text(const StepTable& table);

}  // namespace nfp
