// One sequence on a model, with a KV cache of its own and logits for any position: what perplexity, golden tests and
// calibration need, without the engine's scheduling.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "engine/batch.h"
#include "model/model.h"

namespace nfp {

// A part of a forward, as ForwardArgs has it. To run one sequence's layers apart, feed the same tokens again after
// restart(), with the next layers.
struct LayerRange {
  int32_t first = 0;
  int32_t end = -1;
  LinearObserver* observer = nullptr;
  const Linear* until = nullptr;
};

class SequenceRunner {
 public:
  // Room for `context` tokens in all, `max_feed` of them at once. The model must outlive the runner.
  static Result<std::unique_ptr<SequenceRunner>> create(Model& model, int32_t context, int32_t max_feed,
                                                        DType kv_dtype = DType::kF16);

  void restart() { length_ = 0; }
  int32_t length() const { return length_; }
  // Appends tokens (1 .. max_feed of them) and computes their keys, values and hidden states.
  Status feed(std::span<const int32_t> tokens, Precision precision, const LayerRange& layers = {});
  // Logits after tokens first .. first+count-1 of the last feed. out: [count, vocab].
  Status logits(int32_t first, int32_t count, Precision precision, float* out);

 private:
  static constexpr int32_t kBlockSize = 16;
  static constexpr int32_t kLogitRows = 64;  // computed at once

  explicit SequenceRunner(Model& model) : model_(model) {}

  Model& model_;
  int32_t context_ = 0;
  int32_t max_feed_ = 0;
  int32_t length_ = 0;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StepInput> input_;
  std::vector<int32_t> table_;  // the identity
  Buffer rows_;                 // i32 [kLogitRows]
  Buffer logits_;               // f32 [kLogitRows, vocab]
};

}  // namespace nfp
