// A StepRunner without a model, for tests and load generators: every sequence's next token is a fixed function of its
// tokens so far, so an answer is known in advance whatever the batching, chunking, preemption, precision and drafts.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "engine/step_runner.h"

namespace nfp {

// What a sequence is when its next token is chosen.
struct ScriptedState {
  std::span<const int32_t> tokens;
  int32_t prompt_size = 0;
  int32_t output_size() const { return static_cast<int32_t>(tokens.size()) - prompt_size; }
};

class ScriptedRunner final : public StepRunner {
 public:
  // The token after these. Default: a mixture of the last token and the length, never ids 0..3.
  using Next = std::function<int32_t(const ScriptedState&)>;
  // Whether a draft of the token after these is right.
  using Right = std::function<bool(const ScriptedState&)>;

  ScriptedRunner(int32_t vocab, int32_t max_context, Next next = {}, std::chrono::nanoseconds step_time = {})
      : vocab_(vocab), max_context_(max_context), next_(std::move(next)), step_time_(step_time) {}

  // From now on items may have so many drafts; without `right` all of them are right.
  void draft(int32_t most, Right right = {}) {
    max_drafts_ = most;
    right_ = std::move(right);
  }

  int32_t vocab() const override { return vocab_; }
  int32_t max_context() const override { return max_context_; }
  int32_t max_in_flight() const override { return 2; }
  int32_t max_drafts(int32_t) const override { return max_drafts_; }
  // A hidden state is (token, position).
  int32_t hidden() const override { return 2; }
  Status start(const Sequence&) override { return ok_status(); }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    StepOutput output;
    std::vector<int32_t> row;
    const bool drafts = plan.drafts() > 0;
    for (const ScheduledSequence& item : plan.items) {
      add_hidden(item, output);
      if (!item.samples) continue;
      std::vector<int32_t> tokens = item.sequence->tokens;
      if (item.source >= 0) tokens.back() = previous_.at(static_cast<size_t>(item.source));
      const int32_t prompt = item.sequence->prompt_size();
      output.sampled.push_back(after({tokens, prompt}, precision));
      row.push_back(output.sampled.back().token);
      if (drafts) output.accepted.emplace_back();
      for (int32_t d = 0, last = row.back(); d < item.drafts; ++d) {
        if (right_ && !right_({tokens, prompt})) break;
        tokens.push_back(last);
        output.accepted.back().push_back(after({tokens, prompt}, precision));
        last = output.accepted.back().back().token;
      }
    }
    previous_ = std::move(row);
    in_flight_.push_back(std::move(output));
    return next_ticket_++;
  }
  Result<StepOutput> collect(StepTicket ticket) override {
    if (ticket + in_flight_.size() != next_ticket_) {
      return error(ErrorCode::kUsage, "step {} is not the oldest in flight", ticket);
    }
    if (step_time_.count() > 0) std::this_thread::sleep_for(step_time_);
    StepOutput output = std::move(in_flight_.front());
    in_flight_.pop_front();
    return output;
  }

 private:
  void add_hidden(const ScheduledSequence& item, StepOutput& output) {
    const int32_t count = pooled_rows(item), first = item.first + item.count - count;
    std::vector<float>& values = states_.emplace_back();
    for (int32_t position = first; position < first + count; ++position) {
      values.push_back(static_cast<float>(item.sequence->tokens[static_cast<size_t>(position)]));
      values.push_back(static_cast<float>(position));
    }
    output.hidden.push_back({values.data(), DType::kF32, 2, first, count});
    while (states_.size() > kKeptStates) states_.pop_front();
  }

  static constexpr size_t kKeptStates = 4096;  // items; more than two steps have

  OutputToken after(const ScriptedState& state, Precision precision) const {
    OutputToken token;
    token.token = next_ ? next_(state) : default_next(state);
    token.precision = precision;
    token.rank = 1;
    return token;
  }

  int32_t default_next(const ScriptedState& state) const {
    const auto last = static_cast<uint32_t>(state.tokens.back());
    const auto length = static_cast<uint32_t>(state.tokens.size());
    return static_cast<int32_t>(4 + (last * 31u + length * 7u) % static_cast<uint32_t>(vocab_ - 4));
  }

  int32_t vocab_;
  int32_t max_context_;
  Next next_;
  int32_t max_drafts_ = 0;
  Right right_;
  std::chrono::nanoseconds step_time_;
  std::vector<int32_t> previous_;  // tokens of the step submitted last
  std::deque<StepOutput> in_flight_;
  std::deque<std::vector<float>> states_;  // a deque: what is in it stays where it is
  StepTicket next_ticket_ = 0;
};

}  // namespace nfp
