#pragma once

#include "model/layers/pass.h"
#include "model/weight_loader.h"

namespace nfp {

// down(act(gate(x)) * up(x)).
struct GatedMlp {
  // The layer's own, or its shared expert.
  Status load(WeightLoader& weights, const ModelConfig& config, int32_t layer, Block block = Block::kDense);
  // x -> work.product. False where the forward ended inside.
  bool run(const Pass& pass, const Buffer& x) const;
  bool run(const Pass& pass, const Buffer& x, const Buffer& out) const;  // likewise -> out [tokens, hidden]

  Linear gate_up;  // [2 * intermediate, hidden], rows interleaved
  Linear down;     // [hidden, intermediate]
  Activation activation = Activation::kSilu;
  bool shared = false;  // the router reads work.normed too, which has no linear's form therefore

 private:
  LinearArgs gating(const Pass& pass) const;
};

}  // namespace nfp
