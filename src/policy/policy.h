// Which precision the next step is computed in and, for policies that plan, which tokens of which sequences. Pure:
// numbers in, a decision out, so policies are tested in microseconds and replayed on traces.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "nested/precision.h"
#include "policy/step_model.h"

namespace nfp {

// What a policy may know about the step that is about to run.
struct StepLoad {
  int32_t step_tokens = 0;     // tokens that the step will compute
  int32_t prefill_tokens = 0;  // of these, tokens of prompts
  int32_t running = 0;         // sequences in the step
  int32_t waiting = 0;         // requests not yet admitted
  double kv_use = 0;           // share of KV blocks in use, 0..1
  double recent_tpot_s = 0;    // recent time per output token, seconds (exponential mean; 0 = none yet)
  double recent_ttft_s = 0;    // recent time to first token, seconds (likewise)
  uint64_t step_index = 0;     // steps run so far
};

// One request as a policy that plans sees it. Times are seconds on the clock of StepState::now_s.
struct SequenceState {
  uint64_t serial = 0;  // its own; larger than those of all that were there before it
  // Tokens in the KV cache, those of steps in flight too; of a waiting one, about, those that the prefix cache has or
  // gets from a prompt before it.
  int32_t context = 0;
  int32_t missing = 0;  // tokens to compute before its next one is sampled; 1 where it decodes
  int32_t emitted = 0;  // tokens sampled so far, those of steps in flight too
  bool running = false;
  bool started = false;  // it runs, or did before preemption took what was computed of it
  bool ready = true;     // false: it waits for something else (a step in flight, a grammar)
  bool exact = false;
  int32_t priority = 0;  // lower goes first
  double arrival_s = 0;
  double ttft_s = 0;  // target: arrival to first token
  double itl_s = 0;   // target: from token to token
  double due_s = 0;   // when the next token is due
  double last_s = 0;  // when it had its last one, where there is one
};

struct StepState {
  double now_s = 0;         // when the step will start
  int32_t steps_ahead = 0;  // steps that are planned while others run: whoever comes waits for these too
  std::span<const SequenceState> sequences;  // running ones first, each kind by priority, then arrival
  int32_t max_step_tokens = 0;
  int32_t max_sequences = 0;  // running at once
  int64_t free_tokens = 0;    // room in the KV cache
};

struct StepChunk {
  size_t sequence = 0;  // index into StepState::sequences
  int32_t tokens = 0;   // at most `missing`
};

// Why a step is computed at another level than the one before it.
enum class LevelChange : uint8_t {
  kNone,
  kFirstTokens,  // a prompt would miss its deadline, or a typical one that came now would
  kPace,         // a decoding sequence would get its next token late
  kRoom,         // deadlines are kept with less FP8, and room to spare
  kRule,         // of a policy that does not plan
  kRequests,     // what the step's requests asked for: exact, or fast
};
inline constexpr std::array<std::string_view, 6> kLevelChangeNames = {"none", "first_tokens", "pace",
                                                                      "room", "rule",         "requests"};

struct StepDecision {
  Precision precision = Precision::kFp16;
  double fp8_share = 0;                     // of the weights, 0 in FP16
  bool exact_singles = false;               // chunks of one token stay in FP16, in a launch of their own
  std::vector<StepChunk> chunks;            // the most urgent first, no sequence twice; may be empty
  std::vector<size_t> lost;                 // sequences whose deadline cannot be kept, whatever is done
  std::vector<size_t> shed;                 // of these, waiting ones that are to be refused
  std::vector<size_t> hopeless;             // of these, those that would be late alone, too
  double busy_s = 0;                        // until the prompts that are there are done, about
  double predicted_s = 0;                   // how long the step takes; 0 = not known
  LevelChange change = LevelChange::kNone;  // from the last decision
};

class PrecisionPolicy {
 public:
  virtual ~PrecisionPolicy() = default;
  virtual std::string name() const = 0;  // as parse_policy takes it
  virtual Precision choose(const StepLoad& load) = 0;
  // Of the linear layers' weights that a step with this load computes in FP8, where FP8 is what was chosen: 0..1. Which
  // ones is the model's order of sensitivity (Linear::fp8_from).
  virtual double fp8_share(const StepLoad&) { return 1.0; }
  // Shares between 0 and 1 occur: the model needs an order of sensitivity.
  virtual bool needs_sensitivity() const { return false; }
  // The operator fixed one precision: requests that merely prefer FP8 do not get it.
  virtual bool fixed() const { return false; }
  // Whether decide() chooses tokens and precision together. Otherwise the scheduler takes tokens first come, first
  // served, and choose() sees the step that came of it.
  virtual bool plans() const { return false; }
  virtual StepDecision decide(const StepState&) { return {}; }
  // Told of each step that ran.
  virtual void observe(Precision precision, double fp8_share, const StepWork& work, double seconds) {
    if (watched_by_) watched_by_->observe(watched_by_->find_level(precision, fp8_share), work, seconds);
  }
  // What predicts its steps' times; null where nothing does.
  virtual const StepModel* model() const { return watched_by_ ? &*watched_by_ : nullptr; }
  // Steps of a policy that decides without predictions are predicted all the same, for those who look on: targets that
  // follow from what a request takes alone, the step log, metrics.
  void watch_by(StepModel model) { watched_by_ = std::move(model); }

 private:
  std::optional<StepModel> watched_by_;
};

// "fp16", "fp8", "fp8-w8a8": always that.
// "threshold:N": FP8 when the step has more than N tokens (NestedFP, NeurIPS 2025, section 5.3).
// "alternate:N": changes between FP16 and FP8 every N steps (for tests and demonstrations).
// "graded:LOW:HIGH": FP16 up to LOW tokens in the step, then FP8 in a share of the weights that grows with the tokens
// and reaches all of them at HIGH: as much precision as the load leaves room for. `fp8` says which FP8 arithmetic the
// last three use. Where not `shares`, an error does not offer the last, which the caller then refuses.
Result<std::unique_ptr<PrecisionPolicy>> parse_policy(std::string_view text, Precision fp8 = Precision::kFp8,
                                                      bool shares = true);

}  // namespace nfp
