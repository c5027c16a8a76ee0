// Runs planned steps on a model: turns a StepPlan into a StepInput, runs the layers, samples on the device and brings
// the tokens back. Up to two steps are in flight: the second is planned and enqueued while the first runs, its tokens
// read where the first one leaves them. One upload before a step, one download after it, no wait in between.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "engine/batch.h"
#include "engine/captured_steps.h"
#include "engine/engine_config.h"
#include "engine/step_runner.h"
#include "model/model.h"
#include "model/overflow.h"

namespace nfp {

// 1, 2, 4, 8, then every 8 up to 256 and every 32 beyond, ending in max_sequences.
std::vector<int32_t> default_graph_sizes(int32_t max_sequences);

// Limits that are 0 become the backend's.
void set_defaults(SchedulerLimits& limits, const Backend& backend);

class ModelRunner final : public StepRunner {
 public:
  // The model must outlive the runner. Error: a context that the model does not have, a KV cache without a block.
  static Result<std::unique_ptr<ModelRunner>> create(Model& model, EngineConfig config);

  int32_t vocab() const override { return model_.config().vocab; }
  int32_t max_context() const override { return config_.max_context; }
  int32_t hidden() const override { return model_.config().hidden; }
  int32_t max_in_flight() const override { return kInFlight; }
  int32_t max_drafts(int32_t sequences) const override {
    return std::min(config_.speculative_tokens, launch_sequences_ / sequences - 1);
  }
  Precision computed(Precision asked) const override { return computed_precision(model_.backend(), asked); }
  Status start(const Sequence& sequence) override;
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override;
  Result<StepOutput> collect(StepTicket ticket) override;
  Error overflow(std::string_view results) const override { return overflow_error(model_, results); }

  size_t kv_bytes() const { return cache_->bytes(); }
  // As given, with all that was left open decided: context, KV blocks, steps in flight.
  const EngineConfig& config() const { return config_; }
  CapturedUse captured() const override { return {captured_.count(), captured_.bytes()}; }

 private:
  static constexpr int kInFlight = 2;
  static constexpr uint64_t kGraphBytes = uint64_t{512} << 20;  // of device memory for captured steps
  struct Sampled {                                              // a row, as collect() needs it
    Precision precision = Precision::kFp16;
    bool logprobs = false;
    int32_t top_n = 0;
    bool has_choice = true;  // some token may be sampled, whatever the logits are
  };
  struct Scored {  // an item's prompt tokens
    Precision precision = Precision::kFp16;
    size_t item = 0;
    int32_t count = 0;
    int32_t top_n = 0;
  };
  struct Pooled {  // an item's hidden states
    size_t item = 0;
    int32_t first = 0;  // position of the first one's token
    int32_t count = 0;
  };
  struct Verified {  // an item's draft tokens
    size_t row = 0;  // what is sampled behind its first token; behind its drafts in the rows after it
    int32_t drafts = 0;
    std::array<int32_t, kMaxDrafts> draft_row = {};  // the draft's, in the launch that drafted it
  };
  // A step in flight, and the host memory that its results come to.
  struct Slot {
    Buffer sampled, top;        // as sampled_ and top_
    Buffer scored, scored_top;  // as scored_ and scored_top_
    Buffer hidden;              // [rows, hidden] of activation_dtype(); grows as steps ask for more
    std::unique_ptr<Event> done;
    size_t items = 0;
    size_t scored_rows = 0, hidden_rows = 0;  // of launches so far
    std::vector<Sampled> rows;
    std::vector<Scored> scores;
    std::vector<Pooled> pooled;
    std::vector<Verified> verified;  // of each item, where the step has drafts
    int32_t drafts = 0;              // launches that drafted
    int32_t top_n = 0;               // of scored_top
  };

  ModelRunner(Model& model, EngineConfig config) : model_(model), config_(std::move(config)) {}
  Status prepare();
  int64_t blocks_of(int64_t tokens) const { return (tokens + config_.block_size - 1) / config_.block_size; }
  // Of a KV cache whose size in blocks is not given.
  Result<int64_t> choose_kv_blocks() const;
  Result<int64_t> blocks_that_fit(const DeviceMemory& memory, uint64_t block_bytes) const;
  // Some of a plan's items, that one launch computes; `first` is the index of the first.
  struct Part {
    std::span<const ScheduledSequence> items;
    size_t first = 0;
    Precision precision = Precision::kFp16;
    double fp8_share = 1.0;
    bool drafts = false;      // what is sampled stays on the device, for a launch after it
    bool fresh_keys = false;  // as BatchView has it
  };
  StepShape shape_of(const Part& part) const;
  Status enqueue_step(const StepPlan& plan, Precision precision);
  void take_results(const Slot& slot, StepOutput& output) const;
  // The launches that draft, then the one that verifies.
  Status submit_drafts(const StepPlan& plan, Slot& slot);
  Status submit_part(const Part& part, int host_slot, Slot& slot);
  void add_samples(const ScheduledSequence& item, int32_t last_row, const Part& part, Slot& slot);
  void add_scores(const ScheduledSequence& item, size_t index, int32_t last_token_row, Precision precision, Slot& slot);
  void add_hidden(const ScheduledSequence& item, size_t index, int32_t last_token_row, Slot& slot);
  // Where a launch's rows begin among those of its step.
  struct FirstRows {
    int32_t sampled = 0, scored = 0;
  };
  // Enqueues a launch, or replays it.
  Status launch(const StepShape& shape, FirstRows first, int32_t top_n);
  void enqueue(const StepShape& shape, FirstRows first, int32_t top_n);
  void enqueue_downloads(Slot& slot);
  void enqueue_hidden(const StepShape& shape, Slot& slot);
  size_t hidden_row_bytes() const;

  Model& model_;
  EngineConfig config_;
  // Decode steps are padded to the next of these numbers of sequences (ascending), captured the second time that a
  // shape occurs, and replayed from then on. Empty = never.
  std::vector<int32_t> graph_sizes_;
  int32_t launch_sequences_ = 0;  // that a launch may have, and rows sampled in one
  int32_t least_context_ = 0;     // tokens that the KV cache must have room for
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<TokenHistory> history_;
  std::unique_ptr<StepInput> input_;
  Buffer logits_;  // f32 [launch_sequences_, vocab]
  // SampledRow [1 + speculative_tokens, launch_sequences_]: what the last launch sampled, then of a step with drafts
  // what each launch drafted.
  Buffer sampled_;
  Buffer top_;         // TokenLogprob [launch_sequences_, kMaxTopLogprobs]
  Buffer scored_;      // SampledRow [max_step_tokens]
  Buffer scored_top_;  // TokenLogprob [max_step_tokens, top_n]
  std::array<Slot, kInFlight> slots_;
  StepTicket submitted_ = 0, collected_ = 0;
  CapturedSteps captured_{kGraphBytes};
  bool captures_ = true;  // false: there was no memory for another
  // Working space of submit().
  std::vector<size_t> singles_first_;  // of a launch's items: those with one token first
  std::vector<int32_t> last_rows_;     // of each of a launch's items: its last token's index
  std::vector<LogitBias> biases_;      // of a row
  std::vector<ScheduledSequence> drafting_;
};

}  // namespace nfp
