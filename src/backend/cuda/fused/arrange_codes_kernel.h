// Between arrange_codes.cc (checks, launch) and arrange_codes.cu (kernel).
#pragma once

#include <cstdint>

namespace nfp::cuda {

struct ArrangeCodesParams {
  const uint8_t* codes;
  const float* scales;
  uint8_t* y;
  float* y_scales;
  int64_t ld, ldy;
  int k;
  int chunks;  // of 16 bytes, in padded_k()
  bool one_scale;
};

inline constexpr int kArrangeThreads = 256;
// Takes ArrangeCodesParams. Grid: rows x pieces of a row, a block's threads a chunk each. is_aligned: rows begin at
// multiples of 16 bytes, and k is one.
const void* arrange_codes_function(bool is_aligned);

}  // namespace nfp::cuda
