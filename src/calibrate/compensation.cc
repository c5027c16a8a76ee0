#include "calibrate/compensation.h"

#include <algorithm>
#include <cmath>

#include "base/float_types.h"
#include "calibrate/gptq_kernels.h"

namespace nfp {
namespace {

using calibrate::kernels;
using calibrate::kPanel;

// kPanel rows at once: their right sides are one matrix product, then they are solved some lanes at a time.
class ShiftTile {
 public:
  ShiftTile(const GptqFactor& factor, const CompensationInputs& errors)
      : factor_(factor),
        errors_(errors),
        cols_(factor.cols),
        stride_(errors.inputs->padded()),
        weights_(static_cast<size_t>(cols_ * kPanel)),
        panel_(weights_.size()),
        sums_(static_cast<size_t>(kPanel * kPanel)),
        sides_(static_cast<size_t>(stride_ * kPanel)),
        values_(static_cast<size_t>(factor.padded * kernels().lanes)) {}

  // first: the tile's first row of the matrix. out: [rows, cols].
  void run(const uint16_t* nested, const int8_t* exponent, int64_t first, int64_t rows, float* out) {
    std::fill(weights_.begin(), weights_.end(), 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols_; ++c) {
        weights_[static_cast<size_t>(c * kPanel + r)] = fp16_to_fp32(nested[r * cols_ + c]) * 256.0f;
      }
    }
    find_sides(exponent, first, rows);
    const int lanes = kernels().lanes;
    for (int64_t group = 0; group < rows; group += lanes) solve(group, std::min<int64_t>(lanes, rows - group), out);
  }

 private:
  // sides_ [kPanel, stride] = w D + E, in units of w * 2^(8-e).
  void find_sides(const int8_t* exponent, int64_t first, int64_t rows) {
    for (int64_t from = 0; from < stride_; from += kPanel) {
      for (int64_t c = 0; c < cols_; ++c) {
        std::copy_n(errors_.inputs->row(c) + from, kPanel, panel_.begin() + c * kPanel);
      }
      std::fill(sums_.begin(), sums_.end(), 0.0f);
      kernels().add_product_f32(weights_.data(), panel_.data(), cols_, sums_.data(), kPanel);
      for (int64_t r = 0; r < kPanel; ++r) {
        std::copy_n(sums_.begin() + r * kPanel, kPanel, sides_.begin() + r * stride_ + from);
      }
    }
    if (errors_.residual == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      const float unit = std::ldexp(1.0f, 8 - exponent[r]);
      const float* of_row = errors_.residual->row(first + r);
      for (int64_t c = 0; c < cols_; ++c) sides_[static_cast<size_t>(r * stride_ + c)] += unit * of_row[c];
    }
  }

  void solve(int64_t group, int64_t count, float* out) {
    const int64_t lanes = kernels().lanes;
    std::fill(values_.begin(), values_.end(), 0.0f);
    for (int64_t j = 0; j < cols_; ++j) {
      const int64_t c = factor_.order[static_cast<size_t>(j)];
      for (int64_t lane = 0; lane < count; ++lane) {
        values_[static_cast<size_t>(j * lanes + lane)] = sides_[static_cast<size_t>((group + lane) * stride_ + c)];
      }
    }
    kernels().solve({factor_.padded, factor_.panels.data(), factor_.inverse_squares.data(), values_.data()});
    for (int64_t j = 0; j < cols_; ++j) {
      const int64_t c = factor_.order[static_cast<size_t>(j)];
      for (int64_t lane = 0; lane < count; ++lane) {
        out[(group + lane) * cols_ + c] = kShiftTaken * values_[static_cast<size_t>(j * lanes + lane)];
      }
    }
  }

  const GptqFactor& factor_;
  const CompensationInputs& errors_;
  int64_t cols_, stride_;
  std::vector<float> weights_, panel_;  // [cols, kPanel]
  std::vector<float> sums_;             // [kPanel, kPanel]
  std::vector<float> sides_;            // [kPanel, stride]
  std::vector<float> values_;           // [padded, lanes]
};

}  // namespace

std::vector<float> find_shifts(const GptqFactor& factor, const CompensationInputs& errors,
                               std::span<const uint16_t> nested, std::span<const int8_t> exponent,
                               ThreadPool& threads) {
  const auto rows = static_cast<int64_t>(exponent.size());
  std::vector<float> shift(nested.size());
  threads.run([&](int thread) {
    const Range tiles = partition((rows + kPanel - 1) / kPanel, thread, threads.size());
    if (tiles.empty()) return;
    ShiftTile work(factor, errors);
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const int64_t first = tile * kPanel;
      work.run(nested.data() + first * factor.cols, exponent.data() + first, first,
               std::min<int64_t>(kPanel, rows - first), shift.data() + first * factor.cols);
    }
  });
  return shift;
}

}  // namespace nfp
