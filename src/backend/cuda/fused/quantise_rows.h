// Between gemm_input.cc and quantise_rows.cu: E4M3 codes and scales alone of plain rows that are 16-byte aligned, the
// numbers that gemm_input_kernel makes of them, each row to one place or to several.
#pragma once

#include <cstdint>

namespace nfp::cuda {

struct QuantiseRowsParams {
  const uint16_t* x;
  uint8_t* codes;
  float* scales;
  const int32_t* place;  // GemmInputCall::place, of `copies` a row, or null
  int64_t m, ldx, ld_codes;
  int k, padded_k;
  int copies;
};

inline constexpr int kQuantiseWarps = 8;       // a block of short rows, of which each has a warp;
inline constexpr int kQuantiseColumns = 2048;  // of a warp: a longer row has as many as it takes, and a block
// Takes QuantiseRowsParams. Grid: rows (over kQuantiseWarps where they are short).
const void* quantise_rows_function(bool bf16, int padded_k);

}  // namespace nfp::cuda
