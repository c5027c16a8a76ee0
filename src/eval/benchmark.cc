#include "eval/benchmark.h"

#include <algorithm>
#include <random>

#include "eval/bench_engine.h"

namespace nfp {
namespace {

// Step times of one run, split into steps that compute prompts and steps that decode the whole batch.
class Recorder final : public EngineObserver {
 public:
  // `profiled`, where given, starts its stage times anew after each prompt step, so that they end up being decode's
  // alone.
  explicit Recorder(int32_t batch, Backend* profiled) : batch_(batch), profiled_(profiled) {}
  void on_step(const StepRecord& step) override {
    if (step.prefill_tokens > 0) {
      prefill_s += step.seconds;
      ++prefill_steps;
      prefill_tokens += step.prefill_tokens;
      if (profiled_ != nullptr) profiled_->set_profiling(true);
    } else if (step.sequences == batch_) {
      decode.push_back(step.seconds);
    }
  }
  double prefill_s = 0;
  int64_t prefill_steps = 0;
  int64_t prefill_tokens = 0;
  std::vector<double> decode;  // seconds a step

 private:
  int32_t batch_;
  Backend* profiled_;
};

struct Case {
  bool prefill = false;
  int32_t batch = 1;
  Precision precision = Precision::kFp16;
};

struct Measured {
  double tokens_per_s = 0;
  double step_s = 0;
  int64_t steps = 0;
};

// Tokens a sequence, so that all of them decode together; as far as the model's context goes.
int32_t decoded(const BenchmarkOptions& options, int32_t batch, int32_t most_context) {
  const int32_t before = batch > 1 ? steps_before_all_decode(batch, options.context, options.max_step_tokens) : 0;
  return std::min(options.generate + before, most_context - options.context);
}

Result<Measured> measure(LoadedModel& loaded, const BenchmarkOptions& options, const Case& c, uint32_t seed,
                         bool profile = false) {
  const int32_t prompt = c.prefill ? options.prompt : options.context;
  const int32_t generate = c.prefill ? 1 : decoded(options, c.batch, loaded.config.max_context);
  EngineConfig serving;
  serving.max_context = prompt + generate;
  serving.limits.max_sequences = serving.limits.max_queue = c.batch;
  serving.limits.max_step_tokens = options.max_step_tokens;
  serving.kv_dtype = options.kv_dtype;
  serving.prefix_caching = false;
  if (!loaded.backend->memory()) serving.kv_blocks = full_kv_blocks(serving);
  if (profile) {  // each operation by itself, and no step begun when the times start anew
    serving.graphs = false;
    serving.steps_in_flight = 1;
  }
  NFP_ASSIGN_OR_RETURN(auto policy, parse_policy(name_of(c.precision)));
  NFP_ASSIGN_OR_RETURN(ServingEngine engine, make_engine(loaded, serving, std::move(policy)));
  Recorder recorder(c.batch, profile && !c.prefill ? loaded.backend.get() : nullptr);
  if (profile) loaded.backend->set_profiling(true);
  engine.engine->set_observer(&recorder);
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> token(0, loaded.config.vocab - 1);
  for (int32_t i = 0; i < c.batch; ++i) {
    Request request;
    request.id = std::to_string(i);
    for (int32_t t = 0; t < prompt; ++t) request.prompt.push_back(token(random));
    request.sampling.temperature = 0;
    request.sampling.max_tokens = generate;
    request.sampling.ignore_eos = true;
    NFP_RETURN_IF_ERROR(engine.engine->submit(std::move(request)));
  }
  while (!engine.engine->idle()) {
    for (const RequestOutput& output : engine.engine->step()) {
      if (output.finish == FinishReason::kError) return Error{output.error_code, output.error};
    }
  }
  Measured measured;
  if (c.prefill) {
    measured.tokens_per_s = static_cast<double>(recorder.prefill_tokens) / recorder.prefill_s;
    measured.steps = recorder.prefill_steps;
    measured.step_s = recorder.prefill_s / static_cast<double>(recorder.prefill_steps);
  } else {
    if (recorder.decode.empty()) {
      return error(ErrorCode::kUsage,
                   "batch {}: the first sequence reaches the end of the model's context ({}) before the last prompt is "
                   "computed, so no step decodes all of them; choose a smaller --context or --batch, or more "
                   "--step-tokens than {}",
                   c.batch, loaded.config.max_context, options.max_step_tokens);
    }
    measured.step_s = median(recorder.decode);
    measured.steps = static_cast<int64_t>(recorder.decode.size());
    measured.tokens_per_s = c.batch / measured.step_s;
  }
  return measured;
}

uint64_t step_bytes(LoadedModel& loaded, Precision precision) {
  uint64_t bytes = 0;
  for (const Linear* linear : loaded.model->linears()) bytes += linear->weight->bytes_read(linear->at(precision));
  return bytes;
}

}  // namespace

Result<std::vector<BenchmarkRow>> run_benchmark(LoadedModel& loaded, const BenchmarkOptions& options,
                                                const BenchmarkProgress& progress) {
  if (options.context_needed() > loaded.config.max_context) {
    return error(ErrorCode::kUsage, "this model's context has {} tokens, less than the benchmark would use",
                 loaded.config.max_context);
  }
  std::vector<Case> cases;
  for (Precision precision : options.precisions) cases.push_back({true, 1, precision});
  for (int32_t batch : options.batches) {
    for (Precision precision : options.precisions) cases.push_back({false, batch, precision});
  }
  std::vector<std::vector<double>> rates(cases.size()), steps(cases.size());
  std::vector<std::vector<double>> readable(cases.size()), read_rates(cases.size());  // GB in a step's time, GB/s
  const auto total = static_cast<int32_t>(cases.size()) * options.repeats;
  int32_t done = 0;
  for (int32_t repeat = 0; repeat < options.repeats; ++repeat) {
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      if (progress) {
        progress(fmt::format("{} {} batch {}", c.prefill ? "prefill" : "decode", name_of(c.precision), c.batch), done++,
                 total);
      }
      const double before = options.read_rate ? options.read_rate() : 0;
      NFP_ASSIGN_OR_RETURN(const Measured m, measure(loaded, options, c, static_cast<uint32_t>(repeat)));
      if (options.read_rate) {
        read_rates[i].push_back((before + options.read_rate()) / 2);
        readable[i].push_back(m.step_s * read_rates[i].back());
      }
      rates[i].push_back(m.tokens_per_s);
      steps[i].push_back(m.step_s);
    }
  }
  std::vector<BenchmarkRow> rows;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    BenchmarkRow& row = rows.emplace_back();
    row.test = c.prefill ? "prefill" : "decode";
    row.precision = c.precision;
    row.batch = c.batch;
    row.tokens_per_s = median(rates[i]);
    row.step_ms = median(steps[i]) * 1e3;
    const auto reads = [&](double bytes) {
      if (row.step_ms > 0) row.weight_gb_per_s = bytes / (row.step_ms * 1e-3) / 1e9;
      if (options.read_rate) row.over_reading = median(readable[i]) * 1e9 / bytes;
    };
    if (options.read_rate) row.read_gb_per_s = median(read_rates[i]);
    reads(static_cast<double>(step_bytes(loaded, c.precision)));
    if (!options.stages) continue;
    NFP_ASSIGN_OR_RETURN(const Measured m, measure(loaded, options, c, 0, true));
    row.stages = loaded.backend->profile();
    loaded.backend->set_profiling(false);
    double flops = 0, bytes = 0;
    for (StageTime& time : row.stages) {
      const auto count = static_cast<double>(std::max<int64_t>(1, m.steps));
      time.seconds /= count;
      time.cost.weight_bytes = static_cast<uint64_t>(static_cast<double>(time.cost.weight_bytes) / count);
      time.cost.flops = static_cast<uint64_t>(static_cast<double>(time.cost.flops) / count);
      flops += static_cast<double>(time.cost.flops);
      bytes += static_cast<double>(time.cost.weight_bytes);
    }
    // Where the backend counts what it reads: of experts only those that the step's tokens went to.
    if (bytes > 0) reads(bytes);
    if (row.step_ms > 0) row.gflop_per_s = flops / (row.step_ms * 1e-3) / 1e9;
  }
  return rows;
}

}  // namespace nfp
