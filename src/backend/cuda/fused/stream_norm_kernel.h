// Between stream_norm.cc (checks, launch) and stream_norm.cu (kernel).
#pragma once

#include <cstdint>

namespace nfp::cuda {

struct StreamNormParams {
  const float* x;
  float* residual;
  const float* weight;
  float* y_f32;
  uint16_t* y_f16;
  uint8_t* y_e4m3;
  float* scales;
  int columns;
  int padded_columns;  // of y_e4m3
  float epsilon;
};

inline constexpr int kStreamNormThreads = 512;
const void* stream_norm_function();

}  // namespace nfp::cuda
