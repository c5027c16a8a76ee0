// Rows of a product to E4M3 with a scale each, where the product has found their largest magnitudes (row_peaks.h). The
// codes and scales are those of prepare_gemm_input()'s kPlain.
#pragma once

#include <cstdint>

#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

struct RoundRowsCall {
  int64_t m = 0;              // at most RowPeaks::kRows
  int64_t k = 0;              // a multiple of 8, at most kMaxColumns of gemm_input.h
  const void* x = nullptr;    // device [m, k] FP16, rows 16-byte aligned
  int64_t ldx = 0;            // elements
  uint32_t* peaks = nullptr;  // device RowPeaks::kBytes, of x's rows; cleared
  uint8_t* y = nullptr;  // device [m, padded_k()], 16-byte aligned, in the order of activation_byte(), zeros from k on
  int64_t ldy = 0;       // a multiple of 16
  float* scales = nullptr;  // device [m]: largest magnitude / 448; x is worth code * scale
  bool dependent_launch = true;
};

// Enqueues one kernel. No allocation, no synchronisation. kUsage for shapes and pointers that do not fit.
Status round_rows(const RoundRowsCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
