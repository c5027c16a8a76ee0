// The largest outputs of each row of a product, which its blocks find instead of storing the outputs: what greedy
// sampling needs of logits (sampling/largest.cu).
//
// In device memory, u64 [ceil(m / kRows)][ceil(n / kColumns)][kRows]: of each row and each kColumns neighbouring
// columns the largest FP32 output as its key (logit_key.cuh) in the upper half, and the complement of its column in the
// lower, so that of equal ones the first is the largest. Rows of padding are not written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nfp::cuda {

struct RowLargest {
  static constexpr int64_t kColumns = 16;  // a warp's
  static constexpr int64_t kRows = 4;      // whose candidates share a sector of the L2

  static constexpr int64_t groups(int64_t n) { return (n + kColumns - 1) / kColumns; }
  // Of the rows themselves, and with those of padding.
  static constexpr size_t row_bytes(int64_t m, int64_t n) {
    return static_cast<size_t>(m * groups(n)) * sizeof(uint64_t);
  }
  static constexpr size_t bytes(int64_t m, int64_t n) { return row_bytes((m + kRows - 1) / kRows * kRows, n); }
};

}  // namespace nfp::cuda
