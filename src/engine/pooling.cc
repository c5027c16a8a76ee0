#include "engine/pooling.h"

#include <algorithm>

#include "base/float_types.h"

namespace nfp {
namespace {

void add_row(const HiddenRows& rows, int32_t row, std::vector<double>& sum) {
  const size_t width = sum.size(), at = static_cast<size_t>(row) * width;
  if (rows.dtype == DType::kF32) {
    const float* values = static_cast<const float*>(rows.data) + at;
    for (size_t i = 0; i < width; ++i) sum[i] += static_cast<double>(values[i]);
  } else {
    const uint16_t* values = static_cast<const uint16_t*>(rows.data) + at;
    for (size_t i = 0; i < width; ++i) sum[i] += static_cast<double>(fp16_to_fp32(values[i]));
  }
}

}  // namespace

void PooledStates::add(Pooling pooling, const HiddenRows& rows) {
  if (rows.count < 1) return;
  const int32_t end = rows.first + rows.count;
  if (pooling == Pooling::kLast) {
    sum_.assign(static_cast<size_t>(rows.width), 0.0);
    add_row(rows, rows.count - 1, sum_);
    rows_ = 1;
    next_ = end;
    return;
  }
  sum_.resize(static_cast<size_t>(rows.width));
  for (int32_t position = std::max(rows.first, next_); position < end; ++position, ++rows_) {
    add_row(rows, position - rows.first, sum_);
  }
  next_ = std::max(next_, end);
}

std::vector<float> PooledStates::result() const {
  std::vector<float> out(sum_.size());
  std::transform(sum_.begin(), sum_.end(), out.begin(),
                 [&](double value) { return static_cast<float>(value / std::max(1, rows_)); });
  return out;
}

}  // namespace nfp
