// E4M3 codes of another quantiser, row-major with FP32 scales, as FP8 mode's GEMM takes them (gemm/plan/layout.h,
// activation_byte). Codes are moved, not changed: NaN stays NaN.
#pragma once

#include <cstdint>

#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

struct ArrangeCodesCall {
  int64_t m = 0;
  int64_t k = 0;
  // [m, k], x is worth code * scale; ld bytes from row to row. Fastest 16-byte aligned, ld and k multiples of 16.
  const uint8_t* codes = nullptr;
  int64_t ld = 0;
  const float* scales = nullptr;  // [m], or with one_scale [1]
  bool one_scale = false;
  // [m, padded_k()], zeros in the padding; 16-byte aligned, ldy (bytes) a multiple of 16. No part of `codes`.
  uint8_t* y = nullptr;
  int64_t ldy = 0;
  float* y_scales = nullptr;  // [m], as GemmCall::token_scale wants them; may be `scales`. Null: neither is used
  bool dependent_launch = true;
};

inline constexpr int64_t kMaxArrangedColumns = int64_t{1} << 27;

// Enqueues one kernel. No allocation, no synchronisation. kUsage for shapes and pointers that do not fit.
Status arrange_codes(const ArrangeCodesCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
