#include "eval/step_probe.h"

#include <algorithm>
#include <chrono>
#include <deque>

namespace nfp {
namespace {

// Steps of a kind before one counts where two are in flight: the one before it; at first, where it is captured, those
// in which it is seen, captured and replayed.
constexpr int32_t kUncounted = 1, kUncountedAtFirst = 3;

StepPlan plan_of(std::span<const std::unique_ptr<Sequence>> sequences) {
  StepPlan plan;
  for (const auto& sequence : sequences) {
    const int32_t count = sequence->size() - sequence->computed;
    plan.items.push_back({sequence.get(), sequence->computed, count, /*samples=*/true});
    plan.tokens += count;
    plan.prefill_tokens += count > 1 ? count : 0;
  }
  return plan;
}

}  // namespace

Result<std::unique_ptr<StepProbe>> StepProbe::create(LoadedModel& loaded, EngineConfig config, int64_t kv_tokens) {
  std::unique_ptr<StepProbe> probe(new StepProbe);
  config.kv_bytes = 0;
  config.kv_blocks = static_cast<int32_t>(kv_tokens / config.block_size + config.limits.max_sequences + 1);
  // On a device whatever is free is for the KV cache; there may be less than was asked for.
  if (loaded.backend->memory()) config.kv_blocks = 0;
  NFP_ASSIGN_OR_RETURN(probe->runner_, ModelRunner::create(*loaded.model, std::move(config)));
  probe->captures_ = loaded.backend->prefers_graphs();
  return probe;
}

int32_t StepProbe::blocks_of(const StepTime& shape) const {
  const auto blocks = [&](int32_t tokens) { return (tokens + config().block_size - 1) / config().block_size; };
  return blocks(shape.prefill_context + shape.prefill_tokens) + shape.decode_sequences * blocks(shape.decode_context);
}

bool StepProbe::fits(const StepTime& shape) const {
  return shape.tokens() <= config().limits.max_step_tokens && shape.sequences() <= config().limits.max_sequences &&
         shape.prefill_context + shape.prefill_tokens <= config().max_context &&
         shape.decode_context <= config().max_context && blocks_of(shape) <= config().kv_blocks;
}

std::unique_ptr<Sequence> StepProbe::sequence(int32_t first, int32_t count, int32_t block) const {
  auto made = std::make_unique<Sequence>();
  const int32_t vocab = runner_->vocab(), size = config().block_size;
  for (int32_t t = 0; t < first + count; ++t) made->tokens.push_back((1 + 7919 * (t + block)) % vocab);
  made->request.prompt = made->tokens;
  made->request.sampling.temperature = 0;
  made->computed = made->scheduled = first;
  for (int32_t b = 0; b * size < first + count; ++b) made->blocks.push_back(block + b);
  return made;
}

Status StepProbe::touch(int32_t blocks) {
  while (touched_ < blocks) {
    std::vector<std::unique_ptr<Sequence>> each;
    while (touched_ < blocks && std::ssize(each) < config().limits.max_sequences) {
      each.push_back(sequence(0, 1, touched_++));
    }
    NFP_ASSIGN_OR_RETURN([[maybe_unused]] const auto done, time(plan_of(each), Precision::kFp16, 1));
  }
  return ok_status();
}

Result<std::vector<double>> StepProbe::time(const StepPlan& plan, Precision precision, int32_t count) {
  std::vector<double> seconds;
  std::deque<StepTicket> in_flight;
  auto last = std::chrono::steady_clock::now();
  for (int32_t submitted = 0; std::ssize(seconds) < count;) {
    while (submitted < count && std::ssize(in_flight) < config().steps_in_flight) {
      NFP_ASSIGN_OR_RETURN(const StepTicket ticket, runner_->submit(plan, precision));
      in_flight.push_back(ticket);
      ++submitted;
    }
    NFP_ASSIGN_OR_RETURN([[maybe_unused]] const StepOutput output, runner_->collect(in_flight.front()));
    in_flight.pop_front();
    const auto now = std::chrono::steady_clock::now();
    seconds.push_back(std::chrono::duration<double>(now - last).count());
    last = now;
  }
  return seconds;
}

Result<std::vector<double>> StepProbe::run(const StepTime& shape, const StepLevel& level, int32_t count) {
  if (!fits(shape)) {
    return error(ErrorCode::kResource, "a step of {} tokens behind {} and {} sequences of {} has no room",
                 shape.prefill_tokens, shape.prefill_context, shape.decode_sequences, shape.decode_context);
  }
  NFP_RETURN_IF_ERROR(touch(blocks_of(shape)));
  std::vector<std::unique_ptr<Sequence>> sequences;
  int32_t block = 0;
  const auto add = [&](int32_t first, int32_t tokens) {
    sequences.push_back(sequence(first, tokens, block));
    block += static_cast<int32_t>(sequences.back()->blocks.size());
  };
  for (int32_t i = 0; i < shape.decode_sequences; ++i) add(shape.decode_context - 1, 1);
  if (shape.prefill_tokens > 0) add(shape.prefill_context, shape.prefill_tokens);
  StepPlan plan = plan_of(sequences);
  plan.fp8_share = level.fp8_share;
  int32_t warm = 0;
  if (captures_) {
    const bool captured = shape.prefill_tokens == 0;
    const bool first =
        captured && met_.emplace(shape.decode_sequences, shape.decode_context, level.precision, level.fp8_share).second;
    warm = first ? kUncountedAtFirst : kUncounted;
  }
  NFP_ASSIGN_OR_RETURN(std::vector<double> seconds, time(plan, level.precision, warm + count));
  seconds.erase(seconds.begin(), seconds.begin() + warm);
  return seconds;
}

}  // namespace nfp
