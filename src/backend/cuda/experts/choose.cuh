// A row's experts by its logits.
#pragma once

#include <cfloat>

#include "backend/cuda/experts/experts_kernels.h"

namespace nfp::cuda {

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// What a warp finds for a row: softmax, and `top` times the likeliest that is left, of equals the first. Lane t has the
// row's expert t and its weight.
struct Choice {
  int expert = 0;
  float weight = 0.0f;
};
template <int kMine>  // experts a lane
__device__ __forceinline__ Choice choose_among(const RouteArgs& p, const float* logits, int lane) {
  float mine[kMine];
  float largest = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int expert = i * 32 + lane;
    mine[i] = expert < p.routes.experts ? logits[expert] : -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) largest = fmaxf(largest, mine[i]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  // Powers as integers that are in the same order; 0: none, or chosen already.
  uint32_t keys[kMine];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const float power = expf(mine[i] - largest);
    const bool here = i * 32 + lane < p.routes.experts;
    keys[i] = here ? __float_as_uint(power) + 1 : 0;
    sum += here ? power : 0.0f;
  }
  sum = warp_sum(sum);
  float chosen_sum = 0.0f;
  Choice out;
  for (int t = 0; t < p.routes.top; ++t) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        at = i * 32 + lane;
      }
    }
    const uint32_t most = __reduce_max_sync(0xffffffffu, best);
    at = static_cast<int>(__reduce_min_sync(0xffffffffu, best == most ? static_cast<uint32_t>(at) : UINT32_MAX));
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (i * 32 + lane == at) keys[i] = 0;
    }
    const float power = __uint_as_float(most - 1);
    chosen_sum += power;
    if (lane == t) out = {at, power};
  }
  out.weight /= p.renormalise ? chosen_sum : sum;
  return out;
}

}  // namespace nfp::cuda
