// The engine: requests join and leave at every step (continuous batching), each step in the precision that the policy
// chooses.
//
// Engine is single-threaded: whoever owns it calls step() until idle(). EngineThread (engine_thread.h) runs one on a
// thread of its own behind bounded queues, for servers.
//
//   Engine engine(config, runner, tokenizer, policy);
//   engine.submit(std::move(request));
//   while (!engine.idle()) for (RequestOutput& out : engine.step()) ...
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "engine/block_manager.h"
#include "engine/engine_config.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/step_runner.h"
#include "policy/draft_length.h"
#include "policy/policy.h"
#include "text/tokenizer.h"

namespace nfp {

using EngineClock = std::chrono::steady_clock;

// What one step did.
struct StepRecord {
  uint64_t index = 0;
  Precision precision = Precision::kFp16;
  bool switched = false;                    // precision or share of FP8 differs from the step before
  LevelChange change = LevelChange::kNone;  // why, where it does
  int32_t tokens = 0;                       // computed, drafts that were right included
  int32_t prefill_tokens = 0;
  int32_t sequences = 0;
  int32_t waiting = 0;
  int32_t preempted = 0;
  StepWork work;             // what its time depends on
  double kv_use = 0;         // after the step
  double fp8_share = 0;      // of the weights computed in FP8
  int32_t drafted = 0;       // tokens drafted in FP8 and verified in this step
  int32_t accepted = 0;      // of these, those that were right
  int32_t exact_tokens = 0;  // of `tokens`, those that an FP8 step computed in FP16 (StepPlan::exact_singles)
  double predicted_s = 0;    // by the policy, before it ran; 0 = it did not
  double table_s = 0;        // by the measured table alone, without what was learnt since; 0 = there is none
  int32_t lost = 0;          // requests whose deadline could not be kept when it was planned
  double oldest_wait_s = 0;  // of a request without its first token, when it was planned
  EngineClock::time_point start;
  double seconds = 0;
  // Of the thread that steps the engine; what other steps in flight need of it is not in these.
  double submit_s = 0;  // choosing the step's tokens and precision, preparing and enqueueing it
  double wait_s = 0;    // waiting until it was done: next to nothing where the device was done first
  double output_s = 0;  // taking its tokens, ending requests
  // From the moment that the step before was done, or that there was something to do, to waiting for this one: all that
  // requests ask of that thread. Where several steps are in flight the device computes meanwhile.
  double between_s = 0;
};

// What one request went through. Times in seconds; zero where it did not get that far.
struct RequestRecord {
  std::string id;
  FinishReason finish = FinishReason::kStop;
  Usage usage;
  int32_t max_tokens = 0;  // as asked (or the room there was)
  double queue_s = 0;      // arrival to first being scheduled, or to its end where it never was
  double prefill_s = 0;    // first scheduled to first token
  double decode_s = 0;     // first token to last token
  double ttft_s = 0;       // arrival to first token
  double e2e_s = 0;        // arrival to end
  int32_t preemptions = 0;
  double ttft_target_s = 0;
  double itl_target_s = 0;   // mean time between tokens
  double longest_gap_s = 0;  // between two tokens
  bool own_targets = false;  // the request named one
  bool attained = false;     // both targets were met, to the last token; of prompt_only, its end as a first token
  bool prompt_only = false;  // it gave what it wanted of its prompt (hidden states, logprobs), and no answer
  bool shed = false;         // refused, as its first token could not come in time
};

// Told of what happens, on the engine's thread; must return quickly and not call the engine.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void on_step(const StepRecord&) {}
  virtual void on_token_gap(double seconds) { (void)seconds; }  // inter-token latency of one request
  // TTFT of one request that wants an answer, and how long its prompt is.
  virtual void on_first_token(double seconds, int32_t prompt_tokens) { (void)seconds, (void)prompt_tokens; }
  virtual void on_finished(const RequestRecord&) {}
};

struct EngineStats {
  int32_t running = 0;
  int32_t waiting = 0;
  int32_t kv_blocks = 0;
  int32_t kv_blocks_used = 0;
  int32_t block_size = 0;
  uint64_t steps = 0;
  uint64_t steps_by_precision[kPrecisionCount] = {};
  uint64_t tokens_by_precision[kPrecisionCount] = {};
  uint64_t precision_switches = 0;
  uint64_t drafts = 0;  // one a sequence and step with draft tokens,
  uint64_t drafted_tokens = 0;
  uint64_t accepted_tokens = 0;
  uint64_t preemptions = 0;
  uint64_t prefix_queries = 0;  // tokens
  uint64_t prefix_hits = 0;     // tokens
  CapturedUse captured;
};

class Engine {
 public:
  // `config` needs its kv_blocks (ModelRunner::config() has them). `tokenizer` may be null: outputs then carry tokens
  // without text and stop strings are refused.
  Engine(EngineConfig config, StepRunner* runner, std::shared_ptr<const Tokenizer> tokenizer,
         std::unique_ptr<PrecisionPolicy> policy);
  ~Engine();

  // kInvalidInput: a bad parameter, an empty or too long prompt, a token id out of range, an id already in flight.
  // kResource: the queue is full. The request is not taken in either case.
  Status submit(Request request);
  // Ends a request; its last output (kCancelled) comes with the next step(). False when there is none of that id.
  bool cancel(const std::string& id);

  bool idle() const;
  // Submits steps as long as another may be in flight, and returns what the oldest one gave. Where the backend failed,
  // the requests of the step end with kError.
  std::vector<RequestOutput> step();

  // Between steps.
  void set_policy(std::unique_ptr<PrecisionPolicy> policy);
  void set_observer(EngineObserver* observer) { observer_ = observer; }  // null = none
  // Set once the device has failed for good: all requests have ended with it, and new ones are refused.
  const std::optional<Error>& device_failure() const { return device_failure_; }
  EngineStats stats() const;
  // What the model and the KV cache allow a request.
  RequestBounds bounds() const;
  const EngineConfig& config() const { return config_; }
  const PrecisionPolicy& policy() const { return *policy_; }

 private:
  struct Entry;  // a request in flight: its sequence and its output side
  struct Step {  // a step in flight
    StepTicket ticket = 0;
    StepPlan plan;  // an item's sequence is null once its request has ended
    Precision precision = Precision::kFp16;
    StepWork work;
    StepRecord record;
    Precision of(const ScheduledSequence& item) const {
      return plan.exact_singles && item.count == 1 ? Precision::kFp16 : precision;
    }
  };

  EngineClock::time_point now() const { return config_.now ? config_.now() : EngineClock::now(); }
  void set_targets(Sequence& sequence) const;
  // Tokens and precision of the next step as a planning policy wants them.
  StepPlan plan_step(StepRecord& record, std::vector<RequestOutput>& outputs);

  // Takes sequences out of the plan whose grammars still work out what may come next: they are planned again.
  void leave_out_unready(StepPlan& plan);
  // `change` becomes kRequests where the step's requests decide.
  Precision choose_precision(StepPlan& plan, LevelChange& change);
  // Settles whether single tokens are computed apart, and in what the rest is.
  Precision part_singles(StepPlan& plan, Precision precision);
  double share_level(double share) const;
  // Whether there are requests that would wait for a step with drafts longer than for a plain one: in the queue, or
  // left out of this step, which others have as their turn.
  bool others_wait(const StepPlan& plan) const {
    const bool all = scheduler_.waiting() == 0 && static_cast<int32_t>(plan.items.size()) == scheduler_.running();
    return !all && !config_.speculative_always;
  }
  // How many tokens a step of these, which all decode, is to draft for each that may.
  int32_t draft_length(const std::vector<ScheduledSequence>& items) const;
  // Whether the next step is likely to draft: it is then planned once the one in flight is done.
  bool will_draft() const;
  // Gives the step's items drafts, where that is worth it.
  void add_drafts(Step& step);
  // Of a collected step: what was learnt about drafts.
  void count_drafts(const Step& step, const StepOutput& result, StepRecord& record);
  // Those that cannot start end in `outputs`. Error: the device is gone.
  Status start_sequences(StepPlan& plan, std::vector<RequestOutput>& outputs);
  // False where there is nothing to submit. Requests that fail end in `outputs`.
  bool submit_step(std::vector<RequestOutput>& outputs);
  void collect_step(std::vector<RequestOutput>& outputs);
  // Ends the requests of the step, or where the device is gone all of them.
  void fail(const StepPlan& plan, const Error& error, std::vector<RequestOutput>& outputs);
  // Of a step with drafts that failed, whose items are planned again. It may be the drafts' doing, as their numbers are
  // not those that the requests asked for: they get none from now on. What the step counted of them counts no more.
  void forgo_drafts(StepPlan& plan, std::vector<RequestOutput>& outputs);
  void end_with(const std::string& id, const Error& error, std::vector<RequestOutput>& outputs);
  void account(Entry& entry, const ScheduledSequence& item, Precision precision);
  void take_prompt_logprobs(Entry& entry, const ScheduledSequence& item, std::vector<OutputToken>&& logprobs);
  // Appends a sampled token; the request may end by it.
  void take_token(Entry& entry, OutputToken token, RequestOutput& output);
  void end(Entry& entry, FinishReason reason, RequestOutput& output);
  void remove(const std::string& id);
  void free_slot(Sequence& sequence);

  EngineConfig config_;
  StepRunner* runner_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<PrecisionPolicy> policy_;
  EngineObserver* observer_ = nullptr;
  BlockManager blocks_;
  Scheduler scheduler_;
  std::unordered_map<std::string, std::unique_ptr<Entry>> entries_;
  std::unordered_map<const Sequence*, Entry*> by_sequence_;
  std::multiset<EngineClock::time_point> without_token_;  // arrivals of requests that have no first token yet
  std::vector<RequestOutput> ended_;                      // outputs of requests that ended between steps
  std::vector<int32_t> free_slots_;                       // of the runner's token history
  std::deque<Step> in_flight_;
  EngineClock::time_point last_collected_;
  EngineClock::time_point busy_since_;  // StepRecord::between_s begins here
  DraftLength draft_length_;
  uint64_t next_serial_ = 0;
  bool exact_turn_ = true;  // when the policy wants FP8 and both kinds are there: whose turn it is
  double recent_tpot_s_ = 0;
  double recent_ttft_s_ = 0;
  EngineStats totals_;
  std::optional<Error> device_failure_;
  std::optional<StepLevel> last_level_;  // of the last step submitted
};

}  // namespace nfp
