#include "eval/throughput.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

#include "base/gpu_energy.h"

namespace nfp {

Result<std::vector<ThroughputRow>> measure_throughput(BenchEngine& engine, const ThroughputOptions& options,
                                                      const ThroughputCallback& on_row) {
  const int32_t places = engine.config().limits.max_sequences;
  int32_t most = 1;
  for (const auto& load : options.loads) most = std::max(most, static_cast<int32_t>(load.size()));
  for (const Precision precision : options.precisions) {
    // The captured sizes, then a little of each kind of step.
    NFP_RETURN_IF_ERROR(engine.warm_up(std::min(most, places), {precision}));
    for (const auto& load : options.loads) {
      std::vector<BenchRequest> few(load.begin(), load.begin() + std::min<std::ptrdiff_t>(8, std::ssize(load)));
      for (BenchRequest& request : few) request.output = std::min(request.output, 4);
      NFP_ASSIGN_OR_RETURN([[maybe_unused]] const BenchRun run, engine.run(few, {precision}, 0));
    }
  }
  const bool on_gpu = engine.loaded().backend->memory().has_value();
  const Result<GpuEnergy> energy =
      on_gpu ? GpuEnergy::open() : Result<GpuEnergy>(error(ErrorCode::kUnsupported, "computed on a CPU"));
  std::vector<ThroughputRow> rows;
  for (const auto& load : options.loads) {
    std::vector<ThroughputRow> found(options.precisions.size());
    std::vector<std::vector<double>> joules(found.size());
    for (int32_t repeat = 0; repeat < options.repeats; ++repeat) {
      for (size_t i = 0; i < found.size(); ++i) {
        const double before = energy.ok() ? energy->joules() : 0;
        NFP_ASSIGN_OR_RETURN(const BenchRun run,
                             engine.run(load, {options.precisions[i]}, static_cast<uint32_t>(repeat) + 1));
        if (energy.ok()) joules[i].push_back(energy->joules() - before);
        ThroughputRow& row = found[i];
        row.input_tokens = run.input_tokens;
        row.output_tokens = run.output_tokens;
        row.seconds_repeats.push_back(run.seconds);
        row.ttft_mean_ms = mean(run.ttft_s) * 1e3;
        row.ttft_p99_ms = percentile(run.ttft_s, 0.99) * 1e3;
        row.itl_mean_ms = mean(run.itl_s) * 1e3;
        row.itl_p99_ms = percentile(run.itl_s, 0.99) * 1e3;
        row.steps = static_cast<int64_t>(run.steps.size());
        row.preempted = run.preempted;
        row.kv_use = 0;
        for (const StepRecord& step : run.steps) row.kv_use = std::max(row.kv_use, step.kv_use);
        row.host = host_times(run.steps);
      }
    }
    for (size_t i = 0; i < found.size(); ++i) {
      ThroughputRow& row = found[i];
      row.precision = engine.computed(options.precisions[i]);
      row.requests = static_cast<int32_t>(load.size());
      row.max_sequences = places;
      row.seconds = median(row.seconds_repeats);
      if (!joules[i].empty()) row.joules = median(joules[i]);
      row.output_tokens_per_s = static_cast<double>(row.output_tokens) / row.seconds;
      row.total_tokens_per_s = static_cast<double>(row.input_tokens + row.output_tokens) / row.seconds;
      if (on_row) on_row(row);
      rows.push_back(row);
    }
  }
  return rows;
}

nlohmann::ordered_json to_json(const ThroughputRow& row) {
  return {{"precision", name_of(row.precision)},
          {"requests", row.requests},
          {"max_sequences", row.max_sequences},
          {"input_tokens", row.input_tokens},
          {"output_tokens", row.output_tokens},
          {"seconds", row.seconds},
          {"seconds_repeats", row.seconds_repeats},
          {"output_tokens_per_s", row.output_tokens_per_s},
          {"total_tokens_per_s", row.total_tokens_per_s},
          {"gpu_joules", row.joules ? nlohmann::ordered_json(*row.joules) : nlohmann::ordered_json(nullptr)},
          {"ttft_mean_ms", row.ttft_mean_ms},
          {"ttft_p99_ms", row.ttft_p99_ms},
          {"itl_mean_ms", row.itl_mean_ms},
          {"itl_p99_ms", row.itl_p99_ms},
          {"steps", row.steps},
          {"preempted", row.preempted},
          {"kv_use", row.kv_use},
          {"host", to_json(row.host)}};
}

std::string to_text(const ThroughputRow& row) {
  return fmt::format(
      "{:<8} {:>4} requests  {:>8.1f} output tokens/s  {:>9.1f} in all  {:.2f} s  first token {:.1f} ms (p99 {:.1f})  "
      "between tokens {:.2f} ms (p99 {:.2f})  host: submit {:.0f} us, wait {:.0f}, output {:.0f}, late {:.0f}%{}{}",
      name_of(row.precision), row.requests, row.output_tokens_per_s, row.total_tokens_per_s, row.seconds,
      row.ttft_mean_ms, row.ttft_p99_ms, row.itl_mean_ms, row.itl_p99_ms, row.host.submit_us, row.host.wait_us,
      row.host.output_us, 100 * row.host.late_share,
      row.joules ? fmt::format("  {:.3f} J a token", *row.joules / static_cast<double>(row.output_tokens)) : "",
      row.preempted > 0 ? fmt::format("  {} preempted", row.preempted) : "");
}

}  // namespace nfp
