// How a weight matrix lies in memory: panels of 16 rows (outputs), so that vector lanes run across outputs and each
// output's sum runs over k in order, whatever the instruction set.
//
// A panel is k/4 groups (k rounded up; rows and steps that do not exist are zero). A group holds 4 steps of k of 16
// rows: 64 upper bytes and, in another plane, 64 lower bytes, or 128 bytes of FP16 for a dense panel. Bytes of a group:
//   lane 0: step 0 rows 0..7, step 2 rows 0..7     lane 1: step 0 rows 8..15, step 2 rows 8..15
//   lane 2: step 1 rows 0..7, step 3 rows 0..7     lane 3: step 1 rows 8..15, step 3 rows 8..15
// so that interleaving the bytes of an upper and a lower vector inside 128-bit lanes (VPUNPCKLBW, VPUNPCKHBW) gives the
// FP16 words of 16 rows at one step in each 256-bit half, ready for VCVTPH2PS. Dense groups are step-major words.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nfp::cpu {

inline constexpr int kPanelRows = 16;
inline constexpr int kGroupSteps = 4;
inline constexpr size_t kGroupBytes = 64;  // of one plane

enum class PanelKind : uint8_t {
  kNested,  // upper and lower
  kDense,   // `upper` points to FP16 words
};

// Small: a model has so many that no cache holds one when its turn comes.
struct Panel {
  const uint8_t* upper = nullptr;
  const uint8_t* lower = nullptr;
  // [16] what the sum over k of x * (FP16 value of the panel's bytes) is multiplied by; then, if it is `biased`, [16]
  // what is added.
  const float* scale = nullptr;
  int32_t column = 0;         // of y that row 0 goes to
  uint8_t stride = 1;         // columns from one row to the next (2 in interleaved weights)
  uint8_t rows = kPanelRows;  // that exist
  PanelKind kind = PanelKind::kNested;
  bool biased = false;
  const float* bias() const { return biased ? scale + kPanelRows : nullptr; }
};
static_assert(sizeof(Panel) == 32);

// Position of (row, step) in a group of bytes.
constexpr size_t group_position(int row, int step) {
  const int place = ((step & 1) * 2 + (row >> 3)) * 16 + (step >> 1) * 8 + (row & 7);
  return static_cast<size_t>(place);
}

}  // namespace nfp::cpu
