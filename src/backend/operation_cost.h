// What the operations of a step move and compute at the least, from their arguments: a weight's bytes in the precision
// of the step, every activation that is read or written, each key and value once a sequence and head. Working space,
// second passes over an input and padding are not counted: a kernel that needs them is that much further from its
// limit. Profiles of both backends count with this.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace nfp {

OperationCost operator+(const OperationCost& a, const OperationCost& b);

// How activations lie in a backend's memory.
struct ActivationForm {
  uint64_t feature_bytes = 4;  // of activation_dtype()
  bool rounds = false;         // what a W8A8 product reads lies there as E4M3 with an FP32 scale a row
  // `consumer`: as RmsNormArgs has it.
  uint64_t bytes(int64_t rows, int64_t features, Precision consumer = Precision::kFp16) const;
  bool rounds_for(Precision consumer) const { return rounds && !is_exact(consumer); }
};

// Of a step's sequences, in host memory; null = not known, and what depends on it is not counted.
struct SequenceLengths {
  const int32_t* query_start = nullptr;  // as BatchView has them
  const int32_t* context = nullptr;
};

// What a product asked for in `step` is computed in: kFp16 where nothing of the weight is nested, kFp8 for W8A8 of a
// weight that takes no rounded inputs.
Precision product_precision(const LinearWeight& weight, Precision step);

OperationCost cost_of(const EmbedArgs& args, const ActivationForm& form);
OperationCost cost_of(const RmsNormArgs& args, const ActivationForm& form);
// `largest_bytes`: what a product and greedy sampling exchange in place of logits (Backend::linear_sample), which are
// neither stored nor read then, nor are the rows' parameters.
OperationCost cost_of(const LinearArgs& args, const ActivationForm& form, std::optional<uint64_t> largest_bytes = {});
OperationCost cost_of(const RopeArgs& args, const ActivationForm& form);
// Of `count` sequences from `first` on. What it writes counts as not rounded.
OperationCost cost_of(const AttentionArgs& args, const ActivationForm& form, const SequenceLengths& lengths,
                      int32_t first, int32_t count);
// The same with the rotation of their tokens, of which q never leaves the kernel.
OperationCost cost_of(const RopeArgs& rope, const AttentionArgs& args, const ActivationForm& form,
                      const SequenceLengths& lengths);
OperationCost cost_of(const RouteArgs& args, const ActivationForm& form);
// `start`: routes.start in host memory; null = as with SequenceLengths. `inputs`: the form of x.
OperationCost cost_of(const ExpertLinearArgs& args, const ActivationForm& form, const int32_t* start,
                      Precision inputs = Precision::kFp16);
OperationCost cost_of(const CombineExpertsArgs& args, const ActivationForm& form);
OperationCost cost_of(const CombineExpertsArgs& first, const RmsNormArgs& then, const ActivationForm& form);
OperationCost cost_of(const GatherRowsArgs& args, const ActivationForm& form);
OperationCost cost_of(const SampleArgs& args, std::optional<uint64_t> largest_bytes = {});
OperationCost cost_of(const ScoreArgs& args);
OperationCost cost_of(const CopyArgs& args);
// act(gate) * up of a product's [rows, n], by itself. Activation functions count no FLOPs.
OperationCost gating_cost(int64_t rows, int64_t n, Precision consumer, const ActivationForm& form);
// Rows rounded to E4M3, each written `copies` times.
OperationCost rounding_cost(int64_t rows, int64_t features, const ActivationForm& form, int32_t copies = 1);

std::string_view stage_of(const RmsNormArgs& args, const ActivationForm& form);
std::string_view stage_of(const CombineExpertsArgs& first, const RmsNormArgs& then, const ActivationForm& form);

// Sums by stage and precision.
class StageTimes {
 public:
  void add(std::string_view stage, std::optional<Precision> precision, const OperationCost& cost, double seconds);
  void clear() { times_.clear(); }
  const std::vector<StageTime>& all() const { return times_; }

 private:
  std::vector<StageTime> times_;
};

}  // namespace nfp
