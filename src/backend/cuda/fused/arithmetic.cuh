// What kernels beside a GEMM compute alike.
#pragma once

namespace nfp::cuda {

inline constexpr float kLargestE4m3 = 448.0f;

// A row's scale for codes, whose reciprocal is a number too: BF16 rows may be so small that largest / 448 has none.
__device__ __forceinline__ float e4m3_scale(float largest) {
  return largest > 0.0f ? fmaxf(largest / kLargestE4m3, 0x1p-126f) : 1.0f;
}

// silu(gate), or gelu(gate) by tanh: x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)).
template <bool kGelu>
__device__ __forceinline__ float gate_of(float x) {
  if constexpr (!kGelu) return x / (1.0f + __expf(-x));
  constexpr float kTwoRootTwoOverPi = 1.59576912160573f;
  return x / (1.0f + __expf(-kTwoRootTwoOverPi * (x + 0.044715f * x * x * x)));
}

}  // namespace nfp::cuda
