// A step as an object: what the host knows of a step (which tokens of which sequences, where their keys and values go,
// how their next tokens are chosen) becomes arrays in device memory and a shape.
//
//   StepInput::create(backend, limits)          once; all memory is taken here
//   input.begin(shape); input.add(item) ...     each step: writes host arrays, and what pads the step to its shape
//   input.add_row(row, ...) ...                 rows of logits to sample
//   input.upload(); model.forward(input.view())
//
// A shape holds all that is passed by value, and decides where each array lies: it is the identity of a captured graph.
// Two steps of equal shape differ in the contents of device memory only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "nested/precision.h"

namespace nfp {

// What steps may hold at most.
struct StepLimits {
  int32_t tokens = 1;       // of a step
  int32_t sequences = 1;    // of a step, and rows sampled in one
  int32_t table_width = 1;  // blocks of a sequence
  int32_t vocab = 1;        // for masks of allowed tokens
  int32_t block_size = 16;  // tokens
  int32_t row_bias = 0;     // entries of LogitBias a row
  bool masks = false;       // rows may have masks
  int32_t slots = 4;        // steps whose host arrays may be in use at once
};

struct StepShape {
  int32_t tokens = 0;       // padding included
  int32_t sequences = 0;    // likewise
  int32_t single = 0;       // leading sequences with one token each
  int32_t rows = 0;         // of logits that are sampled
  int32_t scored = 0;       // of logits whose given next token is scored
  int32_t pooled = 0;       // of hidden states that are brought back
  bool last_only = false;   // of each sequence only the last token's hidden state is wanted (BatchView::last)
  bool fresh_keys = false;  // as BatchView has it
  uint32_t needs = 0;       // SamplingNeeds
  Precision precision = Precision::kFp16;
  double fp8_share = 1.0;      // as ForwardArgs has it; one of a few levels
  int32_t launch_context = 0;  // as BatchView has it
  // One token and one sampled row a sequence: may be padded, and is worth capturing.
  bool decode() const { return single == tokens && rows == tokens && scored == 0 && pooled == 0; }
  friend bool operator==(const StepShape&, const StepShape&) = default;
};

struct StepShapeHash {
  size_t operator()(const StepShape& shape) const;
};

// A sequence's part in a step.
struct BatchItem {
  std::span<const int32_t> tokens;  // at positions first, first + 1, ...
  int32_t first = 0;
  // >= 0: its one token is that entry's of view()'s `previous`, whatever `tokens` says.
  int32_t source = -1;
  std::span<const int32_t> blocks;
};

class StepInput {
 public:
  static Result<std::unique_ptr<StepInput>> create(Backend& backend, const StepLimits& limits);

  // The KV block that padding's tables name; no token of it has a slot. Before the first step.
  void set_scratch_block(int32_t block) { scratch_block_ = block; }

  // Plans another step, in the host arrays of `slot` (0 .. limits.slots - 1), whose last upload must be done. The
  // shape's sizes may exceed what is then added only if it is decode().
  void begin(int slot, const StepShape& shape);
  // Sequences in order; the first shape.single ones have one token. Returns the row of the item's last token among the
  // forward's hidden states.
  int32_t add(const BatchItem& item);
  // A row of logits of what add() returned; bias: each token once. The row's bias_* and allowed_row are set here.
  void add_row(int32_t last_row, SamplingRow row, std::span<const LogitBias> bias);
  // The mask of the row added last, all zero, to be filled in.
  std::span<uint32_t> add_mask();
  void drop_mask();  // the row added last is unrestricted after all
  // A row of logits after this token, of which `target` is scored.
  void add_score(int32_t token_row, int32_t target);
  // The hidden state of this token is wanted.
  void add_pooled(int32_t token_row);

  // Enqueues the copies, as one operation.
  void upload();
  // Device arrays of the shape; `previous` as BatchView has it.
  BatchView view(const StepShape& shape, const SampledRow* previous) const;
  SampleArgs sampling(const StepShape& shape) const;            // all but logits, history and results
  const int32_t* sampled_rows(const StepShape& shape) const;    // [rows] of hidden states
  const int32_t* scored_rows(const StepShape& shape) const;     // [scored]
  const int32_t* scored_targets(const StepShape& shape) const;  // [scored]
  const int32_t* pooled_rows(const StepShape& shape) const;     // [pooled] indices of tokens
  const StepLimits& limits() const { return limits_; }

 private:
  // Byte offsets of a shape's arrays behind each other.
  struct Layout {
    size_t token_ids, token_source, positions, slots, query_start, context, rows, scored_rows, scored_targets;
    size_t last_token, last_position, last_start;
    size_t pooled_rows, sampling;
    size_t bytes;
  };
  static Layout layout(const StepShape& shape);
  template <typename T>
  T* host(size_t offset) const {
    return reinterpret_cast<T*>(arrays_[static_cast<size_t>(slot_)].as<char>() + offset);
  }
  template <typename T>
  const T* device(size_t offset) const {
    return reinterpret_cast<const T*>(device_arrays_.as<char>() + offset);
  }
  int32_t mask_words() const { return (limits_.vocab + 31) / 32; }

  StepInput(Backend& backend, const StepLimits& limits) : backend_(backend), limits_(limits) {}

  Backend& backend_;
  StepLimits limits_;
  int32_t scratch_block_ = 0;
  std::vector<Buffer> arrays_, tables_, biases_, masks_;  // host, [slots]
  Buffer device_arrays_;
  Buffer device_table_;  // i32 [sequences, table_width]
  Buffer device_bias_;   // LogitBias [sequences * row_bias]
  Buffer device_masks_;  // u32 [sequences, mask words]
  // Of the step being planned.
  int slot_ = 0;
  StepShape shape_;
  Layout at_{};
  int32_t tokens_ = 0, sequences_ = 0, rows_ = 0, scored_ = 0, pooled_ = 0, biased_ = 0, masked_ = 0;
  int32_t widest_ = 0;  // blocks
};

}  // namespace nfp
