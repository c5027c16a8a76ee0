#include "eval/step_breakdown.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace nfp {
namespace {

// Turns what a backend timed in `steps` steps into the costs of one.
void fill(StepBreakdown& breakdown, const std::vector<StageTime>& times, double steps,
          const std::optional<DeviceLimits>& limits) {
  for (const StageTime& time : times) {
    StageCost& cost = breakdown.stages.emplace_back();
    const auto a_step = [&](uint64_t sum) { return static_cast<double>(sum) / steps; };
    cost.stage = time.stage;
    cost.precision = time.precision;
    cost.us = time.seconds / steps * 1e6;
    cost.calls = a_step(time.calls);
    cost.weight_bytes = a_step(time.cost.weight_bytes);
    cost.activation_bytes = a_step(time.cost.activation_bytes);
    cost.kv_bytes = a_step(time.cost.kv_bytes);
    cost.flops = a_step(time.cost.flops);
    if (!limits || cost.us <= 0) continue;
    const Precision arithmetic = cost.precision.value_or(Precision::kFp16);
    const double least = limits->least_seconds(cost.bytes(), cost.flops, arithmetic);
    cost.share_of_limit = least * 1e6 / cost.us;
    cost.limited_by_memory = limits->least_seconds(cost.bytes(), 0, arithmetic) >= least;
  }
  std::sort(breakdown.stages.begin(), breakdown.stages.end(),
            [](const StageCost& a, const StageCost& b) { return a.us > b.us; });
}

}  // namespace

int32_t BreakdownCase::output(int32_t step_tokens) const {
  return steps_before_all_decode(batch, input, step_tokens) + decode_steps;
}

Result<std::vector<StepBreakdown>> break_down(BenchEngine& engine, const BreakdownCase& c, Precision precision,
                                              const std::optional<DeviceLimits>& limits) {
  Backend& backend = *engine.loaded().backend;
  const auto count = static_cast<size_t>(c.batch);
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
  fill(prefill, prefill_times, 1, limits);

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
  fill(decode, decode_times, steps, limits);
  return found;
}

double StepBreakdown::us() const {
  double sum = 0;
  for (const StageCost& cost : stages) sum += cost.us;
  return sum;
}

nlohmann::ordered_json to_json(const StepBreakdown& breakdown) {
  nlohmann::ordered_json stages = nlohmann::ordered_json::array();
  for (const StageCost& cost : breakdown.stages) {
    nlohmann::ordered_json& stage = stages.emplace_back();
    stage["stage"] = cost.stage;
    if (cost.precision) stage["precision"] = name_of(*cost.precision);
    stage["us"] = cost.us;
    stage["calls"] = cost.calls;
    stage["weight_bytes"] = cost.weight_bytes;
    stage["activation_bytes"] = cost.activation_bytes;
    stage["kv_bytes"] = cost.kv_bytes;
    stage["flops"] = cost.flops;
    if (cost.share_of_limit > 0) {
      stage["share_of_limit"] = cost.share_of_limit;
      stage["limited_by"] = cost.limited_by_memory ? "memory" : "arithmetic";
    }
  }
  return {{"step", breakdown.step},
          {"precision", name_of(breakdown.precision)},
          {"batch", breakdown.batch},
          {"input", breakdown.input},
          {"context", breakdown.context},
          {"us", breakdown.us()},
          {"stages", stages}};
}

std::string to_text(const StepBreakdown& breakdown) {
  const double total = breakdown.us();
  std::string text = fmt::format("{} {} batch {} input {}: {:.0f} us in all\n", breakdown.step,
                                 name_of(breakdown.precision), breakdown.batch, breakdown.input, total);
  text += fmt::format("  {:<24} {:<9} {:>6} {:>10} {:>6} {:>10} {:>10}  {}", "stage", "precision", "calls", "us",
                      "share", "MB", "GFLOP", "of its limit");
  for (const StageCost& cost : breakdown.stages) {
    text += fmt::format("\n  {:<24} {:<9} {:>6.0f} {:>10.1f} {:>5.1f}% {:>10.3f} {:>10.3f}", cost.stage,
                        cost.precision ? name_of(*cost.precision) : "", cost.calls, cost.us, 100 * cost.us / total,
                        cost.bytes() / 1e6, cost.flops / 1e9);
    if (cost.share_of_limit > 0) {
      text +=
          fmt::format("  {:.0f}% of {}", 100 * cost.share_of_limit, cost.limited_by_memory ? "memory" : "arithmetic");
    }
  }
  return text;
}

}  // namespace nfp
