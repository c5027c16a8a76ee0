#pragma once

#include <string>

#include "model/weight_loader.h"

namespace nfp {

// RMSNorm.
struct Norm {
  Status load(WeightLoader& weights, const ModelConfig& config, const std::string& name, float scale = 1.0f);
  // out = norm(x), or with `residual` the norm of residual + x, which residual becomes.
  void run(Backend& backend, const Buffer& x, const Buffer* residual, int32_t rows, Precision consumer,
           const Buffer& out, bool into_stream = false) const;

  Buffer weight;  // f32 [hidden]
  float eps = 0;
  int32_t hidden = 0;
  bool wide = false;  // x and residual are FP32, and so is what goes into the stream
};

}  // namespace nfp
