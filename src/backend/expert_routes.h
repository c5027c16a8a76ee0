// Apart from backend.h because nvcc does not compile result.h's fmt.
#pragma once

#include <cstdint>

namespace nfp {

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

}  // namespace nfp
