#include "calibrate/descent.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "calibrate/gptq.h"
#include "calibrate/gptq_kernels.h"

namespace nfp {
namespace {

using calibrate::kernels;
using calibrate::kPanel;

// kPanel rows at once: their gradients are one matrix product, the descent itself goes row by row.
class DescentTile {
 public:
  DescentTile(const Hessian& hessian, UpperRule rule)
      : hessian_(hessian),
        rule_(rule),
        stride_(hessian.padded()),
        error_(static_cast<size_t>(stride_ * kPanel)),
        flip_(error_.size()),
        gradient_(error_.size()),
        transposed_(error_.size()),
        sums_(static_cast<size_t>(kPanel * kPanel)) {}

  // shift: null = none.
  int64_t run(const uint16_t* nested, const float* shift, int64_t rows, uint8_t* choice) {
    const int64_t cols = hessian_.cols();
    const int64_t row_bytes = choice_row_bytes(cols);
    std::fill(error_.begin(), error_.end(), 0.0f);
    std::fill(flip_.begin(), flip_.end(), 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const Neighbours n = neighbours(nested[r * cols + c], rule_);
        const bool other = ((choice[r * row_bytes + c / 8] >> (c % 8)) & 1u) != 0;
        const auto at = static_cast<size_t>(r * stride_ + c);
        error_[at] = n.weight + (shift != nullptr ? shift[r * cols + c] : 0.0f) - n.nearest - (other ? n.step : 0.0f);
        flip_[at] = other ? n.step : -n.step;
      }
    }
    find_gradients();
    int64_t taken = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * stride_;
      const calibrate::DescentRow row = {
          cols, hessian_.row(0), stride_, error_.data() + at, flip_.data() + at, gradient_.data() + at};
      for (int pass = 0; pass < kDescentPasses; ++pass) {
        const int64_t now = kernels().descend(row);
        taken += now;
        if (now == 0) break;
      }
      for (int64_t c = 0; c < cols; ++c) {
        const Neighbours n = neighbours(nested[r * cols + c], rule_);
        const bool other = n.step != 0.0f && flip_[static_cast<size_t>(at + c)] == n.step;
        uint8_t& byte = choice[r * row_bytes + c / 8];
        const auto bit = static_cast<uint8_t>(1u << (c % 8));
        byte = static_cast<uint8_t>(other ? byte | bit : byte & ~bit);
      }
    }
    return taken;
  }

 private:
  // gradient_ = error_ H. H is symmetric, so a panel of its rows' columns is a panel of the product's.
  void find_gradients() {
    for (int64_t c = 0; c < stride_; ++c) {
      for (int64_t r = 0; r < kPanel; ++r) {
        transposed_[static_cast<size_t>(c * kPanel + r)] = error_[static_cast<size_t>(r * stride_ + c)];
      }
    }
    std::vector<float>& panel = panel_;
    panel.resize(static_cast<size_t>(stride_ * kPanel));
    for (int64_t first = 0; first < stride_; first += kPanel) {
      for (int64_t i = 0; i < stride_; ++i) {
        std::copy_n(hessian_.row(i) + first, kPanel, panel.begin() + i * kPanel);
      }
      std::fill(sums_.begin(), sums_.end(), 0.0f);
      kernels().add_product_f32(transposed_.data(), panel.data(), stride_, sums_.data(), kPanel);
      for (int64_t r = 0; r < kPanel; ++r) {
        std::copy_n(sums_.begin() + r * kPanel, kPanel, gradient_.begin() + r * stride_ + first);
      }
    }
  }

  const Hessian& hessian_;
  UpperRule rule_;
  int64_t stride_;
  std::vector<float> error_, flip_, gradient_;  // [kPanel, stride]
  std::vector<float> transposed_, panel_;       // [stride, kPanel]
  std::vector<float> sums_;                     // [kPanel, kPanel]
};

}  // namespace

int64_t descend(const Hessian& hessian, std::span<const uint16_t> nested, int64_t rows, UpperRule rule,
                ThreadPool& threads, std::span<uint8_t> choice, std::span<const float> shift) {
  const int64_t cols = hessian.cols();
  std::vector<int64_t> taken(static_cast<size_t>(threads.size()), 0);
  threads.run([&](int thread) {
    const Range tiles = partition((rows + kPanel - 1) / kPanel, thread, threads.size());
    if (tiles.empty()) return;
    DescentTile work(hessian, rule);
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const int64_t first = tile * kPanel;
      taken[static_cast<size_t>(thread)] +=
          work.run(nested.data() + first * cols, shift.empty() ? nullptr : shift.data() + first * cols,
                   std::min<int64_t>(kPanel, rows - first), choice.data() + first * choice_row_bytes(cols));
    }
  });
  return std::accumulate(taken.begin(), taken.end(), int64_t{0});
}

}  // namespace nfp
