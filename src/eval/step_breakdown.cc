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

int32_t BreakdownCase::output(int32_t step_tokens) const {
  // The first sequence decodes in all steps that compute the other prompts, in what room it and others leave there.
  return static_cast<int32_t>(int64_t{batch} * input / std::max(1, step_tokens - batch)) + 2 + decode_steps;
}

Result<std::vector<StepBreakdown>> break_down(BenchEngine& engine, const BreakdownCase& c, Precision precision,
                                              const std::optional<DeviceLimits>& limits) {
  LoadedModel& loaded = engine.loaded();
  Backend& backend = *loaded.backend;
  const auto count = static_cast<size_t>(c.batch);
  const DType kv_dtype = engine.config().kv_dtype;
  std::vector<StepBreakdown> found(2);
  for (StepBreakdown& breakdown : found) {
    breakdown.precision = engine.computed(precision);
    breakdown.batch = c.batch;
    breakdown.input = c.input;
  }

  StepBreakdown& prefill = found[0];
  prefill.step = "prefill";
  prefill.context = c.input;
  const std::vector<BenchRequest> prompts(count, {c.input, 1});
  NFP_ASSIGN_OR_RETURN([[maybe_unused]] const BenchRun warm, engine.run(prompts, {precision}, 0));
  backend.set_profiling(true);
  const Result<BenchRun> run = engine.run(prompts, {precision}, 1);
  const std::vector<StageTime> prefill_times = backend.profile();
  backend.set_profiling(false);
  if (!run.ok()) return run.error();
  // Causal: a query meets half of the keys on average. Each key is read once at least.
  const double keys = static_cast<double>(c.batch) * c.input;
  fill(prefill, prefill_times, 1, keys, keys * (c.input + 1) / 2, loaded, kv_dtype, limits);

  StepBreakdown& decode = found[1];
  decode.step = "decode";
  engine.begin(2);
  engine.set_level({precision});
  for (int32_t i = 0; i < c.batch; ++i) {
    NFP_RETURN_IF_ERROR(engine.submit({c.input, c.output(engine.config().limits.max_step_tokens)}));
  }
  double cached = 0, decode_keys = 0;
  int32_t steps = 0;
  while (steps < c.decode_steps && !engine.idle()) {
    NFP_RETURN_IF_ERROR(engine.step());
    if (engine.steps().empty()) continue;
    const StepRecord& step = engine.steps().back();
    cached += step.tokens;
    if (step.prefill_tokens > 0 || step.sequences != c.batch) {
      backend.set_profiling(true);  // anew: the times end up being those of steps that decode the batch
      continue;
    }
    decode_keys += cached;
    ++steps;
  }
  const std::vector<StageTime> decode_times = backend.profile();
  backend.set_profiling(false);
  engine.cancel_all();
  while (!engine.idle()) NFP_RETURN_IF_ERROR(engine.step());
  if (steps < c.decode_steps) {
    return error(ErrorCode::kResource, "{} sequences of {} tokens never decode together: the KV cache has no room",
                 c.batch, c.input);
  }
  decode.context = decode_keys / steps / c.batch;
  fill(decode, decode_times, steps, decode_keys, decode_keys, loaded, kv_dtype, limits);
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
