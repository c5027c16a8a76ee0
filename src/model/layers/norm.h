#pragma once

#include <string>

#include "model/weight_loader.h"

namespace nfp {

// RMSNorm.
struct Norm {
  Status load(WeightLoader& weights, const ModelConfig& config, const std::string& name, float scale = 1.0f);
  // out = norm(x), without a residual as yet. `into_stream`: out is added to that.
  RmsNormArgs of(const Buffer& x, int32_t rows, Precision consumer, const Buffer& out, bool into_stream = false) const;

  Buffer weight;  // f32 [hidden]
  float eps = 0;
  int32_t hidden = 0;
  bool wide = false;  // x and residual are FP32, and so is what goes into the stream
};

}  // namespace nfp
