// What the functions of experts.h take. Apart from them because nvcc does not compile result.h's fmt.
#pragma once

#include <cstdint>

#include "backend/expert_routes.h"

namespace nfp::cuda {

// One expert's matrix [n, k]: byte planes (layout.h), or dense FP16.
struct ExpertMatrix {
  const uint8_t* upper = nullptr;    // of dense ones the numbers, of x's type, row-major
  const uint8_t* lower = nullptr;    // null where only upper bytes are to be read
  const float* row_scale = nullptr;  // [n], null = all 1
  bool biased = false;               // Join::kBiased
  bool dense = false;
};

enum class ExpertEpilogue : uint8_t { kStore, kSwiglu, kGeglu };

struct ExpertLinearCall {
  const ExpertMatrix* matrices = nullptr;  // host [experts]
  ExpertRoutes routes;
  int64_t n = 0;            // rows of every matrix; with a gate in swiglu order (layout.h), a multiple of 16
  int64_t k = 0;            // a multiple of 8
  const void* x = nullptr;  // [rows, k], or where `sorted` [rows * top, k] by assignment
  bool sorted = false;
  // The kernel just before this one in the stream is a product of the same routes that made x: weights are then asked
  // for while it is still at work.
  bool follows = false;
  int64_t rows = 0;
  bool distinct = false;  // no row has an expert twice, as run_route makes them: one row then needs no `gathered`
  ExpertEpilogue epilogue = ExpertEpilogue::kStore;
  void* y = nullptr;  // [rows * top, n (or n / 2)] by assignment
  bool bf16 = false;  // x (but for E4M3) and y are BF16, and so are all weights (as numbers); else FP16
  // With E4M3 activations (all matrices by their upper bytes): x is sorted, E4M3 in the GEMM's byte order, rows of
  // padded_k() bytes (gemm/plan/layout.h; GemmInputCall::place puts them there), and each row is worth its scale times
  // that.
  bool e4m3 = false;
  const float* token_scale = nullptr;  // device, one for each row of x
  // Device memory [rows * top, k] for x by assignment where it is not yet. Without it the grouped product (below) takes
  // sorted x alone.
  void* gathered = nullptr;
  int32_t tile_tokens = 0;  // of the grouped product, to measure: 0 = as the numbers of rows and experts suggest, -1 =
                            // the other kernel
};

inline constexpr int64_t kPlacedAtOnce = 1024;

// Routes that something else has chosen. An id that has no expert here (of another GPU, or none at all) has no
// assignment: its place is -1.
struct AssignArgs {
  const int32_t* ids = nullptr;  // device [rows, top], id_stride from row to row
  int32_t id_stride = 0;
  const int32_t* map = nullptr;  // device [map_size] each id's expert here, or a negative number; null = the id itself
  int32_t map_size = 0;
  int64_t rows = 0;
  ExpertRoutes routes;  // start, row and place are written
  // x's rows by assignment too, where there are at most kPlacedAtOnce: 16-byte aligned rows of row_bytes, a multiple of
  // 16.
  const void* x = nullptr;
  void* gathered = nullptr;  // null = not wanted
  int64_t row_bytes = 0;
};

}  // namespace nfp::cuda
