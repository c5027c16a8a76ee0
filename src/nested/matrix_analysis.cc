#include "nested/matrix_analysis.h"

#include <algorithm>
#include <mutex>

#include "nested/format.h"

namespace nfp {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // of rows read at once by a thread: stays in its L2 cache

// What one thread found in its rows; `failed_row` orders failures so that the one reported does not depend on timing.
struct Part {
  MatrixAnalysis sums;
  int64_t failed_row = -1;
  Error failure;
  int64_t dense_row = -1;
  int64_t over_row = -1;
  std::string over;
};

std::string why_dense(const MatrixSource& source, int64_t r, std::span<const uint16_t> row, const RowAnalysis& found) {
  const float largest = value_of(found.largest, source.type);
  if (found.breaking_col == found.largest_col && largest > kNestableMax * 0x1p100f) {
    return fmt::format("row {}: largest |w| {} is beyond any row exponent", r, largest);
  }
  return fmt::format("row {}: largest |w| {} needs exponent {}, which changes weight {} at column {}", r, largest,
                     found.exponent, value_of(row[found.breaking_col], source.type), found.breaking_col);
}

void add_row(const MatrixSource& source, int64_t r, std::span<const uint16_t> row, Part& part) {
  const RowAnalysis found = analyse_row(row, source.type);
  MatrixAnalysis& sums = part.sums;
  if (found.not_finite_col >= 0) {
    part.failed_row = r;
    part.failure = error(ErrorCode::kInvalidInput,
                         "{}: weight at row {}, column {} is {}; the checkpoint is damaged (weights must be finite)",
                         source.name, r, found.not_finite_col, value_of(row[found.not_finite_col], source.type));
    return;
  }
  const float largest = value_of(found.largest, source.type);
  if (largest > sums.largest) {
    sums.largest = largest;
    sums.largest_row = r;
  }
  if (found.nests) {
    sums.exponents[r] = found.exponent;
    sums.rows_shifted += found.exponent != 0 ? 1 : 0;
  } else if (part.dense_row < 0) {
    part.dense_row = r;
    sums.reason = why_dense(source, r, row, found);
  }
  if (found.over_col >= 0 && part.over_row < 0) {
    part.over_row = r;
    part.over = fmt::format("row {}, column {} ({})", r, found.over_col, value_of(row[found.over_col], source.type));
  }
  sums.inexact_fp16 += found.inexact_fp16;
  sums.inexact_nested += found.inexact_nested;
  sums.largest_error_fp16 = std::max(sums.largest_error_fp16, found.largest_error_fp16);
  sums.largest_error_nested = std::max(sums.largest_error_nested, found.largest_error_nested);
}

// Both cover different rows; `exponents` is the caller's to fill.
void merge(Part&& from, Part& into) {
  const auto earlier = [](int64_t a, int64_t b) { return a >= 0 && (b < 0 || a < b); };
  if (earlier(from.failed_row, into.failed_row)) {
    into.failed_row = from.failed_row;
    into.failure = std::move(from.failure);
  }
  if (earlier(from.dense_row, into.dense_row)) {
    into.dense_row = from.dense_row;
    into.sums.reason = std::move(from.sums.reason);
  }
  if (earlier(from.over_row, into.over_row)) {
    into.over_row = from.over_row;
    into.over = std::move(from.over);
  }
  MatrixAnalysis& a = into.sums;
  const MatrixAnalysis& b = from.sums;
  if (b.largest > a.largest || (b.largest == a.largest && b.largest_row < a.largest_row)) {
    a.largest = b.largest;
    a.largest_row = b.largest_row;
  }
  a.rows_shifted += b.rows_shifted;
  a.inexact_fp16 += b.inexact_fp16;
  a.inexact_nested += b.inexact_nested;
  a.largest_error_fp16 = std::max(a.largest_error_fp16, b.largest_error_fp16);
  a.largest_error_nested = std::max(a.largest_error_nested, b.largest_error_nested);
}

Part analyse_rows(const MatrixSource& source, Range range) {
  Part part;
  part.sums.exponents.resize(source.rows);
  const int64_t chunk = std::clamp<int64_t>(kChunkBytes / (2 * std::max<int64_t>(source.cols, 1)), 1, range.size());
  std::vector<uint16_t> buffer(chunk * source.cols);
  for (int64_t first = range.begin; first < range.end; first += chunk) {
    const int64_t count = std::min(chunk, range.end - first);
    if (Status status = source.read(first, count, buffer.data()); !status.ok()) {
      part.failed_row = first;
      part.failure = std::move(status).error();
      return part;
    }
    for (int64_t i = 0; i < count; ++i) {
      add_row(source, first + i, std::span(buffer).subspan(i * source.cols, source.cols), part);
      if (part.failed_row >= 0) return part;
    }
  }
  return part;
}

}  // namespace

Result<MatrixAnalysis> analyse_matrix(const MatrixSource& source, ThreadPool& threads) {
  Part total;
  total.sums.exponents.resize(source.rows);
  std::mutex mutex;
  threads.parallel_for(source.rows, 1, [&](Range range) {
    Part part = analyse_rows(source, range);
    const std::lock_guard lock(mutex);
    std::copy(part.sums.exponents.begin() + range.begin, part.sums.exponents.begin() + range.end,
              total.sums.exponents.begin() + range.begin);
    merge(std::move(part), total);
  });
  if (total.failed_row >= 0) return std::move(total.failure);
  MatrixAnalysis out = std::move(total.sums);
  out.nests_by_paper = out.largest <= kNestableMax;
  if (total.dense_row < 0) {
    out.storage = Storage::kNested;
    return out;
  }
  out.exponents.clear();
  out.rows_shifted = 0;
  if (total.over_row >= 0) {
    return error(ErrorCode::kUnsupported, "{}: {} is beyond FP16 and cannot be nested ({})", source.name, total.over,
                 out.reason);
  }
  return out;
}

}  // namespace nfp
