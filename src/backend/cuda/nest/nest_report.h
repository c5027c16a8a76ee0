// What nesting on the device found. Apart, since .cu files read it.
#pragma once

#include <cstdint>

namespace nfp::cuda {

// Found by nest_matrix, in device memory.
struct NestReport {
  int32_t bad_rows = 0;         // do not nest
  int32_t first_bad_row = 0;    // n if none
  int32_t not_finite_rows = 0;  // of bad_rows
  int32_t rows_shifted = 0;     // exponent other than 0
  int64_t inexact = 0;          // BF16 weights that nesting changes
  int64_t inexact_bf16 = 0;     // nested weights that are no BF16 numbers
};

}  // namespace nfp::cuda
