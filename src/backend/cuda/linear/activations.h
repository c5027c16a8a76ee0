// What activations look like between linear layers: the one place that says where the bytes are.
//
//   FP16 form  [rows, features] halves, dense.
//   E4M3 form  [rows, padded_k] codes in the order of activation_byte(), zeros in the padding; then, at a 256-byte
//              aligned offset that depends on the rows for which the buffer was made, one FP32 scale a token: x is
//              worth code * scale.
//
// A buffer for [rows, features] has room for either; which one it holds is agreed by who writes and who reads it
// (CudaWeight::consumes()).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/gemm/plan/layout.h"

namespace nfp::cuda {

inline constexpr size_t kActivationAlignment = 256;  // of buffers, and of the scales inside them

inline size_t align_activation(size_t bytes) {
  return (bytes + kActivationAlignment - 1) / kActivationAlignment * kActivationAlignment;
}

// Codes from row to row of the E4M3 form.
inline int64_t e4m3_row_bytes(int64_t features) { return PlaneShape{0, features}.padded_k(); }

// Where the scales begin in a buffer made for `reserved_rows`.
inline size_t e4m3_scale_offset(int64_t reserved_rows, int64_t features) {
  return align_activation(static_cast<size_t>(reserved_rows * e4m3_row_bytes(features)));
}

inline size_t activation_bytes(int64_t reserved_rows, int64_t features) {
  const size_t f16 = static_cast<size_t>(reserved_rows * features) * 2;
  const size_t e4m3 = e4m3_scale_offset(reserved_rows, features) + static_cast<size_t>(reserved_rows) * sizeof(float);
  return align_activation(std::max(f16, e4m3));
}

inline float* e4m3_scales(void* buffer, int64_t reserved_rows, int64_t features) {
  return reinterpret_cast<float*>(static_cast<uint8_t*>(buffer) + e4m3_scale_offset(reserved_rows, features));
}
inline const float* e4m3_scales(const void* buffer, int64_t reserved_rows, int64_t features) {
  return e4m3_scales(const_cast<void*>(buffer), reserved_rows, features);
}

}  // namespace nfp::cuda
