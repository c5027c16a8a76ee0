#include "eval/step_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace nfp {
namespace {

constexpr int32_t kWarmSteps = 3;  // of a kind: seen, captured, replayed

class Measurement {
 public:
  Measurement(BenchEngine& engine, const StepTimesOptions& options, const StepTimesCallback& on_done)
      : engine_(engine), options_(options), on_done_(on_done) {}

  Result<StepTable> run() {
    describe();
    for (const int32_t tokens : options_.prefill) NFP_RETURN_IF_ERROR(prefill(tokens));
    for (const int32_t context : options_.contexts) {
      for (const int32_t sequences : options_.sequences) NFP_RETURN_IF_ERROR(decode(sequences, context));
    }
    return std::move(table_);
  }

 private:
  void describe() {
    LoadedModel& loaded = engine_.loaded();
    table_.model = loaded.name;
    table_.device = loaded.backend->info().device;
    table_.weight_bytes = static_cast<int64_t>(loaded.model->weight_bytes());
    table_.max_step_tokens = engine_.config().limits.max_step_tokens;
    table_.max_sequences = engine_.config().limits.max_sequences;
    table_.kv_dtype = name_of(engine_.config().kv_dtype);
    table_.steps_in_flight = engine_.config().steps_in_flight;
    for (const BenchLevel& level : options_.levels) {
      const Precision precision = engine_.computed(level.precision);
      table_.levels.push_back({precision, is_exact(precision) ? 0.0 : level.fp8_share});
    }
  }

  void add(const StepTime& shape, const std::vector<double>& seconds) {
    if (seconds.empty() || has(shape)) return;
    StepTime& step = table_.steps.emplace_back(shape);
    step.ms = median(seconds) * 1e3;
    step.samples = static_cast<int32_t>(seconds.size());
    if (on_done_) {
      on_done_(fmt::format("{:<14} prefill {:>5} (after {:>5})  decode {:>4} (context {:>6})  {:.3f} ms",
                           table_.levels[step.level].name(), step.prefill_tokens, step.prefill_context,
                           step.decode_sequences, step.decode_context, step.ms));
    }
  }

  Status prefill(int32_t tokens) {
    std::vector<std::map<int32_t, std::vector<double>>> chunks(options_.levels.size());  // by context before
    std::vector<std::map<int32_t, int32_t>> sizes(options_.levels.size());
    const std::vector<BenchRequest> request = {{tokens, 1}};
    for (int32_t repeat = -1; repeat < options_.repeats; ++repeat) {
      for (size_t level = 0; level < options_.levels.size(); ++level) {
        const auto seed = static_cast<uint32_t>(repeat + 1);
        NFP_ASSIGN_OR_RETURN(const BenchRun run, engine_.run(request, options_.levels[level], seed));
        if (repeat < 0) continue;  // warms up
        int32_t before = 0;
        for (const StepRecord& step : run.steps) {
          chunks[level][before].push_back(step.seconds);
          sizes[level][before] = step.tokens;
          before += step.tokens;
        }
      }
    }
    for (size_t level = 0; level < chunks.size(); ++level) {
      for (const auto& [before, seconds] : chunks[level]) {
        add({level, sizes[level][before], before}, seconds);
      }
    }
    return ok_status();
  }

  // A table has no kind of step twice.
  bool has(const StepTime& shape) const {
    return std::any_of(table_.steps.begin(), table_.steps.end(), [&](StepTime step) {
      step.ms = shape.ms, step.samples = shape.samples;
      return step == shape;
    });
  }

  // One batch is filled once; its sequences then decode at every level, alone and beside prompts.
  Status decode(int32_t sequences, int32_t context) {
    engine_.begin(1);
    engine_.set_level(options_.levels.front());
    const int32_t output = engine_.config().max_context - context;
    for (int32_t i = 0; i < sequences; ++i) NFP_RETURN_IF_ERROR(engine_.submit({context, output}));
    while (engine_.steps().empty() || !decodes(engine_.steps().back(), sequences)) {
      if (!engine_.steps().empty() && engine_.steps().back().preempted > 0) return no_room(sequences, context);
      NFP_RETURN_IF_ERROR(engine_.step());
      if (engine_.idle()) return no_room(sequences, context);
    }
    for (size_t level = 0; level < options_.levels.size(); ++level) {
      engine_.set_level(options_.levels[level]);
      const int32_t start = decoded_;
      NFP_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                           collect(level, {level, 0, 0, sequences, 0}, kWarmSteps, options_.decode_steps));
      const int32_t mean_context = context + start + kWarmSteps + options_.decode_steps / 2;
      add({level, 0, 0, sequences, mean_context}, seconds);
      for (const int32_t tokens : options_.mixed) {
        if (sequences + tokens > engine_.config().limits.max_step_tokens) continue;
        const int32_t before = decoded_;
        NFP_ASSIGN_OR_RETURN(const std::vector<double> both,
                             collect(level, {level, tokens, 0, sequences, 0}, 1, options_.repeats));
        add({level, tokens, 0, sequences, context + (before + decoded_) / 2}, both);
      }
    }
    return drain();
  }

  static bool decodes(const StepRecord& step, int32_t sequences) {
    return step.prefill_tokens == 0 && step.sequences == sequences;
  }

  // Seconds of `count` steps of this shape, after `warm` of them.
  Result<std::vector<double>> collect(size_t level, const StepTime& shape, int32_t warm, int32_t count) {
    std::vector<double> seconds;
    const StepLevel& wanted = table_.levels[level];
    // Steps in flight were planned at the level before, and prompts come in one step in two.
    const int32_t patience = 8 + 4 * (warm + count);
    size_t seen = engine_.steps().size();
    bool prompt_waits = false;
    for (int32_t tries = 0; std::ssize(seconds) < warm + count && tries < patience; ++tries) {
      if (shape.prefill_tokens > 0 && !prompt_waits) {
        NFP_RETURN_IF_ERROR(engine_.submit({shape.prefill_tokens, 1}));
        prompt_waits = true;
      }
      NFP_RETURN_IF_ERROR(engine_.step());
      for (; seen < engine_.steps().size(); ++seen) {
        const StepRecord& step = engine_.steps()[seen];
        ++decoded_;
        if (step.prefill_tokens > 0) prompt_waits = false;
        const bool same = step.precision == wanted.precision && std::abs(step.fp8_share - wanted.fp8_share) < 0.006 &&
                          step.prefill_tokens == shape.prefill_tokens && step.sequences == shape.sequences();
        if (same) seconds.push_back(step.seconds);
      }
    }
    seconds.erase(seconds.begin(), seconds.begin() + std::min<std::ptrdiff_t>(warm, std::ssize(seconds)));
    return seconds;
  }

  Status no_room(int32_t sequences, int32_t context) {
    if (on_done_)
      on_done_(fmt::format("{} sequences of {} tokens: no room in the KV cache, left out", sequences, context));
    return drain();
  }

  Status drain() {
    decoded_ = 0;
    engine_.cancel_all();
    while (!engine_.idle()) NFP_RETURN_IF_ERROR(engine_.step());
    return ok_status();
  }

  BenchEngine& engine_;
  const StepTimesOptions& options_;
  const StepTimesCallback& on_done_;
  StepTable table_;
  int32_t decoded_ = 0;  // tokens of each sequence of the batch, about
};

}  // namespace

int32_t StepTimesOptions::context_needed() const {
  const auto most = [](const std::vector<int32_t>& values) {
    return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  };
  // What collect() takes at most at each level.
  const auto kinds = static_cast<int32_t>(mixed.size());
  const int32_t level_steps = 8 + 4 * (kWarmSteps + decode_steps) + kinds * (8 + 4 * (1 + repeats));
  const int32_t decoded = most(contexts) + static_cast<int32_t>(levels.size()) * level_steps + 8;
  return std::max({most(prefill), most(mixed), decoded}) + 1;
}

int32_t StepTimesOptions::sequences_needed() const {
  const int32_t most = sequences.empty() ? 1 : *std::max_element(sequences.begin(), sequences.end());
  return most + (mixed.empty() ? 0 : 1);
}

Result<StepTable> measure_step_times(BenchEngine& engine, const StepTimesOptions& options,
                                     const StepTimesCallback& on_done) {
  return Measurement(engine, options, on_done).run();
}

}  // namespace nfp
