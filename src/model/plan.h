// What a model takes, from its configuration alone: for planning before anything is downloaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "model/config.h"

namespace nfp {

struct ModelPlan {
  // Parameters.
  uint64_t parameters = 0;
  uint64_t active = 0;  // that one token takes part in multiplying: without the experts that it does not have
  uint64_t linear = 0;  // in linear layers, which FP8 steps read half of; not the head
  uint64_t head = 0;    // the matrix that makes logits; the embedding, where they are tied
  uint64_t embedding = 0;
  // Bytes of weights in memory.
  uint64_t both_bytes = 0;        // one copy for FP16 and FP8, as it is loaded here
  uint64_t fp8_bytes = 0;         // a copy for FP8 alone: linear layers at one byte
  uint64_t two_copies_bytes = 0;  // FP16 and FP8 side by side
  // Bytes of weights that a decode step of one sequence reads.
  uint64_t step_fp16_bytes = 0;
  uint64_t step_fp8_bytes = 0;
};

ModelPlan plan_model(const ModelConfig& config);

// kResource where the weights do not fit into the free memory of a GPU, which says what would fit. `model` begins the
// message.
Status check_weights_fit(const std::string& model, const ModelPlan& plan, uint64_t free, uint64_t total);

// Keys and values of all layers.
uint64_t kv_bytes_per_token(const ModelConfig& config, DType dtype);

// `gpus` with `memory` bytes each, of which `share` is used, by tensor parallelism.
struct GpuFit {
  int gpus = 1;
  uint64_t weight_bytes = 0;  // a GPU
  int64_t kv_tokens = 0;      // that the rest of the memory holds in FP16; 0 = the weights do not fit
  bool divides = true;        // heads and features divide evenly over them
};
std::vector<GpuFit> gpu_fits(const ModelConfig& config, const ModelPlan& plan, uint64_t memory, double share);

}  // namespace nfp
