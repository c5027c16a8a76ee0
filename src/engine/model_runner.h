// Runs planned steps on a model: turns a StepPlan into the device arrays of a ragged batch, runs the layers, samples on
// the device and brings the tokens back. One upload before a step, one download after it, no round trip in between.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "engine/step_runner.h"
#include "model/model.h"

namespace nfp {

struct RunnerOptions {
  int32_t max_step_tokens = 512;
  int32_t max_sequences = 64;
  int32_t max_context = 0;  // tokens a sequence; 0 = the model's
  int32_t block_size = 16;
  int64_t kv_blocks = 0;
  DType kv_dtype = DType::kF16;
};

class ModelRunner final : public StepRunner {
 public:
  // The model must outlive the runner.
  static Result<std::unique_ptr<ModelRunner>> create(Model& model, const RunnerOptions& options);

  int32_t vocab() const override { return model_.config().vocab; }
  int32_t max_context() const override { return options_.max_context; }
  Status start(const Sequence& sequence) override;
  Result<StepOutput> run(const StepPlan& plan, Precision precision) override;

  size_t kv_bytes() const { return cache_->bytes(); }

 private:
  // Rows of logits computed at once: bounds the logits buffer, and is wide enough for the head to run as a matrix
  // product.
  static constexpr int32_t kLogitRows = 32;

  ModelRunner(Model& model, const RunnerOptions& options) : model_(model), options_(options) {}
  Status prepare();
  Status sample_rows(const StepPlan& plan, Precision precision, StepOutput& output);
  Status score_prompt(const ScheduledSequence& item, int32_t first_row, Precision precision,
                      std::vector<OutputToken>& scores);
  Result<BatchView> upload_batch(const StepPlan& plan);

  // Packs host arrays behind each other for one upload; the address an array will have on the device is known at once.
  class Staging {
   public:
    Status reserve_at_least(Backend& backend, size_t bytes);
    void clear() { used_ = 0; }
    // Null for an empty array.
    template <typename T>
    const T* add(const std::vector<T>& values) {
      return static_cast<const T*>(add_bytes(values.data(), values.size() * sizeof(T)));
    }
    Status upload(Backend& backend);

   private:
    const void* add_bytes(const void* data, size_t bytes);
    std::vector<std::byte> host_;
    Buffer device_;
    size_t used_ = 0;
  };

  Model& model_;
  RunnerOptions options_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<TokenHistory> history_;
  Staging batch_;
  Staging rows_;
  Buffer logits_;                   // f32 [kLogitRows, vocab]
  Buffer token_, logprob_, rank_;   // [kLogitRows]
  Buffer top_token_, top_logprob_;  // [kLogitRows, kMaxTopLogprobs]
};

}  // namespace nfp
