// Which tensors a model of this configuration has, and a source of random ones: `--load-format dummy`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/dummy_source.h"
#include "model/config.h"

namespace nfp {

// By their Hugging Face names, in the order of the layers.
std::vector<DummyTensor> dummy_tensors(const ModelConfig& config);

// `config`: the path of a config.json, or of a directory that holds one.
Result<std::unique_ptr<ModelSource>> open_dummy_model(const std::string& config, uint64_t seed);

}  // namespace nfp
