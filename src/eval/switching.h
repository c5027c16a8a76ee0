// What it costs to change precision at every decode step: the time of such steps against the mean of steps that never
// change. One copy of the weights serves both, so it should cost nothing.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "eval/bench_engine.h"

namespace nfp {

struct SwitchingRow {
  Precision precision = Precision::kFp8;  // the other one, as computed; the first is FP16
  int32_t batch = 1;
  int32_t input = 0;
  // Means over the decode steps of a run, medians of these over the repeats.
  double fp16_ms = 0;
  double fp8_ms = 0;
  double alternating_ms = 0;
  double ratio() const { return alternating_ms / ((fp16_ms + fp8_ms) / 2); }
};

// Every row takes `repeats` runs of each kind, in turns.
Result<SwitchingRow> measure_switching(BenchEngine& engine, int32_t batch, const BenchRequest& request,
                                       Precision precision, int32_t repeats);

nlohmann::ordered_json to_json(const SwitchingRow& row);
std::string to_text(const SwitchingRow& row);

}  // namespace nfp
