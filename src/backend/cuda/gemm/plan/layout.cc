#include "backend/cuda/gemm/plan/layout.h"

#include <algorithm>

#include "base/float_types.h"

namespace nfp::cuda {
namespace {

// Offset inside a block of 64 x 64 bytes.
size_t block_offset(int row, int byte) {
  const int chunk = (byte / 16) ^ ((row / 2) % 4);
  return static_cast<size_t>(row) * kBlockK + static_cast<size_t>(chunk * 16 + byte % 16);
}

}  // namespace

size_t plane_offset(const PlaneShape& shape, int64_t row, int64_t k) {
  const auto slab = static_cast<size_t>(row / kBlockRows) * shape.slab_bytes();
  const auto block = static_cast<size_t>(k / kBlockK) * kBlockBytes;
  return slab + block + block_offset(static_cast<int>(row % kBlockRows), permuted_byte(static_cast<int>(k % kBlockK)));
}

void permute_activations(int64_t k, std::span<const uint8_t> codes, std::span<uint8_t> row) {
  std::fill(row.begin(), row.end(), uint8_t{0});
  for (int64_t i = 0; i < k; ++i) row[static_cast<size_t>(activation_byte(i))] = codes[static_cast<size_t>(i)];
}

void pack_slab(const PlaneShape& shape, Plane plane, Join join, std::span<const uint8_t> rows, int row_count,
               uint8_t* out) {
  const uint8_t bias = plane == Plane::kLower && join == Join::kBiased ? kLowerBias : 0;
  std::fill_n(out, shape.slab_bytes(), bias);  // a zero weight: upper 0, lower 0
  for (int row = 0; row < row_count; ++row) {
    const uint8_t* source = rows.data() + static_cast<size_t>(row) * static_cast<size_t>(shape.k);
    for (int64_t first = 0; first < shape.k; first += kBlockK) {
      uint8_t* block = out + static_cast<size_t>(first / kBlockK) * kBlockBytes;
      const int width = static_cast<int>(std::min<int64_t>(kBlockK, shape.k - first));
      if (width == kBlockK) {  // four bytes of the permutation are two pairs of neighbours: move pairs
        for (int byte = 0; byte < kBlockK; byte += 2) {
          const int k = logical_k(byte);
          uint8_t* target = block + block_offset(row, byte);
          target[0] = static_cast<uint8_t>(source[first + k] + bias);
          target[1] = static_cast<uint8_t>(source[first + k + 1] + bias);
        }
      } else {
        for (int k = 0; k < width; ++k) {
          block[block_offset(row, permuted_byte(k))] = static_cast<uint8_t>(source[first + k] + bias);
        }
      }
    }
  }
}

}  // namespace nfp::cuda
