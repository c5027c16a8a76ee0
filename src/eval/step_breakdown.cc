#include "eval/step_breakdown.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace nfp {
namespace {

// Turns what a backend timed in `steps` steps into the costs of one.
void fill(StepBreakdown& breakdown, const std::vector<StageTime>& times, double steps, double keys, double pairs,
          LoadedModel& loaded, DType kv_dtype, const std::optional<DeviceLimits>& limits) {
  const KvCacheSpec spec = loaded.model->kv_spec(1, 16, kv_dtype);
  const double kv_token = static_cast<double>(loaded.backend->kv_bytes_per_block(spec)) / spec.block_size;
  const ModelConfig& config = loaded.config;
  for (const StageTime& time : times) {
    StageCost& cost = breakdown.stages.emplace_back();
    cost.stage = time.stage;
    cost.us = time.seconds / steps * 1e6;
    cost.calls = static_cast<double>(time.calls) / steps;
    cost.weight_bytes = static_cast<double>(time.weight_bytes) / steps;
    cost.flops = static_cast<double>(time.flops) / steps;
    Precision arithmetic = breakdown.precision;
    if (time.stage == "attention") {
      cost.kv_bytes = keys * kv_token / steps;
      // Products with keys and with values, each 2 FLOPs a feature.
      cost.flops = 4.0 * config.heads * config.head_dim * config.layers * pairs / steps;
      arithmetic = Precision::kFp16;
    }
    const double least = limits ? limits->least_seconds(cost.weight_bytes + cost.kv_bytes, cost.flops, arithmetic) : 0;
    if (cost.us > 0) cost.share_of_limit = least * 1e6 / cost.us;
  }
  std::sort(breakdown.stages.begin(), breakdown.stages.end(),
            [](const StageCost& a, const StageCost& b) { return a.us > b.us; });
}

}  // namespace

Result<std::vector<StepBreakdown>> break_down(BenchEngine& engine, const BreakdownCase& c, Precision precision,
                                              const std::optional<DeviceLimits>& limits) {
  LoadedModel& loaded = engine.loaded();
  Backend& backend = *loaded.backend;
  const std::vector<BenchRequest> requests(static_cast<size_t>(c.batch), {c.input, c.decode_steps + 1});
  NFP_ASSIGN_OR_RETURN([[maybe_unused]] const BenchRun warm, engine.run(requests, {precision}, 0));

  const int64_t prompts = int64_t{c.batch} * c.input;
  int64_t prefilled = 0;
  double prefill_steps = 0;
  std::vector<StageTime> prefill;
  engine.on_recorded = [&](const StepRecord& step) {
    if (prefilled == prompts) return;
    prefilled += step.prefill_tokens;
    ++prefill_steps;
    if (prefilled < prompts) return;
    prefill = backend.profile();
    backend.set_profiling(true);  // anew: decode's alone from here
  };
  backend.set_profiling(true);
  const Result<BenchRun> run = engine.run(requests, {precision}, 1);
  engine.on_recorded = {};
  const std::vector<StageTime> decode = backend.profile();
  backend.set_profiling(false);
  if (!run.ok()) return run.error();

  const double batch = c.batch, input = c.input;
  const auto steps = static_cast<double>(run->steps.size()) - prefill_steps;
  std::vector<StepBreakdown> found(2);
  for (StepBreakdown& breakdown : found) {
    breakdown.precision = engine.computed(precision);
    breakdown.batch = c.batch;
    breakdown.input = c.input;
  }
  found[0].step = "prefill";
  found[0].context = input;
  // Causal: a query meets half of the keys on average. Each key is read once at least.
  fill(found[0], prefill, 1, batch * input, batch * input * (input + 1) / 2, loaded, engine.options().kv_dtype, limits);
  found[1].step = "decode";
  found[1].context = input + (c.decode_steps + 1) / 2.0;
  const double keys = batch * found[1].context * steps;
  if (steps > 0) fill(found[1], decode, steps, keys, keys, loaded, engine.options().kv_dtype, limits);
  return found;
}

nlohmann::ordered_json to_json(const StepBreakdown& breakdown) {
  nlohmann::ordered_json stages = nlohmann::ordered_json::array();
  for (const StageCost& cost : breakdown.stages) {
    stages.push_back({{"stage", cost.stage},
                      {"us", cost.us},
                      {"calls", cost.calls},
                      {"weight_bytes", cost.weight_bytes},
                      {"kv_bytes", cost.kv_bytes},
                      {"flops", cost.flops}});
    if (cost.share_of_limit > 0) stages.back()["share_of_limit"] = cost.share_of_limit;
  }
  return {{"step", breakdown.step},       {"precision", name_of(breakdown.precision)},
          {"batch", breakdown.batch},     {"input", breakdown.input},
          {"context", breakdown.context}, {"stages", stages}};
}

std::string to_text(const StepBreakdown& breakdown) {
  std::string text = fmt::format("{} {} batch {} input {}: us a stage", breakdown.step, name_of(breakdown.precision),
                                 breakdown.batch, breakdown.input);
  for (const StageCost& cost : breakdown.stages) {
    text += fmt::format("  {} {:.0f}", cost.stage, cost.us);
    if (cost.share_of_limit > 0) text += fmt::format(" ({:.0f}%)", 100 * cost.share_of_limit);
  }
  return text;
}

}  // namespace nfp
