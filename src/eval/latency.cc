#include "eval/latency.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace nfp {
namespace {

struct Repeats {
  std::vector<double> ttft, ttft_last, step, step_p99, seconds;
};

DraftTimes draft_times(const std::vector<StepRecord>& decode) {
  DraftTimes times;
  std::vector<double> seconds;
  double all_s = 0;
  int64_t tokens = 0, sequences = 0, drafted = 0, accepted = 0, drafting = 0;
  for (const StepRecord& step : decode) {
    all_s += step.seconds;
    tokens += step.tokens;
    sequences += step.sequences;
    if (step.drafted == 0) continue;
    seconds.push_back(step.seconds);
    drafted += step.drafted;
    accepted += step.accepted;
    drafting += step.sequences;
  }
  times.steps = std::ssize(seconds);
  if (times.steps == 0) return times;
  times.step_ms = median(std::move(seconds)) * 1e3;
  times.drafts = static_cast<double>(drafted) / static_cast<double>(drafting);
  times.acceptance = static_cast<double>(accepted) / static_cast<double>(drafted);
  const double steps = static_cast<double>(decode.size());
  times.token_ms = all_s / steps / (static_cast<double>(tokens) / static_cast<double>(sequences)) * 1e3;
  return times;
}

void take(const BenchRun& run, int32_t batch, LatencyRow& row, Repeats& repeats) {
  repeats.ttft.push_back(mean(run.ttft_s) * 1e3);
  repeats.ttft_last.push_back(*std::max_element(run.ttft_s.begin(), run.ttft_s.end()) * 1e3);
  repeats.seconds.push_back(run.seconds);
  std::vector<StepRecord> decode = decode_steps(run.steps, batch);
  row.drafts = draft_times(decode);
  std::erase_if(decode, [](const StepRecord& step) { return step.drafted > 0; });
  if (decode.empty()) return;
  const std::vector<double> seconds = step_seconds(decode);
  repeats.step.push_back(median(seconds) * 1e3);
  repeats.step_p99.push_back(percentile(seconds, 0.99) * 1e3);
  row.host = host_times(decode);
}

}  // namespace

Result<std::vector<LatencyRow>> measure_latency(BenchEngine& engine, const LatencyOptions& options,
                                                const LatencyCallback& on_row) {
  constexpr int32_t kWarmOutput = 6;  // a decode step is captured when its shape comes for the second time
  std::vector<LatencyRow> rows;
  for (const int32_t input : options.inputs) {
    for (const int32_t batch : options.batches) {
      const auto count = static_cast<size_t>(batch);
      const std::vector<BenchRequest> requests(count, {input, options.output});
      const std::vector<BenchRequest> warm(count, {input, std::min(options.output, kWarmOutput)});
      std::vector<LatencyRow> found(options.precisions.size());
      std::vector<Repeats> repeats(found.size());
      for (const Precision precision : options.precisions) {
        for (uint32_t time = 0; time < 2; ++time) {
          NFP_ASSIGN_OR_RETURN([[maybe_unused]] const BenchRun run, engine.run(warm, {precision}, time));
        }
      }
      for (int32_t repeat = 0; repeat < options.repeats; ++repeat) {
        for (size_t i = 0; i < found.size(); ++i) {
          const auto seed = static_cast<uint32_t>(repeat) + 2;
          NFP_ASSIGN_OR_RETURN(const BenchRun run, engine.run(requests, {options.precisions[i]}, seed));
          take(run, batch, found[i], repeats[i]);
        }
      }
      for (size_t i = 0; i < found.size(); ++i) {
        LatencyRow& row = found[i];
        row.precision = engine.computed(options.precisions[i]);
        row.batch = batch;
        row.input = input;
        row.output = options.output;
        row.ttft_ms = median(repeats[i].ttft);
        row.ttft_last_ms = median(repeats[i].ttft_last);
        row.step_ms = median(repeats[i].step);
        row.step_p99_ms = median(repeats[i].step_p99);
        row.seconds = median(repeats[i].seconds);
        row.step_ms_repeats = repeats[i].step;
        if (on_row) on_row(row);
        rows.push_back(row);
      }
    }
  }
  return rows;
}

nlohmann::ordered_json to_json(const LatencyRow& row) {
  nlohmann::ordered_json json = {{"precision", name_of(row.precision)},
                                 {"batch", row.batch},
                                 {"input", row.input},
                                 {"output", row.output},
                                 {"ttft_ms", row.ttft_ms},
                                 {"ttft_last_ms", row.ttft_last_ms}};
  if (row.step_ms > 0) {
    json["step_ms"] = row.step_ms;
    json["step_p99_ms"] = row.step_p99_ms;
    json["step_ms_repeats"] = row.step_ms_repeats;
    json["host"] = to_json(row.host);
  }
  if (const DraftTimes& d = row.drafts; d.steps > 0) {
    json["drafts"] = {{"steps", d.steps},
                      {"step_ms", d.step_ms},
                      {"drafts", d.drafts},
                      {"acceptance", d.acceptance},
                      {"token_ms", d.token_ms}};
  }
  json["seconds"] = row.seconds;
  return json;
}

std::string to_text(const LatencyRow& row) {
  std::string text = fmt::format("{:<8} batch {:>3}  input {:>5}  output {:>4}  first token {:>8.2f} ms",
                                 name_of(row.precision), row.batch, row.input, row.output, row.ttft_ms);
  if (const DraftTimes& d = row.drafts; d.steps > 0) {
    text += fmt::format("  {} steps with {:.1f} drafts, {:.0f}% right, {:.3f} ms; a token {:.3f} ms", d.steps, d.drafts,
                        100 * d.acceptance, d.step_ms, d.token_ms);
  }
  if (row.step_ms <= 0) return text;
  return text +
         fmt::format("  step {:.3f} ms (p99 {:.3f})  host: submit {:.0f} us, wait {:.0f}, output {:.0f}, late {:.0f}%",
                     row.step_ms, row.step_p99_ms, row.host.submit_us, row.host.wait_us, row.host.output_us,
                     100 * row.host.late_share);
}

}  // namespace nfp
