// Where a token's experts are, and the operations that say so. Apart from backend.h because nvcc does not compile
// result.h's fmt.
#pragma once

#include <cstdint>

namespace nfp {

inline constexpr int32_t kMaxExperts = 512;    // a layer
inline constexpr int32_t kMaxTopExperts = 32;  // a token

// Where a step's rows go: device memory that `route` fills and the others read. A row takes part once for each of its
// `top` experts; these assignments are sorted by expert, and within an expert by row.
struct ExpertRoutes {
  int32_t experts = 0;
  int32_t top = 0;
  int32_t* start = nullptr;  // [experts + 1] expert e has assignments start[e] .. start[e + 1] - 1
  int32_t* row = nullptr;    // [rows * top] of each assignment
  int32_t* place = nullptr;  // [rows, top] the assignment of each row's experts, likeliest first
  float* weight = nullptr;   // [rows, top] what its result counts
};

// Softmax of x router^T over the experts in FP32; the `top` likeliest of each row are its experts.
struct RouteArgs {
  const void* x = nullptr;             // [rows, hidden]
  const float* router = nullptr;       // device [experts, hidden]
  const float* shared_gate = nullptr;  // device [hidden], or null
  int32_t rows = 0;
  int32_t hidden = 0;
  bool renormalise = false;      // a row's weights are made to sum to 1
  bool batch_invariant = false;  // a row's logits are the same bits whatever the other rows (the CPU's always are)
  ExpertRoutes routes;
  float* logits = nullptr;         // device [rows, experts], working space
  float* shared_weight = nullptr;  // device [rows] sigmoid(x shared_gate), where there is such a gate
  // ExpertLinearArgs::gathered of the operation that multiplies x next, into which a backend may put x already; null =
  // another comes next.
  void* gathered = nullptr;
};

// out[r] = sum over i of weight[r, i] x[place[r, i]], in the order of i, plus shared_weight[r] shared[r]. Negative
// places count nothing.
struct CombineExpertsArgs {
  const void* x = nullptr;  // [rows * top, hidden] by assignment
  ExpertRoutes routes;
  int32_t rows = 0;
  int32_t hidden = 0;
  const void* shared = nullptr;          // [rows, hidden], or null
  const float* shared_weight = nullptr;  // device [rows]; null = 1
  void* out = nullptr;                   // [rows, hidden]
  bool follows = false;                  // the operation just before this one is the product that made x
  bool bf16 = false;                     // x, shared and out are BF16; else FP16
};

}  // namespace nfp
