// A StepRunner without a model, for tests and load generators: every sequence's next token is a fixed function of its
// tokens so far, so an answer is known in advance whatever the batching, chunking, preemption and precision.
#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "engine/step_runner.h"

namespace nfp {

class ScriptedRunner final : public StepRunner {
 public:
  // The token after these. Default: a mixture of the last token and the length, never ids 0..3.
  using Next = std::function<int32_t(const Sequence&)>;

  ScriptedRunner(int32_t vocab, int32_t max_context, Next next = {}, std::chrono::nanoseconds step_time = {})
      : vocab_(vocab), max_context_(max_context), next_(std::move(next)), step_time_(step_time) {}

  int32_t vocab() const override { return vocab_; }
  int32_t max_context() const override { return max_context_; }
  Status start(const Sequence&) override { return ok_status(); }
  Result<StepOutput> run(const StepPlan& plan, Precision precision) override {
    if (step_time_.count() > 0) std::this_thread::sleep_for(step_time_);
    StepOutput output;
    for (const ScheduledSequence& item : plan.items) {
      if (!item.samples) continue;
      OutputToken& token = output.sampled.emplace_back();
      token.token = next_ ? next_(*item.sequence) : default_next(*item.sequence);
      token.precision = precision;
      token.rank = 1;
    }
    return output;
  }

 private:
  int32_t default_next(const Sequence& sequence) const {
    const auto last = static_cast<uint32_t>(sequence.tokens.back());
    const auto length = static_cast<uint32_t>(sequence.size());
    return static_cast<int32_t>(4 + (last * 31u + length * 7u) % static_cast<uint32_t>(vocab_ - 4));
  }

  int32_t vocab_;
  int32_t max_context_;
  Next next_;
  std::chrono::nanoseconds step_time_;
};

}  // namespace nfp
