#include "calibrate/gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/float_types.h"
#include "calibrate/gptq_kernels.h"
#include "nested/format.h"

namespace nfp {
namespace {

using calibrate::kernels;
using calibrate::kPanel;
using calibrate::kSweepBlock;

constexpr int64_t kBlock = 64;  // columns that the Cholesky factorisation takes at once
static_assert(kBlock % kPanel == 0);

// Lower Cholesky factor of a diagonal block, in place. False where it is not positive definite.
bool factor_block(double* a, int64_t stride, int64_t size) {
  for (int64_t j = 0; j < size; ++j) {
    double* row_j = a + j * stride;
    double pivot = row_j[j];
    for (int64_t s = 0; s < j; ++s) pivot -= row_j[s] * row_j[s];
    if (!(pivot > 0.0) || !std::isfinite(pivot)) return false;
    row_j[j] = std::sqrt(pivot);
    for (int64_t i = j + 1; i < size; ++i) {
      double* row_i = a + i * stride;
      double sum = row_i[j];
      for (int64_t s = 0; s < j; ++s) sum -= row_i[s] * row_j[s];
      row_i[j] = sum / row_j[j];
    }
  }
  return true;
}

// a = L L^T for the lower triangle of a [size, size], size a multiple of kPanel, in place. Right-looking: a block of
// columns, then the update of all that is right of it.
bool cholesky(std::vector<double>& a, int64_t size, ThreadPool& threads) {
  std::vector<double> below, negated;  // [panels][block][kPanel] of the block's columns, transposed
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t block = std::min(kBlock, size - first);
    double* corner = a.data() + first * size + first;
    if (!factor_block(corner, size, block)) return false;
    const int64_t rest = first + block;
    const int64_t panels = (size - rest) / kPanel;
    if (panels == 0) break;
    below.resize(static_cast<size_t>(panels * block * kPanel));
    negated.resize(below.size());
    threads.parallel_for(panels, 1, [&](Range range) {
      for (int64_t p = range.begin; p < range.end; ++p) {
        double* panel = below.data() + p * block * kPanel;
        double* rows = a.data() + (rest + p * kPanel) * size + first;
        for (int64_t i = 0; i < kPanel; ++i) {
          for (int64_t t = 0; t < block; ++t) panel[t * kPanel + i] = rows[i * size + t];
        }
        kernels().solve_lower_f64(corner, size, block, panel);
        for (int64_t i = 0; i < kPanel; ++i) {
          for (int64_t t = 0; t < block; ++t) rows[i * size + t] = panel[t * kPanel + i];
        }
        std::transform(panel, panel + block * kPanel, negated.data() + p * block * kPanel, std::negate<>());
      }
    });
    threads.parallel_for(panels * (panels + 1) / 2, 1, [&](Range range) {
      int64_t i = 0;
      while ((i + 1) * (i + 2) / 2 <= range.begin) ++i;
      int64_t j = range.begin - i * (i + 1) / 2;
      for (int64_t tile = range.begin; tile < range.end; ++tile) {
        kernels().add_product_f64(below.data() + i * block * kPanel, negated.data() + j * block * kPanel, block,
                                  a.data() + (rest + i * kPanel) * size + rest + j * kPanel, size);
        if (++j > i) ++i, j = 0;
      }
    });
  }
  return true;
}

// Of every code; at namespace scope, because a weight's neighbours are asked for in the inner loop.
const struct E4m3Table {
  float value[256];
  E4m3Table() {
    for (int code = 0; code < 256; ++code) value[code] = e4m3_to_fp32(static_cast<uint8_t>(code));
  }
} kE4m3;

}  // namespace

Neighbours neighbours(uint16_t w, UpperRule rule) {
  const float nearest = kE4m3.value[split(w).upper];
  const bool free = rule == UpperRule::kFree || (w & 0x80u) == 0;
  return {fp16_to_fp32(w) * 256.0f, nearest, free ? kE4m3.value[other_neighbour(w)] - nearest : 0.0f};
}

Result<GptqFactor> factorise(const Hessian& hessian, const std::string& name, ThreadPool& threads) {
  const int64_t cols = hessian.cols();
  GptqFactor factor;
  factor.cols = cols;
  factor.padded = (cols + kPanel - 1) / kPanel * kPanel;
  factor.order.resize(static_cast<size_t>(cols));
  std::iota(factor.order.begin(), factor.order.end(), 0);
  std::stable_sort(factor.order.begin(), factor.order.end(),
                   [&](int32_t a, int32_t b) { return hessian.at(a, a) > hessian.at(b, b); });

  // With the order reversed the lower factor of the one matrix is the upper factor of the other. The places past the
  // last column come first, as an identity that touches nothing.
  const int64_t size = factor.padded;
  std::vector<double> a(static_cast<size_t>(size * size), 0.0);
  const auto place = [&](int64_t reversed) { return size - 1 - reversed; };
  threads.parallel_for(size, 1, [&](Range range) {
    for (int64_t r = range.begin; r < range.end; ++r) {
      double* row = a.data() + r * size;
      if (place(r) >= cols) {
        row[r] = 1.0;
        continue;
      }
      const int64_t i = factor.order[static_cast<size_t>(place(r))];
      for (int64_t s = 0; s <= r; ++s) {
        if (place(s) < cols) row[s] = hessian.at(i, factor.order[static_cast<size_t>(place(s))]);
      }
    }
  });
  if (!cholesky(a, size, threads)) {
    return error(ErrorCode::kInvalidInput,
                 "{}: the layer's inputs overflow over the calibration text; use --calibrate none", name);
  }
  factor.inverse_squares.resize(static_cast<size_t>(size));
  for (int64_t j = 0; j < size; ++j) {
    const double pivot = a[static_cast<size_t>(place(j) * size + place(j))];
    factor.inverse_squares[static_cast<size_t>(j)] = static_cast<float>(1.0 / (pivot * pivot));
  }
  factor.panels.assign(static_cast<size_t>(size * size), 0.0f);
  threads.parallel_for(size / kSweepBlock, 1, [&](Range range) {
    for (int64_t block = range.begin; block < range.end; ++block) {
      for (int64_t i = 0; i < (block + 1) * kSweepBlock; ++i) {
        float* out = factor.panels.data() + (block * size + i) * kSweepBlock;
        for (int64_t t = 0; t < kSweepBlock; ++t) {
          const int64_t j = block * kSweepBlock + t;
          const double* column = a.data() + place(j);
          if (i < j) out[t] = static_cast<float>(column[place(i) * size] / column[place(j) * size]);
        }
      }
    }
  });
  return factor;
}

void choose_uppers(const GptqFactor& factor, std::span<const uint16_t> nested, int64_t rows, UpperRule rule,
                   ThreadPool& threads, std::span<uint8_t> choice, std::span<const float> shift) {
  const int64_t cols = factor.cols;
  const int lanes = kernels().lanes;
  const int64_t tiles = (rows + lanes - 1) / lanes;
  const int64_t row_bytes = choice_row_bytes(cols);
  std::fill(choice.begin(), choice.end(), uint8_t{0});
  threads.parallel_for(tiles, 1, [&](Range range) {
    const auto size = static_cast<size_t>(factor.padded * lanes);
    std::vector<float> weight(size), nearest(size), step(size), error(size);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      const int64_t first = tile * lanes;
      const int64_t count = std::min<int64_t>(lanes, rows - first);
      for (int64_t j = 0; j < cols; ++j) {
        const int64_t column = first * cols + factor.order[static_cast<size_t>(j)];
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const auto at = static_cast<size_t>(j * lanes + lane), from = static_cast<size_t>(column + lane * cols);
          const Neighbours n = lane < count ? neighbours(nested[from], rule) : Neighbours{};
          weight[at] = n.weight, nearest[at] = n.nearest, step[at] = n.step;
          if (lane < count && !shift.empty()) weight[at] += shift[from];
        }
      }
      kernels().sweep({factor.padded, weight.data(), nearest.data(), step.data(), factor.panels.data(), error.data()});
      for (int64_t j = 0; j < cols; ++j) {
        const int64_t c = factor.order[static_cast<size_t>(j)];
        for (int64_t lane = 0; lane < count; ++lane) {
          const auto at = static_cast<size_t>(j * lanes + lane);
          if (error[at] == weight[at] - nearest[at]) continue;
          choice[static_cast<size_t>((first + lane) * row_bytes + c / 8)] |= static_cast<uint8_t>(1u << (c % 8));
        }
      }
    }
  });
}

}  // namespace nfp
