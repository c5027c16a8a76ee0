// How well a matrix's weights survive FP8: what `inspect` judges a model by.
//
// E4M3 keeps 3 mantissa bits, so rounding bell-shaped weights to nearest costs about 2.6 % (root mean square of the
// change over that of the weights) as long as they are normal numbers. A row whose weights are mostly below E4M3's
// smallest normal number (2^-6, for w * 2^8: |w| < 2^-14) loses more.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "base/thread_pool.h"
#include "nested/matrix_reader.h"

namespace nfp {

inline constexpr double kNarrowRowRms = 0x1p-13;  // of w * 2^-e: half of a bell-shaped row is then below 2^-14

struct Fp8Check {
  double outlier_ratio = 0;  // largest |w| over the root mean square
  double dynamic_range = 0;  // log2 of the largest row maximum over the smallest that is not 0
  int64_t narrow_rows = 0;   // rows, not all zero, with a root mean square of w * 2^-e under kNarrowRowRms
  double nested_error = 0;   // relative root mean square error of the upper bytes; 0 for a dense matrix
  double channel_error = 0;  // the same of per-channel absmax FP8
};

// Reads the matrix once, on all threads.
Result<Fp8Check> check_fp8(const MatrixReader& reader, ThreadPool& threads);

}  // namespace nfp
