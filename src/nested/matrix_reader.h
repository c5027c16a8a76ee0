// How a weight matrix reaches a backend: read row by row, by several threads at once, in the form in which it is
// stored. Readers of checkpoints implement it; Backend::make_linear consumes it. Nothing is held twice: a backend asks
// for a few rows, writes them into its own layout and asks for the next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/result.h"

namespace nfp {

enum class Storage : uint8_t {
  kNested,    // two byte planes and a power-of-two exponent a row (docs/format.md)
  kDenseF16,  // plain FP16, for a matrix that cannot be nested
};

// A logical [rows, cols] FP16 matrix, row-major, rows = output features (n), cols = input features (k). All read
// functions are thread-safe and take 0 <= first, first + count <= rows().
class MatrixReader {
 public:
  virtual ~MatrixReader() = default;

  virtual int64_t rows() const = 0;
  virtual int64_t cols() const = 0;
  virtual Storage storage() const = 0;
  // For messages: the tensor's name, with the file where that helps.
  virtual const std::string& name() const = 0;

  // out: [count, cols] FP16 bits.
  virtual Status read_fp16(int64_t first, int64_t count, uint16_t* out) const = 0;

  // Only for kNested. upper: [count, cols] E4M3 of w * 2^(8-e); lower: [count, cols] low bytes of the FP16 of w * 2^-e
  // (unbiased); exponent: [count] the row's e.
  virtual Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const = 0;

  // Only for kNested. factor: [count] what a row's weights are multiplied by beside 2^e; 1 in all checkpoints, so that
  // the FP16 form is exact.
  virtual Status row_factors(int64_t first, int64_t count, float* factor) const {
    (void)first;
    std::fill_n(factor, count, 1.0f);
    return ok_status();
  }

  // Whether every weight whose lower byte has its top bit set has upper rounded to nearest (docs/format.md): a backend
  // may then use the biased-lower join. True for uncalibrated matrices.
  virtual bool uppers_restricted() const { return true; }
};

}  // namespace nfp
