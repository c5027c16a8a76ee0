// The layout of layout.h at the speed of memory, for loading. Nothing here needs CUDA.
#pragma once

#include <cstdint>
#include <span>

#include "backend/cuda/gemm/plan/layout.h"

namespace nfp::cuda {

// Rows first_row .. first_row + row_count - 1 of a slab, their padding of k included: what pack_slab() writes there.
// rows: [row_count, shape.k]; slab: slab_bytes(), of which other rows stay as they are. Fastest where `slab` is 16-byte
// aligned: the bytes then go past the caches.
void pack_rows(const PlaneShape& shape, Plane plane, Join join, std::span<const uint8_t> rows, int first_row,
               int row_count, uint8_t* slab);

// The same for zero weights.
void pack_zero_rows(const PlaneShape& shape, Plane plane, Join join, int first_row, int row_count, uint8_t* slab);

}  // namespace nfp::cuda
