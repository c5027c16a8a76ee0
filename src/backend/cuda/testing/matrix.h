// Random matrices of every kind that a checkpoint gives, for tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/float_types.h"
#include "nested/format.h"
#include "nested/matrix_reader.h"

namespace nfp::cuda::testing {

enum class Kind : uint8_t {
  kPlain,       // nested, no row exponent
  kShifted,     // nested, some rows with an exponent
  kRestricted,  // nested, calibrated: other neighbours where the biased join allows them
  kFree,        // nested, calibrated: other neighbours anywhere
  kDense,       // FP16
  kScaled,      // nested, with a factor beside each row's exponent
};

class TestMatrix final : public MatrixReader {
 public:
  TestMatrix(Kind kind, int64_t rows, int64_t cols, uint32_t seed)
      : kind_(kind), rows_(rows), cols_(cols), name_("matrix " + std::to_string(seed)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < rows; ++r) {
      exponents_.push_back(static_cast<int8_t>(kind == Kind::kShifted && r % 3 == 1 ? 1 + random() % 5 : 0));
      for (int64_t c = 0; c < cols; ++c) {
        float v = std::clamp(normal(random) * 0.2f, -1.75f, 1.75f);
        if (kind == Kind::kDense && random() % 64 == 0) v *= 40.0f;
        const uint16_t bits = fp32_to_fp16(v);
        fp16_.push_back(fp32_to_fp16(std::ldexp(fp16_to_fp32(bits), exponents_.back())));
        if (storage() != Storage::kNested) continue;
        const NestedWeight nested = split(bits);
        const bool may_flip = kind == Kind::kFree || (kind == Kind::kRestricted && (bits & 0x80) == 0);
        const uint8_t other = other_neighbour(bits);
        const bool flip = may_flip && random() % 2 == 0 && (other & 0x7f) != 0x7f;
        upper_.push_back(flip ? other : nested.upper);
        lower_.push_back(nested.lower);
      }
    }
  }

  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  Storage storage() const override { return kind_ == Kind::kDense ? Storage::kDenseF16 : Storage::kNested; }
  const std::string& name() const override { return name_; }
  bool uppers_restricted() const override { return kind_ != Kind::kFree; }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    std::copy_n(fp16_.begin() + first * cols_, count * cols_, out);
    return ok_status();
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    if (fail_at >= first && fail_at < first + count) {
      return error(ErrorCode::kIo, "{}: row {} cannot be read", name_, fail_at);
    }
    std::copy_n(upper_.begin() + first * cols_, count * cols_, upper);
    std::copy_n(lower_.begin() + first * cols_, count * cols_, lower);
    std::copy_n(exponents_.begin() + first, count, exponent);
    return ok_status();
  }
  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    for (int64_t r = 0; r < count; ++r) factor[r] = this->factor(first + r);
    return ok_status();
  }

  // The weight as FP16 mode sees it, and as FP8 mode does.
  float exact(int64_t row, int64_t col) const {
    return fp16_to_fp32(fp16_[static_cast<size_t>(row * cols_ + col)]) * factor(row);
  }
  float fp8(int64_t row, int64_t col) const {
    return std::ldexp(e4m3_to_fp32(upper_[static_cast<size_t>(row * cols_ + col)]),
                      exponents_[static_cast<size_t>(row)] - 8) *
           factor(row);
  }
  float factor(int64_t row) const { return kind_ == Kind::kScaled ? 0.3f + static_cast<float>(row % 7) : 1.0f; }
  uint16_t bits(int64_t row, int64_t col) const { return fp16_[static_cast<size_t>(row * cols_ + col)]; }
  int exponent(int64_t row) const { return exponents_[static_cast<size_t>(row)]; }

  int64_t fail_at = -1;  // a row that cannot be read

 private:
  const Kind kind_;
  const int64_t rows_, cols_;
  const std::string name_;
  std::vector<uint16_t> fp16_;
  std::vector<uint8_t> upper_, lower_;
  std::vector<int8_t> exponents_;
};

}  // namespace nfp::cuda::testing
