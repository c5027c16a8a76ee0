#pragma once

#include <optional>
#include <vector>

#include "model/layers/gated_mlp.h"

namespace nfp {

// A gated MLP for each expert, of which a token has a few, and perhaps one that every token has.
struct ExpertMlp {
  Status load(WeightLoader& weights, const ModelConfig& config, int32_t layer);
  // work.normed, which no linear layer's form may have, -> each expert's results, and `sum`, the next operation, which
  // makes work.product of them. False where the forward ended inside.
  bool run(const Pass& pass, std::optional<CombineExpertsArgs>& sum) const;
  template <typename F>
  void for_each_linear(F&& visit) {
    for (Linear& linear : gate_up) visit(&linear);
    for (Linear& linear : down) visit(&linear);
    if (!has_shared) return;
    visit(&shared.gate_up);
    visit(&shared.down);
  }

  Buffer router;                      // f32 [experts, hidden]
  Buffer shared_gate;                 // f32 [hidden]
  std::vector<Linear> gate_up, down;  // [experts]
  std::vector<const LinearWeight*> gate_up_weights, down_weights;
  GatedMlp shared;
  bool has_shared = false;
  bool renormalise = false;
  int32_t hidden = 0;
  int32_t wide = 0;  // features between an expert's up and down
  Activation activation = Activation::kSilu;

 private:
  bool run_experts(const Pass& pass) const;
  bool run_observed(const Pass& pass) const;
  bool observe(const Pass& pass, const std::vector<Linear>& linears, const std::vector<int32_t>& start, const Buffer& x,
               int64_t cols) const;
};

}  // namespace nfp
