// Between rows.cc (checks, launch) and rows.cu (kernels).
#pragma once

#include <cstdint>

namespace nfp::cuda {

enum class GemmInputPass : uint8_t {
  kOutputs,
  kMagnitude,  // kPerTensor's first: the largest magnitude (and y_f16), no codes
};

enum class GemmInputSource : uint8_t { kPlain, kNorm, kSwiglu };  // GemmInputCall::Source

inline constexpr int kMaxRowBlocks = 4;
inline constexpr int kMaxVectors = 8;  // groups of eight columns a thread

struct GemmInputParams {
  const void* x;
  const void* weight;  // of a norm
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
  float weight_offset;
  bool per_token;
  GemmInputPass pass;
};

// is_aligned: all rows (and FP32 weights) are 16-byte aligned and k is a multiple of 8; vectors is 1, 2, 4 or
// kMaxVectors, and kMaxVectors unless is_aligned. weight_f32: of a norm.
const void* gemm_input_function(GemmInputSource source, bool bf16, bool weight_f32, bool is_aligned, int vectors);
const void* delayed_function();

}  // namespace nfp::cuda
