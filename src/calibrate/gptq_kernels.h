// The arithmetic of calibration: four small loops, compiled once for each instruction set and chosen at run time.
//
// A panel is [depth][kPanel], zero where a matrix ends. Every result is summed in one fixed order, so nothing depends
// on how work is shared among threads.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/instruction_set.h"

namespace nfp::calibrate {

inline constexpr int kPanel = 32;      // columns of a panel
inline constexpr int kSweepBlock = 4;  // columns that the sweep takes at once
inline constexpr int kMaxLanes = 32;   // rows that the sweep takes at once, at most

// `lanes` rows of a matrix, transposed: every array but factor is [cols][lanes], columns in the order of the sweep.
struct SweepTile {
  int64_t cols = 0;               // a multiple of kSweepBlock
  const float* weight = nullptr;  // the exact weight
  const float* nearest = nullptr;
  const float* step = nullptr;    // other neighbour - nearest; 0 where there is no choice
  const float* factor = nullptr;  // [cols / kSweepBlock][cols][kSweepBlock], GptqFactor::panels
  float* error = nullptr;         // out: weight - chosen
};

// H y = b for `lanes` right sides at once: H = U P U^T, U = the factor with ones on its diagonal, P = the squared
// pivots.
struct SolveTile {
  int64_t cols = 0;                        // a multiple of kSweepBlock
  const float* factor = nullptr;           // as SweepTile's
  const float* inverse_squares = nullptr;  // [cols] 1 / R_jj^2
  float* values = nullptr;                 // [cols][lanes]: b, then y
};

// One row of a matrix, columns in their own order.
struct DescentRow {
  int64_t cols = 0;
  const float* hessian = nullptr;  // [cols, stride], symmetric
  int64_t stride = 0;              // a multiple of kPanel
  float* error = nullptr;          // [cols] weight - chosen
  float* flip = nullptr;           // [cols] what taking the other neighbour adds to the error; 0 = no choice
  float* gradient = nullptr;       // [stride] sum over i of error_i H_ij
};

struct Kernels {
  std::string_view name;
  int lanes = 0;
  // c[i * stride + j] += sum over t of a[t * kPanel + i] * b[t * kPanel + j], for 0 <= i, j < kPanel.
  void (*add_product_f32)(const float* a, const float* b, int64_t depth, float* c, int64_t stride);
  void (*add_product_f64)(const double* a, const double* b, int64_t depth, double* c, int64_t stride);
  // Solves L y = x for the kPanel columns of x, in place. l: lower triangle [size, size] of row stride `stride`.
  void (*solve_lower_f64)(const double* l, int64_t stride, int64_t size, double* x);
  void (*sweep)(const SweepTile& tile);
  void (*solve)(const SolveTile& tile);
  // Column after column, takes the other neighbour where that lowers error H error^T. Returns how many it took.
  int64_t (*descend)(const DescentRow& row);
};

// Those of an instruction set that this machine has: the best that does not need more.
const Kernels& kernels_of(InstructionSet set);
// Those of the set chosen for this machine.
const Kernels& kernels();

}  // namespace nfp::calibrate
