// --load-format dummy: the tensors that a configuration implies, with random weights (io/dummy_source.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/dummy_source.h"
#include "io/model_source.h"
#include "model/config.h"

namespace nfp {

// All tensors that a checkpoint of this configuration has.
std::vector<DummyTensor> tensors_of(const ModelConfig& config);

// `path`: a config.json, or a folder that holds one.
Result<std::unique_ptr<ModelSource>> open_dummy_model(const std::string& path, uint64_t seed = 0);

}  // namespace nfp
