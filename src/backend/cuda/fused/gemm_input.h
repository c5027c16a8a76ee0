// What stands around a GEMM, one kernel each, a thread block per token: RMSNorm (with the residual add), activation
// quantisation, SwiGLU and their fusions. Arithmetic is FP32 from the inputs to the one rounding of each output.
//
// E4M3 outputs are in the byte order of FP8 mode's GEMM (gemm/plan/layout.h, activation_byte) with zeros up to
// padded_k().
#pragma once

#include <cstdint>

#include "backend/cuda/fused/all_reduce.h"
#include "backend/expert_routes.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

struct GemmInputCall {
  enum class Source : uint8_t {
    kPlain,    // y = x
    kNorm,     // y = x / sqrt(mean(x^2) + epsilon) * weight, of h = x + residual (rounded to x's type and stored) if
               // residual is given
    kSwiglu,   // y = silu(gate) * up; x is [m, 2k] with gate and up alternating in blocks of 8, as a GEMM over rows in
               // swiglu order leaves them
    kGeglu,    // likewise y = gelu(gate) * up, GELU with tanh; FP16 only
    kExperts,  // kNorm with a residual, where x is a sum of experts' rows, rounded as run_combine() does; FP16 and
               // weight_f32 only
  };
  Source source = Source::kPlain;
  int64_t m = 0;
  int64_t k = 0;                 // columns of y; at most kMaxColumns
  bool bf16 = false;             // x, weight (if 16 bits), residual and y_f16 are BF16, else FP16
  const void* x = nullptr;       // not of kExperts
  int64_t ldx = 0;               // elements
  const void* weight = nullptr;  // kNorm: [k], of x's type or, with weight_f32, FP32
  bool weight_f32 = false;
  float weight_offset = 0.0f;  // with weight_f32: added to each weight; Gemma's norms multiply by 1 + weight
  float epsilon = 1e-5f;
  void* residual =
      nullptr;  // kNorm: [m, k], read, and replaced by h unless h has a place of its own; null = no residual
  int64_t ldr = 0;
  // kExperts: the sum, of m rows of k features; out is not written. Rows are 16-byte aligned and k a multiple of 8, at
  // most kMaxExpertColumns.
  const CombineExpertsArgs* experts = nullptr;
  // kNorm with residual and weights of 16 bits: x is this GPU's part of a sum over a group's, which is rounded to x's
  // type before it is added to the residual. Rows are 16-byte aligned and k a multiple of 8. At most
  // max_reduced_rows(k) rows, and most_bytes(). Null = x is whole.
  const AllReduce* all_reduce = nullptr;
  void* h = nullptr;      // kNorm with residual: [m, k], ldr elements from row to row; null = residual
  void* y_f16 = nullptr;  // [m, k], may be x where both have k columns; null = not wanted
  int64_t ldy = 0;
  uint8_t* y_e4m3 = nullptr;  // [m, padded_k]; null = not wanted
  int64_t ldy_e4m3 = 0;
  float* scales = nullptr;  // [m], with y_e4m3: each row's largest magnitude / 448; x is worth code * scale
  // kPlain without y_f16: where a row's codes and scale go, device [m, copies]: to rows place[r, i] of y_e4m3 and
  // scales, nowhere where that is negative. Null = row r to row r.
  const int32_t* place = nullptr;
  int32_t copies = 0;            // at most 32
  bool batch_invariant = false;  // a norm's sum is added up in the same order whatever m is
  bool dependent_launch = true;
};

inline constexpr int64_t kMaxColumns = 32768;
inline constexpr int64_t kMaxExpertColumns = 8192;
// A call's blocks with all_reduce: each waits for the same row's on the other GPUs, so all are on a GPU together (of
// 132 SMs; of fewer, in the order in which they start).
inline constexpr int64_t kMaxReducedBlocks = 256;
constexpr int64_t max_reduced_rows(int64_t k) { return k <= 8192 ? kMaxReducedBlocks : kMaxReducedBlocks / 4; }

// Enqueues one kernel. No allocation, no synchronisation. kUsage for shapes and pointers that do not fit.
Status prepare_gemm_input(const GemmInputCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
