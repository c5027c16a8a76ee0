// The Llama architecture: pre-norm decoder with RMSNorm, grouped-query attention, rotary embedding and a gated MLP.
// Mistral, Qwen2 and Qwen3 are the same with windows, biases and norms of heads as ModelConfig says.
#pragma once

#include <memory>

#include "model/model.h"

namespace nfp {

Result<std::unique_ptr<Model>> load_llama(const ModelConfig& config, WeightLoader& weights);

}  // namespace nfp
