// Whether a weight matrix can be nested, and with which row exponents (docs/format.md, "One row").
//
// A row may carry a power-of-two exponent e: its nested bytes hold v = FP16(w * 2^-e), and w is taken to be v * 2^e.
//
// FP16 rows: e is the smallest e >= 0 with |w| * 2^-e <= 1.75 for the whole row. The row nests if every w * 2^-e is an
//   FP16 number. That can fail only for weights that the shift pushes below FP16's normal range (|w| < 2^(e-14)).
// BF16 rows: "loses nothing" means that no weight ends farther from its BF16 value than the plain conversion to FP16
// would
//   put it: v * 2^e is w itself or FP16(w). For e <= 0 this always holds (multiplying by 2^-e first only refines FP16's
//   grid). So: e as for FP16 where that makes every weight exact or the largest weight is over 0.875; otherwise the
//   smallest e of either sign, which puts the largest weight in (0.875, 1.75] and keeps the bits of the smallest ones.
//   v has at most 8 significant bits, so v * 2^e is a BF16 number: nothing more is lost on the way back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/float_types.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "nested/matrix_reader.h"

namespace nfp {

enum class WeightType : uint8_t { kF16, kBF16 };

inline float value_of(uint16_t bits, WeightType type) {
  return type == WeightType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits);
}

// e is kept within these, so that 2^e and 2^(e-8) are normal FP32 numbers with room for the products they scale.
inline constexpr int kMinRowExponent = -100;
inline constexpr int kMaxRowExponent = 100;

// A matrix [rows, cols] before nesting.
struct MatrixSource {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;
  WeightType type = WeightType::kF16;
  // Thread-safe. out: [count, cols] bits of `type`.
  std::function<Status(int64_t first, int64_t count, uint16_t* out)> read;
  // Called when the last reader of the matrix goes away; may be empty.
  std::function<void()> done;
};

struct RowAnalysis {
  bool nests = false;
  int8_t exponent = 0;   // meaningful when nests
  uint16_t largest = 0;  // bits of the largest |w|, in the source's type
  int64_t largest_col = 0;
  int64_t breaking_col = -1;     // a weight that the shift would change; -1 when nests
  int64_t not_finite_col = -1;   // the first NaN or infinity; -1 when there is none
  int64_t over_col = -1;         // the first BF16 weight too large for FP16; -1 when there is none
  int64_t inexact_fp16 = 0;      // BF16 weights that FP16(w) changes
  int64_t inexact_nested = 0;    // BF16 weights that v * 2^e changes
  float largest_error_fp16 = 0;  // max |FP16(w) - w|, over weights within FP16's range
  float largest_error_nested = 0;
};

RowAnalysis analyse_row(std::span<const uint16_t> row, WeightType type);

struct MatrixAnalysis {
  Storage storage = Storage::kDenseF16;
  std::vector<int8_t> exponents;  // [rows] when nested, else empty
  std::string reason;  // why dense: names the row, its largest |w| and the weight that breaks; empty when nested
  bool nests_by_paper = false;  // every |w| <= 1.75
  float largest = 0;            // max |w|
  int64_t largest_row = 0;
  int64_t rows_shifted = 0;  // rows with e != 0
  int64_t inexact_fp16 = 0;  // sums over rows of RowAnalysis' counts; of FP32 sources what FP16 changes
  int64_t inexact_nested = 0;
  float largest_error_fp16 = 0;
  float largest_error_nested = 0;

  int64_t inexact() const { return storage == Storage::kNested ? inexact_nested : inexact_fp16; }
};

// Reads the matrix once, on all threads. Errors: what `read` gives; NaN or infinity; a BF16 weight that neither FP16
// nor a nested row holds.
Result<MatrixAnalysis> analyse_matrix(const MatrixSource& source, ThreadPool& threads);

// Row -> the FP16 bits v that are split. For BF16 rows this is also where they are rounded.
void shift_row(std::span<const uint16_t> row, WeightType type, int exponent, uint16_t* shifted);

// A reader that converts and splits on the fly; holds nothing but the exponents.
std::unique_ptr<MatrixReader> make_matrix_reader(MatrixSource source, MatrixAnalysis analysis);

}  // namespace nfp
