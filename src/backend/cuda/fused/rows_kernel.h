// Between rows.cc (checks, launch) and rows.cu (kernels).
#pragma once

#include <cstdint>

namespace nfp::cuda {

enum class RowsPass : uint8_t {
  kOutputs,
  kMagnitude,  // kPerTensor's first: the largest magnitude (and y_f16), no codes
};

inline constexpr int kMaxRowBlocks = 8;

struct RowsParams {
  const void* x;
  const void* weight;  // null unless a norm
  void* residual;
  void* y_f16;
  uint8_t* y_e4m3;
  float* scale;          // written if per_token or amax_in, else read
  float* amax_out;       // null = not recorded
  const float* amax_in;  // scale = *amax_in / 448
  int64_t ldx, ldr, ldy, ldy_e4m3;
  int64_t k;
  int padded_k;
  int blocks;         // that share a row, in one cluster
  int block_columns;  // of the row, for each of them: a multiple of 128
  float epsilon;
  bool swiglu;
  bool bf16;
  bool vectors;  // rows are 16-byte aligned
  bool per_token;
  RowsPass pass;
};

const void* rows_function(int vectors);  // 1, 2, 4 or 8 groups of eight columns a thread
const void* delayed_function();

}  // namespace nfp::cuda
