// Between gemm_input.cc (checks, launch) and gemm_input.cu (kernels).
#pragma once

#include <cstdint>

#include "backend/cuda/fused/all_reduce_kernel.h"
#include "backend/expert_routes.h"

namespace nfp::cuda {

// GemmInputCall::Source, and kNorm with all_reduce.
enum class GemmInputSource : uint8_t { kPlain, kNorm, kSwiglu, kGeglu, kExperts, kReducedNorm };

inline constexpr int kMaxRowBlocks = 4;
inline constexpr int kReducedBlocks = 2;  // of kReducedNorm, that an SM holds at least
inline constexpr int kMaxVectors = 8;     // groups of eight columns a thread

struct GemmInputParams {
  const void* x;
  const void* weight;  // of a norm
  const void* residual;
  void* h;  // may be residual
  void* y_f16;
  uint8_t* y_e4m3;
  float* scales;  // written with y_e4m3
  int64_t ldx, ldr, ldy, ldy_e4m3;
  int64_t k;
  int padded_k;
  int blocks;         // that share a row, in one cluster
  int block_columns;  // of the row, for each of them: a multiple of 128
  float epsilon;
  float weight_offset;
  // Whether each block goes through its code once without loading or storing before its inputs are there: what an SM
  // has not run for a while comes from the L2. (Not with kMaxVectors, which leaves no registers for it.)
  bool rehearses;
};

struct ExpertsNormParams : GemmInputParams {
  CombineExpertsArgs experts;
};

struct ReducedNormParams : GemmInputParams {
  AllReduceParams reduce;
};

// Takes GemmInputParams, or for kExperts ExpertsNormParams and for kReducedNorm ReducedNormParams. is_aligned: all rows
// (and FP32 weights) are 16-byte aligned and k is a multiple of 8; vectors is 1, 2, 4 or kMaxVectors, and kMaxVectors
// unless is_aligned, and of kExperts and kReducedNorm, which are aligned, 1 or 2. weight_f32: of a norm.
const void* gemm_input_function(GemmInputSource source, bool bf16, bool weight_f32, bool is_aligned, int vectors);
// Of an aligned norm with half as many threads, of 2 or 4 groups of columns each: the bits of 1 or 2 groups and all
// threads.
const void* halved_norm_function(bool bf16, bool weight_f32, int vectors);

}  // namespace nfp::cuda
