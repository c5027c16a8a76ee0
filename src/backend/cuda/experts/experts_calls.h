// What the functions of experts.h take. Apart from them because nvcc does not compile result.h's fmt.
#pragma once

#include <cstdint>

#include "backend/expert_routes.h"

namespace nfp::cuda {

// One expert's matrix [n, k]: byte planes (layout.h), or dense FP16.
struct ExpertMatrix {
  const uint8_t* upper = nullptr;    // of dense ones the FP16 numbers, row-major
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
  const void* x = nullptr;  // FP16 [rows, k], or where `sorted` [rows * top, k] by assignment
  bool sorted = false;
  int64_t rows = 0;
  ExpertEpilogue epilogue = ExpertEpilogue::kStore;
  void* y = nullptr;  // FP16 [rows * top, n (or n / 2)] by assignment
};

}  // namespace nfp::cuda
