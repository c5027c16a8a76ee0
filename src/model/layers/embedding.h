#pragma once

#include "model/layers/pass.h"
#include "model/weight_loader.h"

namespace nfp {

struct Embedding {
  Status load(WeightLoader& weights, const ModelConfig& config);
  void run(const Pass& pass) const;  // the tokens -> work.residual

  Linear table;  // [vocab, hidden]; also the head's matrix where they are tied
  float scale = 1.0f;
};

}  // namespace nfp
