#include "eval/switching.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>

namespace nfp {

Result<SwitchingRow> measure_switching(BenchEngine& engine, int32_t batch, const BenchRequest& request,
                                       Precision precision, int32_t repeats) {
  const std::array<BenchLevel, 3> levels = {
      {{Precision::kFp16, 1.0, false}, {precision, 1.0, false}, {precision, 1.0, true}}};
  const std::vector<BenchRequest> requests(static_cast<size_t>(batch), request);
  std::array<std::vector<double>, 3> means;
  for (int32_t repeat = -1; repeat < repeats; ++repeat) {  // the first does not count
    for (size_t i = 0; i < levels.size(); ++i) {
      NFP_ASSIGN_OR_RETURN(const BenchRun run, engine.run(requests, levels[i], static_cast<uint32_t>(repeat + 1)));
      const std::vector<StepRecord> decode = decode_steps(run.steps, batch);
      if (decode.size() < 4) return error(ErrorCode::kUsage, "switching: --output is too short for its decode steps");
      // Without the first, which stands behind prefill, and as many of either precision.
      const auto counted = std::span(decode).last((decode.size() - 1) / 2 * 2);
      if (repeat >= 0) means[i].push_back(mean(step_seconds(counted)) * 1e3);
    }
  }
  SwitchingRow row;
  row.precision = engine.computed(precision);
  row.batch = batch;
  row.input = request.input;
  row.fp16_ms = median(means[0]);
  row.fp8_ms = median(means[1]);
  row.alternating_ms = median(means[2]);
  return row;
}

nlohmann::ordered_json to_json(const SwitchingRow& row) {
  return {{"precision", name_of(row.precision)},
          {"batch", row.batch},
          {"input", row.input},
          {"fp16_ms", row.fp16_ms},
          {"fp8_ms", row.fp8_ms},
          {"alternating_ms", row.alternating_ms},
          {"ratio_to_mean", row.ratio()}};
}

std::string to_text(const SwitchingRow& row) {
  return fmt::format(
      "switching  batch {:3}  input {:5}  fp16 {:.3f} ms  {} {:.3f} ms  every other step {:.3f} ms: {:.3f} of the mean",
      row.batch, row.input, row.fp16_ms, name_of(row.precision), row.fp8_ms, row.alternating_ms, row.ratio());
}

}  // namespace nfp
