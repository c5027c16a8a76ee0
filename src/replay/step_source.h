// Step times for a simulation, from a file: a table of `nestedfp bench MODEL steps` (docs/step-times.md), or a list of
// measurements of other engines, {"rows": [{"model", "engine", "precision", "kind": "decode" | "prefill", "sequences",
// "tokens", "context_per_sequence", "ms"}]}.
#pragma once

#include <string>
#include <string_view>

#include "base/result.h"
#include "policy/step_table.h"

namespace nfp {

struct StepSource {
  std::string model;   // of a list: rows whose model is this or, where none is, contains it
  std::string engine;  // likewise
};

Result<StepTable> parse_step_rows(std::string_view json, std::string_view where, const StepSource& source);
// Whichever of the two the file is.
Result<StepTable> read_step_times(const std::string& path, const StepSource& source);

}  // namespace nfp
