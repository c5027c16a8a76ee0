// What `nestedfp tune` measures: shapes, modes and token counts from a model's sizes or from text. Plain C++, tested
// without a GPU.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "base/result.h"

namespace nfp::cuda {

struct GemmShape {
  int64_t n = 0;  // output features
  int64_t k = 0;  // input features
  constexpr bool operator==(const GemmShape&) const = default;
};

// A layer's sizes, in features.
struct LayerSizes {
  int64_t hidden = 0;
  int64_t heads = 0;  // times head_dim: queries
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
};
// The products of one decoder layer as the GPU runs them: query, key and value as one, output, gate and up as one,
// down. Each shape once. (lm_head is no part of a layer: name its shape if it is nested.)
std::vector<GemmShape> layer_shapes(const LayerSizes& sizes);

// Kernels to time for a problem, at most `most` (from 1): first what the table chooses, then the others from the
// shortest predicted time to the longest (candidates()' order where the table has no model of the mode).
std::vector<Config> likeliest(const Problem& problem, const DeviceShape& device, const TuningTable& table, size_t most);

// "4096,14336". kUsage, with the text, for anything else or sizes outside 1 to 2^30.
Result<GemmShape> parse_shape(std::string_view text);
// "f16,e4m3"; kUsage names the unknown one and those that exist.
Result<std::vector<Mode>> parse_modes(std::string_view text);
// "1,16,4096": each a token bucket, ascending; kUsage lists the buckets.
Result<std::vector<int>> parse_buckets(std::string_view text);
// "SEED,COUNT": so many random numbers of tokens, at most 1000.
struct RandomTokens {
  uint64_t seed = 0;
  int count = 0;
};
Result<RandomTokens> parse_random_tokens(std::string_view text);

}  // namespace nfp::cuda
