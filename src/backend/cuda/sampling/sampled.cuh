// What a greedy row comes to.
#pragma once

#include "backend/cuda/logit_key.cuh"
#include "backend/sampling.h"

namespace nfp::cuda {

// best: of all tokens (candidate() of logit_key.cuh); token 0 where none may be sampled.
__device__ __forceinline__ SampledRow sampled(uint64_t best) {
  const uint32_t key = candidate_key(best);
  return {key > kMinusInfinityKey ? candidate_token(best) : 0, 0.0f, 0, is_finite_key(key) ? 0 : 1};
}

}  // namespace nfp::cuda
