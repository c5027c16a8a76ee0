// A decoder-only transformer made of layers: what all families are. What differs between them is in ModelConfig.
#pragma once

#include <memory>

#include "model/model.h"
#include "model/weight_loader.h"

namespace nfp {

Result<std::unique_ptr<Model>> load_decoder(const ModelConfig& config, WeightLoader& weights);

}  // namespace nfp
