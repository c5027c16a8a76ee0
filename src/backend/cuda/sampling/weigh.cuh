// What a logit weighs: exp((logit - maximum) / temperature).
#pragma once

#include <cstdint>

#include "backend/cuda/sampling/cluster_row.cuh"

namespace nfp::cuda {

struct Weigh {
  float maximum;
  float factor;
  // 0 for NaN, where the maximum is not finite, and below 2^-126.
  __device__ __forceinline__ float of_logit(float logit) const {
    const float power = fmaxf((logit - maximum) * factor, -150.0f);  // -150 for NaN
    // log2(e) in two parts: the error of one alone would be the same for all logits that are equally far down.
    const float power_of_2 = __fmaf_rn(power, 1.44269502162933349609375f, power * 1.9259629911e-8f);
    float weight;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(power_of_2));
    return weight;
  }
  __device__ __forceinline__ float operator()(uint32_t key) const { return of_logit(logit_of(key)); }
  __device__ __forceinline__ double exact(uint32_t key) const {
    const double logit = fmaxf(logit_of(key), __uint_as_float(0xff800000u));
    return exp((logit - maximum) * static_cast<double>(factor));
  }
};

}  // namespace nfp::cuda
