// The largest magnitude of each row of a product's outputs, which its blocks find while they store them: rounding rows
// to E4M3 with a scale each then needs no pass of its own, and any number of blocks can share a row.
//
// In device memory, u32 [kSlots, kRows]: an FP16 or BF16 number's bits without its sign, of which more is larger. A
// block adds to one of the slots, so that not all meet at one address; a row's peak is the largest of its slots. All
// are zero between uses: who reads a row's peak clears it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nfp::cuda {

struct RowPeaks {
  static constexpr int kSlots = 8;
  // At most that have peaks, and tokens of the largest tiles that find them: with more rows that takes a product longer
  // than it saves rounding (docs/kernels.md).
  static constexpr int kRows = 8;
  static constexpr int kTileTokens = 16;
  static constexpr size_t kBytes = size_t{kSlots} * kRows * sizeof(uint32_t);
};

}  // namespace nfp::cuda
