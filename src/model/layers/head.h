#pragma once

#include <optional>

#include "model/layers/norm.h"
#include "model/weight_loader.h"

namespace nfp {

// The last norm and the matrix that makes logits.
struct Head {
  Status load(WeightLoader& weights, const ModelConfig& config);  // no matrix where it is tied
  Status reserve(Backend& backend, const ModelConfig& config, int32_t rows);
  // The product that makes logits of rows[0..count) of `hidden`, or without rows of its first `count`, whose inputs it
  // enqueues. `matrix`: own, or the embedding where they are tied.
  LinearArgs product(Backend& backend, const Linear& matrix, const Buffer& hidden, const int32_t* rows, int32_t count,
                     Precision precision, float* logits) const;

  // The final norm of these rows, in the form that `consumer` wants.
  const Buffer& states(Backend& backend, const Buffer& hidden, const int32_t* rows, int32_t count,
                       Precision consumer) const;

  Norm norm;
  // The same times ModelConfig::logit_scale, for logits, whose matrix has no factor; `states` are without it. Only
  // where that is not 1.
  std::optional<Norm> scaled_norm;
  Linear own;  // [vocab, hidden]; empty where tied
  float soft_cap = 0.0f;
  Buffer gathered, normed;  // [rows, hidden]

 private:
  const Buffer& normalise(const Norm& by, Backend& backend, const Buffer& hidden, const int32_t* rows, int32_t count,
                          Precision consumer) const;
};

}  // namespace nfp
