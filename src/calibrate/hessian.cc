#include "calibrate/hessian.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "calibrate/kernels.h"

namespace nfp {

using calibrate::kPanel;

namespace {
constexpr int64_t kRowsAtOnce = 256;  // inputs packed at once: a panel of them is 32 KB
}

Hessian::Hessian(int64_t cols) : cols_(cols), padded_((cols + kPanel - 1) / kPanel * kPanel) {
  sums_.assign(static_cast<size_t>(padded_ * padded_), 0.0f);
}

float Hessian::at(int64_t i, int64_t j) const {
  const bool below = i / kPanel >= j / kPanel;
  return sums_[static_cast<size_t>(below ? i * padded_ + j : j * padded_ + i)];
}

void Hessian::add(const float* x, int64_t rows, ThreadPool& threads) {
  tokens_ += rows;
  const int64_t panels = padded_ / kPanel;
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    const int64_t depth = std::min(kRowsAtOnce, rows - first);
    panels_.assign(static_cast<size_t>(depth * padded_), 0.0f);
    threads.parallel_for(panels, 1, [&](Range range) {
      for (int64_t p = range.begin; p < range.end; ++p) {
        const int64_t width = std::min<int64_t>(kPanel, cols_ - p * kPanel);
        for (int64_t t = 0; t < depth; ++t) {
          const float* from = x + (first + t) * cols_ + p * kPanel;
          std::copy(from, from + width, panels_.data() + (p * depth + t) * kPanel);
        }
      }
    });
    // Tile number i (i + 1) / 2 + j is that of panels i >= j.
    threads.parallel_for(panels * (panels + 1) / 2, 1, [&](Range range) {
      int64_t i = 0;
      while ((i + 1) * (i + 2) / 2 <= range.begin) ++i;
      int64_t j = range.begin - i * (i + 1) / 2;
      for (int64_t tile = range.begin; tile < range.end; ++tile) {
        calibrate::kernels().add_product_f32(panels_.data() + i * depth * kPanel, panels_.data() + j * depth * kPanel,
                                             depth, sums_.data() + i * kPanel * padded_ + j * kPanel, padded_);
        if (++j > i) ++i, j = 0;
      }
    });
  }
}

Status Hessian::finish(double damping, const std::string& name) {
  double mean = 0;
  for (int64_t i = 0; i < cols_; ++i) mean += at(i, i);
  mean /= static_cast<double>(cols_);
  if (!std::isfinite(mean)) {
    return error(ErrorCode::kInvalidInput,
                 "{}: the layer's inputs overflow over the calibration text; use --calibrate none", name);
  }
  const auto damp = static_cast<float>(mean > 0 ? damping * mean : 1.0);
  for (int64_t i = 0; i < padded_; ++i) {
    for (int64_t j = i + 1; j < padded_; ++j) {
      sums_[static_cast<size_t>(i * padded_ + j)] = sums_[static_cast<size_t>(j * padded_ + i)];
    }
    if (i < cols_) sums_[static_cast<size_t>(i * padded_ + i)] += damp;
  }
  panels_.clear();
  panels_.shrink_to_fit();
  return ok_status();
}

double hessian_flops_a_second(ThreadPool& threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kDepth = 256;
  constexpr int kRounds = 400;  // 0.2 GFLOP a thread
  std::vector<float> a(kDepth * kPanel, 1.0f), b(kDepth * kPanel, 1e-3f);
  const auto round = [&] {
    const auto start = Clock::now();
    threads.run([&](int) {
      std::vector<float> sums(kPanel * kPanel);
      for (int i = 0; i < kRounds; ++i) {
        calibrate::kernels().add_product_f32(a.data(), b.data(), kDepth, sums.data(), kPanel);
      }
    });
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const double seconds = std::min(round(), round());
  return 2.0 * kDepth * kPanel * kPanel * kRounds * threads.size() / seconds;
}

}  // namespace nfp
