// What a model is and whether it would load, found out without reading its weights.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace nfp {

struct ModelSummary {
  std::string architecture;  // "LlamaForCausalLM"; empty where not even that could be read
  std::string form;          // how the files hold the weights: "safetensors BF16", "nested", "GGUF Q4_1"
  uint64_t parameters = 0;
  uint64_t file_bytes = 0;  // of all tensors
  uint64_t fp16_bytes = 0;  // of all tensors in memory, in both precisions
  Status loads;             // why not, where not: as load() would say it
};

// `model`: as ModelSource::open takes it. Reads headers, the configuration and the tokenizer; damage inside the weights
// shows only when they are read.
ModelSummary summarize_model(const std::string& model);

}  // namespace nfp
