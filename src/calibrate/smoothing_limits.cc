#include "calibrate/smoothing_limits.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <utility>

#include "base/float_types.h"
#include "base/power_of_two.h"

namespace nfp {
namespace {

// A column's largest nested weight stays at least 2^kColumnFloor: eight binades above where E4M3 begins to lose bits.
constexpr int kColumnFloor = -6;

// e = floor(log2 |x|), and the power of two that its lowest set bit stands for; x is finite and not 0.
struct Span {
  int top;
  int bottom;
};
Span span_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x) & 0x7fffffffu;
  if (bits < 0x00800000u) {  // subnormal: bits * 2^-149
    return {static_cast<int>(std::bit_width(bits)) - 150, std::countr_zero(bits) - 149};
  }
  const int exponent = static_cast<int>(bits >> 23) - 127;
  return {exponent, exponent - 23 + std::countr_zero((bits & 0x7fffffu) | 0x800000u)};
}

// The largest e with |x| * 2^e <= 1.75.
int room_below_nestable(float x, Span span) {
  const bool wide = (std::bit_cast<uint32_t>(x) & 0x7fffffu) > 0x600000u;  // its fraction is over 1.75
  return -span.top - (wide ? 1 : 0);
}

// Where a dtype's numbers begin and end: multiples of 2^bottom below 2^(top + 1).
Span range_of(DType dtype) {
  if (dtype == DType::kF16) return {15, -24};
  return {127, -126};  // BF16, FP32: normal numbers only, which need no look at their bits
}

int8_t clamp_exponent(int e) {
  return static_cast<int8_t>(std::clamp<int>(e, -ExponentLimits::kMost, ExponentLimits::kMost));
}

void lower(int8_t& highest, int e) { highest = std::min(highest, std::max<int8_t>(clamp_exponent(e), 0)); }
void raise(int8_t& lowest, int e) { lowest = std::max(lowest, std::min<int8_t>(clamp_exponent(e), 0)); }

// w may be multiplied by 2^e as long as it stays a number of `dtype`.
void limit_value(float w, DType dtype, int8_t& lowest, int8_t& highest) {
  if (w == 0) return;
  const Span span = span_of(w), range = range_of(dtype);
  lower(highest, range.top - span.top);
  raise(lowest, range.bottom - (dtype == DType::kF16 ? span.bottom : span.top));
}

// The same for a nested row's weight w, kept as v with v * 2^exponent taken for it: |v| * 2^e stays within 1.75, and v
// loses no bits.
void limit_nested(float w, float v, int exponent, int8_t& lowest, int8_t& highest) {
  if (w == 0) return;
  if (v * power_of_two(exponent) != w) raise(lowest, 0);
  if (v == 0) return;
  const Span span = span_of(v);
  lower(highest, room_below_nestable(v, span));
  raise(lowest, -24 - span.bottom);
}

DType matrix_dtype(const MatrixSource& matrix) { return matrix.type == WeightType::kF16 ? DType::kF16 : DType::kBF16; }

float value_of(uint16_t bits, DType dtype) { return dtype == DType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits); }

// Calls visit(r, row's bits) for the rows of a range.
template <typename F>
Status each_row(const MatrixSource& matrix, Range range, F&& visit) {
  const auto cols = static_cast<size_t>(matrix.cols);
  std::vector<uint16_t> row(cols);
  for (int64_t r = range.begin; r < range.end; ++r) {
    NFP_RETURN_IF_ERROR(matrix.read(r, 1, row.data()));
    visit(r, std::span<const uint16_t>(row));
  }
  return ok_status();
}

// Of one nested row whose every weight is multiplied by 2^-e (see row_limits).
void limit_row(std::span<const uint16_t> row, DType dtype, bool nested, int exponent, int8_t& lowest, int8_t& highest) {
  int8_t down = -ExponentLimits::kMost, up = ExponentLimits::kMost;  // of s = -e
  float largest = 0;
  for (uint16_t bits : row) {
    const float w = value_of(bits, dtype);
    limit_value(w, dtype, down, up);
    largest = std::max(largest, std::abs(w));
  }
  if (dtype == DType::kBF16 && !nested) down = up = 0;
  if (dtype == DType::kBF16 && largest > 0) {
    // A row that grows past 1.75 has another exponent, with which small weights may be held worse.
    lower(up, exponent > 0 ? 0 : room_below_nestable(largest, span_of(largest)));
  }
  raise(lowest, -up);
  lower(highest, -down);
}

}  // namespace

void ExponentLimits::narrow(const ExponentLimits& other) {
  for (size_t c = 0; c < lowest.size(); ++c) {
    lowest[c] = std::max(lowest[c], other.lowest[c]);
    highest[c] = std::min(highest[c], other.highest[c]);
  }
}

Result<ExponentLimits> column_limits(const ModelSource& source, std::string_view matrix, ThreadPool& threads) {
  NFP_ASSIGN_OR_RETURN(const MatrixSource rows, source.matrix_source(matrix));
  NFP_ASSIGN_OR_RETURN(const MatrixAnalysis analysis, analyse_matrix(rows, threads));
  const bool nested = analysis.storage == Storage::kNested;
  const DType dtype = matrix_dtype(rows);
  ExponentLimits limits(rows.cols);
  std::vector<float> largest(static_cast<size_t>(rows.cols), 0.0f);  // |v| of each column
  Status status;
  std::mutex mutex;
  threads.parallel_for(rows.rows, 1, [&](Range range) {
    ExponentLimits part(rows.cols);
    std::vector<float> large(static_cast<size_t>(rows.cols), 0.0f);
    std::vector<uint16_t> shifted(static_cast<size_t>(rows.cols));
    Status read = each_row(rows, range, [&](int64_t r, std::span<const uint16_t> row) {
      const int exponent = nested ? analysis.exponents[static_cast<size_t>(r)] : 0;
      if (nested) shift_row(row, rows.type, exponent, shifted.data());
      for (size_t c = 0; c < row.size(); ++c) {
        const float w = value_of(row[c], dtype);
        limit_value(w, dtype, part.lowest[c], part.highest[c]);
        // A dense matrix is held in FP16, without row exponents.
        if (nested) {
          const float v = fp16_to_fp32(shifted[c]);
          limit_nested(w, v, exponent, part.lowest[c], part.highest[c]);
          large[c] = std::max(large[c], std::abs(v));
        } else if (dtype == DType::kBF16) {
          part.lowest[c] = part.highest[c] = 0;
        }
      }
    });
    const std::lock_guard lock(mutex);
    limits.narrow(part);
    for (size_t c = 0; c < largest.size(); ++c) largest[c] = std::max(largest[c], large[c]);
    if (!read.ok()) status = std::move(read);
  });
  if (rows.done) rows.done();
  NFP_RETURN_IF_ERROR(status);
  for (size_t c = 0; c < largest.size(); ++c) {
    if (largest[c] > 0) raise(limits.lowest[c], kColumnFloor - span_of(largest[c]).top);
  }
  return limits;
}

Result<ExponentLimits> row_limits(const ModelSource& source, std::string_view tensor, ThreadPool& threads) {
  const TensorInfo* info = source.find(tensor);
  if (info == nullptr) return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing", source.path(), tensor);
  ExponentLimits limits(info->rows());
  if (info->shape.rank() != 2) {
    std::vector<float> values(static_cast<size_t>(info->shape.elements()));
    NFP_RETURN_IF_ERROR(source.read_f32(tensor, values));
    for (size_t r = 0; r < values.size(); ++r) {
      int8_t down = -ExponentLimits::kMost, up = ExponentLimits::kMost;
      limit_value(values[r], info->dtype, down, up);
      limits.lowest[r] = static_cast<int8_t>(-up);
      limits.highest[r] = static_cast<int8_t>(-down);
    }
    return limits;
  }
  NFP_ASSIGN_OR_RETURN(const MatrixSource rows, source.matrix_source(tensor));
  NFP_ASSIGN_OR_RETURN(const MatrixAnalysis analysis, analyse_matrix(rows, threads));
  const bool nested = analysis.storage == Storage::kNested;
  Status status;
  std::mutex mutex;
  threads.parallel_for(rows.rows, 1, [&](Range range) {
    Status read = each_row(rows, range, [&](int64_t r, std::span<const uint16_t> row) {
      const auto at = static_cast<size_t>(r);
      limit_row(row, matrix_dtype(rows), nested, nested ? analysis.exponents[at] : 0, limits.lowest[at],
                limits.highest[at]);
    });
    const std::lock_guard lock(mutex);
    if (!read.ok()) status = std::move(read);
  });
  if (rows.done) rows.done();
  NFP_RETURN_IF_ERROR(status);
  return limits;
}

}  // namespace nfp
