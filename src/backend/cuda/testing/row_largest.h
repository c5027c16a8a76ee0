// What a product finds of logits (row_largest.h), as the definition has it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "backend/cuda/row_largest.h"

namespace nfp::cuda::testing {

// The candidates of logits [m, n], ld from row to row. Rows of padding are bytes of 0xff, as nobody writes them.
inline std::vector<uint64_t> largest_of(const float* logits, int64_t ld, int64_t m, int64_t n) {
  std::vector<uint64_t> out(RowLargest::bytes(m, n) / sizeof(uint64_t), ~uint64_t{0});
  for (int64_t t = 0; t < m; ++t) {
    for (int64_t group = 0; group < RowLargest::groups(n); ++group) {
      uint64_t largest = 0;
      for (int64_t c = group * RowLargest::kColumns; c < std::min(n, (group + 1) * RowLargest::kColumns); ++c) {
        const float v = logits[t * ld + c] + 0.0f;
        const auto bits = std::bit_cast<uint32_t>(v);
        const uint32_t key = std::isnan(v) ? 1 : std::signbit(v) ? ~bits : bits | 0x80000000u;
        largest = std::max(largest, uint64_t{key} << 32 | ~static_cast<uint32_t>(c));
      }
      const int64_t at = (t / RowLargest::kRows * RowLargest::groups(n) + group) * RowLargest::kRows;
      out[static_cast<size_t>(at + t % RowLargest::kRows)] = largest;
    }
  }
  return out;
}

}  // namespace nfp::cuda::testing
