// RMSNorm over an FP32 residual stream, for families whose stream leaves FP16's range: FP32 in, and out what reads it
// wants. (GemmInputCall's norm is for streams of 16 bits.)
#pragma once

#include <cstdint>

#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

// h = x, or x + residual, which residual becomes; y = h / sqrt(mean(h^2) + epsilon) * weight. At most one y; without
// any only the sum is made.
struct StreamNormCall {
  int64_t rows = 0;
  int64_t columns = 0;            // a multiple of 4
  const float* x = nullptr;       // [rows, columns]
  float* residual = nullptr;      // [rows, columns]; null = none
  const float* weight = nullptr;  // [columns]
  float epsilon = 1e-5f;
  float* y_f32 = nullptr;     // [rows, columns]
  uint16_t* y_f16 = nullptr;  // [rows, columns]
  uint8_t* y_e4m3 = nullptr;  // [rows, padded_k()] in the order of activation_byte(), zeros in the padding
  float* scales = nullptr;    // [rows], with y_e4m3: each row's largest magnitude / 448; y is worth code * scale
  bool dependent_launch = true;
};

// Enqueues one kernel. No allocation, no synchronisation. kUsage for shapes and pointers that do not fit.
Status run_stream_norm(const StreamNormCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
