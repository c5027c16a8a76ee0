#include "nested/matrix_analysis.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

#include "base/float_types.h"
#include "nested/format.h"

namespace nfp {
namespace {

constexpr int64_t kRowsAtOnce = 16;

float to_fp32(uint16_t bits, WeightType type) {
  return type == WeightType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits);
}

bool is_finite(uint16_t bits, WeightType type) {
  const uint32_t exponent = type == WeightType::kF16 ? 0x7c00u : 0x7f80u;
  return (bits & exponent) != exponent;
}

// The smallest e with magnitude * 2^-e <= 1.75; magnitude > 0.
int fitting_exponent(float magnitude) {
  int e = 0;
  const float fraction = std::frexp(magnitude, &e);  // magnitude = fraction * 2^e, fraction in [0.5, 1)
  return fraction <= 0.875f ? e - 1 : e;             // 1.75 = 0.875 * 2^1
}

uint16_t shifted(uint16_t bits, WeightType type, int exponent) {
  if (type == WeightType::kF16 && exponent == 0) return bits;
  return fp32_to_fp16(std::ldexp(to_fp32(bits, type), -exponent));
}

// Whether v * 2^e is w for every weight of an FP16 row; else the first column where it is not.
int64_t breaking_column(std::span<const uint16_t> row, int exponent) {
  for (size_t i = 0; i < row.size(); ++i) {
    const uint16_t v = shifted(row[i], WeightType::kF16, exponent);
    if (std::ldexp(fp16_to_fp32(v), exponent) != fp16_to_fp32(row[i])) return static_cast<int64_t>(i);
  }
  return -1;
}

void count_bf16_errors(std::span<const uint16_t> row, RowAnalysis& found) {
  for (uint16_t bits : row) {
    const float w = bf16_to_fp32(bits);
    const float plain = fp16_to_fp32(fp32_to_fp16(w));
    if (plain != w) {
      ++found.inexact_fp16;
      if (std::isfinite(plain)) found.largest_error_fp16 = std::max(found.largest_error_fp16, std::abs(plain - w));
    }
    if (!found.nests) continue;
    const float nested = std::ldexp(fp16_to_fp32(shifted(bits, WeightType::kBF16, found.exponent)), found.exponent);
    if (nested != w) {
      ++found.inexact_nested;
      found.largest_error_nested = std::max(found.largest_error_nested, std::abs(nested - w));
    }
  }
}

bool all_exact(std::span<const uint16_t> row, int exponent) {
  return std::all_of(row.begin(), row.end(), [&](uint16_t bits) {
    return std::ldexp(fp16_to_fp32(shifted(bits, WeightType::kBF16, exponent)), exponent) == bf16_to_fp32(bits);
  });
}

// Whether no weight ends farther from its BF16 value than plain FP16 would put it.
int64_t worse_than_fp16(std::span<const uint16_t> row, int exponent) {
  for (size_t i = 0; i < row.size(); ++i) {
    const float w = bf16_to_fp32(row[i]);
    const float nested = std::ldexp(fp16_to_fp32(shifted(row[i], WeightType::kBF16, exponent)), exponent);
    if (nested != w && nested != fp16_to_fp32(fp32_to_fp16(w))) return static_cast<int64_t>(i);
  }
  return -1;
}

void choose_bf16_exponent(std::span<const uint16_t> row, float largest, RowAnalysis& found) {
  if (largest == 0.0f) {
    found.nests = true;
    return;
  }
  const int fitting = fitting_exponent(largest);
  if (fitting <= 0 && (largest > 0.875f || all_exact(row, 0))) {
    found.nests = true;
    return;
  }
  const int exponent = std::clamp(fitting, kMinRowExponent, kMaxRowExponent);
  if (exponent < fitting) return;
  found.breaking_col = exponent > 0 ? worse_than_fp16(row, exponent) : -1;
  found.nests = found.breaking_col < 0;
  found.exponent = static_cast<int8_t>(found.nests ? exponent : 0);
}

class AnalysedReader final : public MatrixReader {
 public:
  AnalysedReader(MatrixSource source, MatrixAnalysis analysis)
      : source_(std::move(source)), storage_(analysis.storage), exponents_(std::move(analysis.exponents)) {}
  ~AnalysedReader() override {
    if (source_.done) source_.done();
  }
  int64_t rows() const override { return source_.rows; }
  int64_t cols() const override { return source_.cols; }
  Storage storage() const override { return storage_; }
  const std::string& name() const override { return source_.name; }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    NFP_RETURN_IF_ERROR(source_.read(first, count, out));
    if (source_.type == WeightType::kBF16) {
      for (int64_t i = 0; i < count * source_.cols; ++i) out[i] = fp32_to_fp16(bf16_to_fp32(out[i]));
    }
    return ok_status();
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    const auto cols = static_cast<size_t>(source_.cols);
    std::vector<uint16_t> row(cols), moved(cols);
    for (int64_t r = 0; r < count; ++r) {
      NFP_RETURN_IF_ERROR(source_.read(first + r, 1, row.data()));
      exponent[r] = exponents_[static_cast<size_t>(first + r)];
      shift_row(row, source_.type, exponent[r], moved.data());
      const size_t at = static_cast<size_t>(r) * cols;
      split(moved, upper + at, lower + at);
    }
    return ok_status();
  }

 private:
  MatrixSource source_;
  Storage storage_;
  std::vector<int8_t> exponents_;
};

}  // namespace

RowAnalysis analyse_row(std::span<const uint16_t> row, WeightType type) {
  RowAnalysis found;
  for (size_t i = 0; i < row.size(); ++i) {
    const auto magnitude = static_cast<uint16_t>(row[i] & 0x7fffu);
    if (!is_finite(row[i], type) && found.not_finite_col < 0) found.not_finite_col = static_cast<int64_t>(i);
    if (magnitude > found.largest) {
      found.largest = magnitude;
      found.largest_col = static_cast<int64_t>(i);
    }
    if (type == WeightType::kBF16 && found.over_col < 0 && bf16_to_fp32(magnitude) >= 65520.0f) {
      found.over_col = static_cast<int64_t>(i);
    }
  }
  if (found.not_finite_col >= 0) return found;
  const float largest = to_fp32(found.largest, type);
  if (type == WeightType::kBF16) {
    choose_bf16_exponent(row, largest, found);
    count_bf16_errors(row, found);
    return found;
  }
  if (largest <= kNestableMax) {
    found.nests = true;
    return found;
  }
  const int exponent = fitting_exponent(largest);
  found.breaking_col = breaking_column(row, exponent);
  found.nests = found.breaking_col < 0;
  found.exponent = static_cast<int8_t>(found.nests ? exponent : 0);
  return found;
}

Result<MatrixAnalysis> analyse_matrix(const MatrixSource& source, ThreadPool& threads) {
  MatrixAnalysis all;
  all.exponents.resize(static_cast<size_t>(source.rows));
  all.nests_by_paper = true;
  std::mutex mutex;
  std::optional<std::pair<int64_t, Error>> failure;  // the first row's, whichever thread found it
  int64_t breaking_row = -1;
  std::string reason;
  const auto fail = [&](int64_t row, Error what) {
    const std::lock_guard lock(mutex);
    if (!failure || row < failure->first) failure = {row, std::move(what)};
  };
  threads.parallel_for(source.rows, kRowsAtOnce, [&](Range range) {
    const auto cols = static_cast<size_t>(source.cols);
    std::vector<uint16_t> block(cols * kRowsAtOnce);
    MatrixAnalysis mine;
    for (int64_t first = range.begin; first < range.end; first += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, range.end - first);
      if (Status status = source.read(first, count, block.data()); !status.ok()) return fail(first, status.error());
      for (int64_t r = 0; r < count; ++r) {
        const int64_t row = first + r;
        const std::span<const uint16_t> bits(block.data() + static_cast<size_t>(r) * cols, cols);
        const RowAnalysis found = analyse_row(bits, source.type);
        if (found.not_finite_col >= 0) {
          return fail(row, error(ErrorCode::kInvalidInput,
                                 "{}: row {}, column {} is not a finite number; the checkpoint is damaged", source.name,
                                 row, found.not_finite_col));
        }
        const float largest = to_fp32(found.largest, source.type);
        if (!found.nests && found.over_col >= 0) {
          return fail(row, error(ErrorCode::kUnsupported,
                                 "{}: row {}, column {} is too large for FP16 and its row does not nest", source.name,
                                 row, found.over_col));
        }
        all.exponents[static_cast<size_t>(row)] = found.exponent;
        if (largest > mine.largest) {
          mine.largest = largest;
          mine.largest_row = row;
        }
        mine.rows_shifted += found.exponent != 0 ? 1 : 0;
        mine.inexact_fp16 += found.inexact_fp16;
        mine.inexact_nested += found.inexact_nested;
        mine.largest_error_fp16 = std::max(mine.largest_error_fp16, found.largest_error_fp16);
        mine.largest_error_nested = std::max(mine.largest_error_nested, found.largest_error_nested);
        if (!found.nests) {
          const std::lock_guard lock(mutex);
          if (breaking_row < 0 || row < breaking_row) {
            breaking_row = row;
            reason =
                fmt::format("row {} has |w| = {} and, in column {}, {}, which the shift would change", row, largest,
                            found.breaking_col,
                            to_fp32(bits[static_cast<size_t>(std::max<int64_t>(0, found.breaking_col))], source.type));
          }
        }
      }
    }
    const std::lock_guard lock(mutex);
    if (mine.largest > all.largest || (mine.largest == all.largest && mine.largest_row < all.largest_row)) {
      all.largest = mine.largest;
      all.largest_row = mine.largest_row;
    }
    all.rows_shifted += mine.rows_shifted;
    all.inexact_fp16 += mine.inexact_fp16;
    all.inexact_nested += mine.inexact_nested;
    all.largest_error_fp16 = std::max(all.largest_error_fp16, mine.largest_error_fp16);
    all.largest_error_nested = std::max(all.largest_error_nested, mine.largest_error_nested);
  });
  if (failure) return std::move(failure->second);
  all.nests_by_paper = all.largest <= kNestableMax;
  if (breaking_row >= 0) {
    all.exponents.clear();
    all.reason = std::move(reason);
  } else {
    all.storage = Storage::kNested;
  }
  return all;
}

void shift_row(std::span<const uint16_t> row, WeightType type, int exponent, uint16_t* out) {
  for (size_t i = 0; i < row.size(); ++i) out[i] = shifted(row[i], type, exponent);
}

std::unique_ptr<MatrixReader> make_matrix_reader(MatrixSource source, MatrixAnalysis analysis) {
  return std::make_unique<AnalysedReader>(std::move(source), std::move(analysis));
}

}  // namespace nfp
