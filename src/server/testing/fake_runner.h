// A model that costs nothing, for tests and load programs of the server. It answers with
//   - the text after the last "SAY:" of the prompt, up to the next line break or special token, then end of text;
//   - after "HOW?" at its end: how it is sampled ("temperature 1 top_k 0");
//   - where there is none, the alphabet over and over: position p gives 'a' + p % 26, for ever.
// What a request's grammar, allowed_token_ids or bad_words forbid is replaced by the first token that is.
#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <vector>

#include "engine/step_runner.h"
#include "server/testing/byte_tokenizer.h"

namespace nfp::server {

class FakeRunner final : public StepRunner {
 public:
  struct Options {
    int32_t max_context = 4096;
    // Steps end on this grid, so that each sequence gets a token every period; 0 = as fast as possible.
    std::chrono::microseconds period{0};
    std::chrono::microseconds per_token{0};  // additional time for each token of a step
    int32_t fp8_says = 0;                    // tenth token of answers in FP8 steps; 0 = the same as in FP16
    int32_t fails_after = 0;                 // steps, after which the device is lost; 0 = never
    bool throws = false;                     // an exception then
    int32_t drafts = 0;                      // of each item at most; 0, 1, 2, ... of them are right in turn
  };
  explicit FakeRunner(Options options) : options_(options) {}

  int32_t vocab() const override { return kByteVocab; }
  int32_t max_context() const override { return options_.max_context; }
  // A token's hidden state: itself, its position, 1, and zeros.
  int32_t hidden() const override { return 8; }
  int32_t max_drafts(int32_t) const override { return options_.drafts; }
  Status start(const Sequence&) override { return ok_status(); }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override;
  Result<StepOutput> collect(StepTicket ticket) override;

  // Token of the answer at this position.
  static int32_t answer(const Sequence& sequence, int32_t position);

 private:
  Options options_;
  std::chrono::steady_clock::time_point next_{};
  StepOutput submitted_;
  std::deque<std::vector<float>> states_;  // that `submitted_`, or what was collected last, refers to
  int32_t tokens_ = 0;                     // of the step submitted
  int32_t right_drafts_ = 0;               // of the next item that has so many
  StepTicket tickets_ = 0;
};

}  // namespace nfp::server
