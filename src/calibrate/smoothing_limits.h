// How far rows and columns of a tensor may be multiplied by powers of two without changing what the model computes in
// FP16: every value stays exactly representable in its dtype, every row that nests goes on nesting with at most the row
// exponent that it had (docs/format.md), and BF16 weights that FP16 rounds are held no worse.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "io/model_source.h"

namespace nfp {

// What e may be for each channel: lowest <= 0 <= highest.
struct ExponentLimits {
  explicit ExponentLimits(int64_t channels)
      : lowest(static_cast<size_t>(channels), -kMost), highest(static_cast<size_t>(channels), kMost) {}
  void narrow(const ExponentLimits& other);

  static constexpr int8_t kMost = 16;
  std::vector<int8_t> lowest, highest;  // [channels]
};

// Of a matrix whose columns are multiplied by 2^e, e of each column. A nested column is not made so small either that
// the E4M3 of its weights would lose what its inputs' E4M3 gains.
Result<ExponentLimits> column_limits(const ModelSource& source, std::string_view matrix, ThreadPool& threads);
// Of a matrix or a vector whose rows are multiplied by 2^-e, e of each row.
Result<ExponentLimits> row_limits(const ModelSource& source, std::string_view tensor, ThreadPool& threads);

}  // namespace nfp
