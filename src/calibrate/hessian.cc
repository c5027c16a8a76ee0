#include "calibrate/hessian.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "calibrate/gptq_kernels.h"

namespace nfp {

using calibrate::kPanel;

namespace {

constexpr int64_t kRowsAtOnce = 256;  // inputs packed at once: a panel of them is 32 KB

constexpr int64_t whole_panels(int64_t count) { return (count + kPanel - 1) / kPanel * kPanel; }

// x: [depth, cols] -> [panels][depth][kPanel], zeros past the last column.
void pack(const float* x, int64_t depth, int64_t cols, ThreadPool& threads, std::vector<float>& packed) {
  const int64_t panels = whole_panels(cols) / kPanel;
  packed.assign(static_cast<size_t>(panels * depth * kPanel), 0.0f);
  threads.parallel_for(panels, 1, [&](Range range) {
    for (int64_t p = range.begin; p < range.end; ++p) {
      const int64_t width = std::min<int64_t>(kPanel, cols - p * kPanel);
      for (int64_t t = 0; t < depth; ++t) {
        const float* from = x + t * cols + p * kPanel;
        std::copy(from, from + width, packed.data() + (p * depth + t) * kPanel);
      }
    }
  });
}

}  // namespace

Hessian::Hessian(int64_t cols) : cols_(cols), padded_(whole_panels(cols)) {
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
    pack(x + first * cols_, depth, cols_, threads, panels_);
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

CrossSum::CrossSum(int64_t rows, int64_t cols) : rows_(rows), cols_(cols), stride_(whole_panels(cols)) {
  sums_.assign(static_cast<size_t>(whole_panels(rows) * stride_), 0.0f);
}

void CrossSum::add(const float* a, const float* b, int64_t tokens, ThreadPool& threads) {
  const int64_t down = whole_panels(rows_) / kPanel, across = stride_ / kPanel;
  for (int64_t first = 0; first < tokens; first += kRowsAtOnce) {
    const int64_t depth = std::min(kRowsAtOnce, tokens - first);
    pack(a + first * rows_, depth, rows_, threads, left_);
    pack(b + first * cols_, depth, cols_, threads, right_);
    threads.parallel_for(down * across, 1, [&](Range range) {
      for (int64_t tile = range.begin; tile < range.end; ++tile) {
        const int64_t i = tile / across, j = tile % across;
        calibrate::kernels().add_product_f32(left_.data() + i * depth * kPanel, right_.data() + j * depth * kPanel,
                                             depth, sums_.data() + i * kPanel * stride_ + j * kPanel, stride_);
      }
    });
  }
}

double hessian_flops_a_second(ThreadPool& threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kDepth = 256;
  constexpr int kRounds = 400;  // 0.2 GFLOP a thread
  std::vector<float> a(kDepth * kPanel, 1.0f), b(kDepth * kPanel, 1e-3f);
  const auto round = [&] {
    const auto start = Clock::now();
    threads.run([&](int) {
      std::vector<float> sums(size_t{kPanel} * kPanel);
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
