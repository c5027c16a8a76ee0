// The layout of layout.h at the speed of memory, for loading. Nothing here needs CUDA.
#pragma once

#include <cstdint>
#include <span>

#include "backend/cuda/gemm/layout.h"

namespace nfp::cuda {

// What pack_slab() does, byte for byte. Fastest where `out` is 16-byte aligned: the bytes then go past the caches.
void pack_slab_fast(const PlaneShape& shape, Plane plane, Join join, std::span<const uint8_t> rows, int row_count,
                    uint8_t* out);

}  // namespace nfp::cuda
