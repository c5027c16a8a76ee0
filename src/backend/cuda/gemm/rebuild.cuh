// FP16 weights from their two bytes, in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/cuda/gemm/kernels.h"

namespace nfp::cuda {

// Four weights (k = 2c, 2c+1, 2c+8, 2c+9 of one row) as two pairs of FP16. See layout.h and docs/format.md.
template <Operand kOperand>
__device__ __forceinline__ void rebuild(uint32_t upper, uint32_t lower, uint32_t one, uint32_t& first,
                                        uint32_t& second) {
  constexpr bool kBiased = kOperand == Operand::kF16Biased || kOperand == Operand::kBF16Biased;
  const uint32_t t = kBiased ? upper : upper - ((lower >> 7) & 0x01010101u);
  const uint32_t high = ((t >> 1) & 0x3f3f3f3fu) | (t & 0x80808080u);
  first = __byte_perm(lower, high, 0x5140);
  second = __byte_perm(lower, high, 0x7362);
  if constexpr (kBiased) {
    // A product with 1 that the compiler cannot know keeps these off the integer pipe, which the rest fills.
    first = first * one - 0x00400040u;
    second = second * one - 0x00400040u;
  }
  if constexpr (kOperand == Operand::kBF16Biased || kOperand == Operand::kBF16Free) {
    const auto narrow = [](uint32_t pair) {
      const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      const __nv_bfloat162 out = __float22bfloat162_rn(wide);
      return *reinterpret_cast<const uint32_t*>(&out);
    };
    first = narrow(first);
    second = narrow(second);
  }
}

}  // namespace nfp::cuda
