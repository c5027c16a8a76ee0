// What the CPU backend's tests share: random numbers, a MatrixReader over plain values, tables under test.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernel_table.h"
#include "base/float_types.h"
#include "nested/matrix_reader.h"

namespace nfp::cpu {

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  uint32_t bits() { return static_cast<uint32_t>(engine_()); }
  float normal(float sigma = 1.0f) { return std::normal_distribution<float>(0.0f, sigma)(engine_); }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  std::vector<float> normals(size_t count, float sigma = 1.0f) {
    std::vector<float> values(count);
    for (float& v : values) v = normal(sigma);
    return values;
  }

 private:
  std::mt19937 engine_;
};

// FP16 bits with |w| <= 1.75: subnormals, zeros of both signs and the largest values among them.
inline uint16_t random_nestable(Random& random) {
  const auto sign = static_cast<uint16_t>(random.bits() & 0x8000u);
  switch (random.integer(0, 9)) {
    case 0:
      return static_cast<uint16_t>(sign | (random.bits() & 0x3ffu));  // subnormal or zero
    case 1:
      return static_cast<uint16_t>(sign | (0x3f00u - (random.bits() & 0xffu)));  // about 1.75
    default: {
      const uint16_t w = fp32_to_fp16(random.normal(0.3f));
      return (w & 0x7fffu) <= 0x3f00u ? w : static_cast<uint16_t>(sign | 0x3f00u);
    }
  }
}

// A matrix in memory, in any storage. Nested uppers are round-to-nearest, or the other neighbour (`calibrated`).
class TestMatrix final : public MatrixReader {
 public:
  TestMatrix(Storage storage, int64_t rows, int64_t cols, Random& random, bool calibrated = false)
      : storage_(storage), rows_(rows), cols_(cols), name_("test.weight") {
    const auto count = static_cast<size_t>(rows * cols);
    for (size_t i = 0; i < count; ++i) {
      words_.push_back(random_nestable(random));
      const uint32_t magnitude = words_.back() & 0x7fffu;
      uint32_t upper = (magnitude + 0x3fu + ((magnitude >> 7) & 1u)) >> 7;
      if (calibrated && (magnitude & 0x7fu) != 0 && random.integer(0, 1) == 1) {
        upper = upper == magnitude >> 7 ? upper + 1 : upper - 1;
        if (upper > 0x7eu) upper = 0x7eu;
      }
      upper_.push_back(static_cast<uint8_t>(((words_.back() >> 8) & 0x80u) | upper));
    }
    for (int64_t r = 0; r < rows; ++r) {
      exponent_.push_back(static_cast<int8_t>(random.integer(-2, 3)));
      factor_.push_back(r % 3 == 1 ? std::fabs(random.normal()) + 1e-4f : 1.0f);
    }
  }

  int64_t rows() const override { return rows_; }
  int64_t cols() const override { return cols_; }
  Storage storage() const override { return storage_; }
  const std::string& name() const override { return name_; }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    if (fails_at >= first && fails_at < first + count) return bad();
    std::copy_n(words_.begin() + first * cols_, count * cols_, out);
    return ok_status();
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    if (fails_at >= first && fails_at < first + count) return bad();
    std::copy_n(upper_.begin() + first * cols_, count * cols_, upper);
    for (int64_t i = 0; i < count * cols_; ++i) {
      lower[i] = static_cast<uint8_t>(words_[static_cast<size_t>(first * cols_ + i)] & 0xffu);
    }
    std::copy_n(exponent_.begin() + first, count, exponent);
    return ok_status();
  }
  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    std::copy_n(factor_.begin() + first, count, factor);
    return ok_status();
  }

  // The number that the kernels multiply by x (row scale apart), and the row's scale.
  float value(int64_t row, int64_t col, bool upper_only) const {
    const auto at = static_cast<size_t>(row * cols_ + col);
    if (storage_ == Storage::kNested && upper_only) return e4m3_to_fp32(upper_[at]) * 0x1p-8f;
    return fp16_to_fp32(words_[at]);
  }
  float scale(int64_t row) const {
    const auto at = static_cast<size_t>(row);
    return storage_ == Storage::kNested ? std::ldexp(factor_[at], exponent_[at]) : 1.0f;
  }

  void fill_largest() {  // 1.75 in either reading
    std::fill(words_.begin(), words_.end(), uint16_t{0x3f00});
    std::fill(upper_.begin(), upper_.end(), uint8_t{0x7e});
  }

  int64_t fails_at = -1;  // row whose reading fails

 private:
  Status bad() const { return error(ErrorCode::kInvalidInput, "{}: row {} holds a NaN", name_, fails_at); }

  Storage storage_;
  int64_t rows_, cols_;
  std::string name_;
  std::vector<uint16_t> words_;
  std::vector<uint8_t> upper_;
  std::vector<int8_t> exponent_;
  std::vector<float> factor_;
};

// All tables that this machine can run, the scalar ones first.
inline std::vector<const KernelTable*> runnable_tables() {
  std::vector<const KernelTable*> tables = {&scalar_kernels(), &scalar_bf16_kernels(), &scalar_fp16_kernels(),
                                            &scalar_tile_kernels()};
  for (const InstructionSet set : instruction_sets(detect_features())) {
    if (set != InstructionSet::kScalar) tables.push_back(&kernels_of(set));
  }
  return tables;
}

inline const KernelTable& reference_of(const KernelTable& table) {
  switch (table.pairs) {
    case PairArithmetic::kBf16:
      return scalar_bf16_kernels();
    case PairArithmetic::kFp16:
      return scalar_fp16_kernels();
    case PairArithmetic::kBf16Tiles:
      return scalar_tile_kernels();
    default:
      return scalar_kernels();
  }
}

}  // namespace nfp::cpu
