#include "eval/bench_engine.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace nfp {
namespace {

class LevelPolicy final : public PrecisionPolicy {
 public:
  explicit LevelPolicy(const BenchLevel& level) : level_(level) {}
  std::string name() const override { return std::string(name_of(level_.precision)); }
  Precision choose(const StepLoad& load) override {
    return level_.alternating && load.step_index % 2 == 0 ? Precision::kFp16 : level_.precision;
  }
  double fp8_share(const StepLoad&) override { return level_.fp8_share; }
  bool fixed() const override { return true; }

 private:
  BenchLevel level_;
};

}  // namespace

Result<std::unique_ptr<BenchEngine>> BenchEngine::create(LoadedModel& loaded, EngineConfig config) {
  if (config.max_context > loaded.config.max_context) {
    return error(ErrorCode::kUsage, "this model's context has {} tokens, less than the {} that the benchmark would use",
                 loaded.config.max_context, config.max_context);
  }
  std::unique_ptr<BenchEngine> made(new BenchEngine(loaded));
  config.limits.max_queue = std::numeric_limits<int32_t>::max();
  config.prefix_caching = false;
  config.fp8_levels.clear();
  for (int percent = 1; percent <= 100; ++percent) config.fp8_levels.push_back(percent / 100.0);
  if (!config.graphs) config.steps_in_flight = 1;
  if (!loaded.backend->memory()) config.kv_blocks = full_kv_blocks(config);
  NFP_ASSIGN_OR_RETURN(made->serving_,
                       make_engine(loaded, std::move(config), std::make_unique<LevelPolicy>(BenchLevel{})));
  made->serving_.engine->set_observer(made.get());
  return made;
}

void BenchEngine::set_level(const BenchLevel& level) {
  serving_.engine->set_policy(std::make_unique<LevelPolicy>(level));
}

void BenchEngine::begin(uint32_t seed) {
  run_ = {};
  first_id_ = next_id_;
  random_.seed(seed);
}

Status BenchEngine::submit(const BenchRequest& shape) {
  std::uniform_int_distribution<int32_t> token(0, loaded_.config.vocab - 1);
  Request request;
  request.id = std::to_string(next_id_++);
  request.prompt.resize(static_cast<size_t>(shape.input));
  for (int32_t& id : request.prompt) id = token(random_);
  request.sampling.temperature = 0;
  request.sampling.max_tokens = shape.output;
  request.sampling.ignore_eos = true;
  run_.input_tokens += shape.input;
  return serving_.engine->submit(std::move(request));
}

Status BenchEngine::step() {
  for (const RequestOutput& output : serving_.engine->step()) {
    if (output.finish == FinishReason::kError) return Error{output.error_code, output.error};
    run_.output_tokens += static_cast<int64_t>(output.tokens.size());
  }
  return ok_status();
}

void BenchEngine::cancel_all() {
  for (uint64_t id = first_id_; id < next_id_; ++id) serving_.engine->cancel(std::to_string(id));
}

void BenchEngine::on_step(const StepRecord& step) {
  run_.steps.push_back(step);
  run_.preempted += step.preempted;
  if (on_recorded) on_recorded(step);
}

Result<BenchRun> BenchEngine::run(std::span<const BenchRequest> requests, const BenchLevel& level, uint32_t seed) {
  begin(seed);
  set_level(level);
  const auto start = EngineClock::now();
  for (const BenchRequest& request : requests) NFP_RETURN_IF_ERROR(submit(request));
  while (!idle()) NFP_RETURN_IF_ERROR(step());
  run_.seconds = std::chrono::duration<double>(EngineClock::now() - start).count();
  return std::move(run_);
}

Status BenchEngine::warm_up(int32_t sequences, const BenchLevel& level) {
  if (!config().graphs || !loaded_.backend->prefers_graphs()) return ok_status();
  // Sizes lie at least 8 apart from 8 on. Each batch of 8 ends 3 steps after the one before: a size occurs, is captured
  // when it comes again, and is replayed once.
  std::vector<BenchRequest> requests;
  for (int32_t i = 0; i < sequences; ++i) {
    const int32_t group = i < 8 ? 0 : (i - 8) / 8 + 1;
    requests.push_back({1, std::min(4 + 3 * group, config().max_context - 1)});
  }
  NFP_ASSIGN_OR_RETURN([[maybe_unused]] const BenchRun done, run(requests, level, 0));
  return ok_status();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

double mean(std::span<const double> values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(std::clamp<size_t>(rank, 1, values.size()) - 1);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

HostTimes host_times(std::span<const StepRecord> steps) {
  // Less than a device's shortest step by far, and more than asking for a result that is there.
  constexpr double kAtOnce = 5e-6;
  std::vector<double> submit, wait, output;
  HostTimes times;
  for (const StepRecord& step : steps) {
    submit.push_back(step.submit_s * 1e6);
    wait.push_back(step.wait_s * 1e6);
    output.push_back(step.output_s * 1e6);
    if (step.wait_s < kAtOnce) times.late_share += 1.0 / static_cast<double>(steps.size());
  }
  times.submit_us = median(std::move(submit));
  times.wait_us = median(std::move(wait));
  times.output_us = median(std::move(output));
  return times;
}

nlohmann::ordered_json to_json(const HostTimes& host) {
  return {{"submit_us", host.submit_us},
          {"wait_us", host.wait_us},
          {"output_us", host.output_us},
          {"late_share", host.late_share}};
}

std::vector<StepRecord> decode_steps(std::span<const StepRecord> steps, int32_t sequences) {
  std::vector<StepRecord> found;
  std::copy_if(steps.begin(), steps.end(), std::back_inserter(found),
               [&](const StepRecord& step) { return step.prefill_tokens == 0 && step.sequences == sequences; });
  return found;
}

int32_t steps_before_all_decode(int32_t sequences, int32_t prompt, int32_t step_tokens) {
  return static_cast<int32_t>(int64_t{sequences} * prompt / std::max(1, step_tokens - sequences)) + 2;
}

std::vector<double> step_seconds(std::span<const StepRecord> steps) {
  std::vector<double> seconds;
  for (const StepRecord& step : steps) seconds.push_back(step.seconds);
  return seconds;
}

}  // namespace nfp
