#include "io/inspect.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "base/float_types.h"

namespace nfp {
namespace {

constexpr double kSmallestNormal = 0x1p-6;  // of E4M3

struct Sums {
  double squares = 0;  // of the weights
  double errors = 0;   // of their rounding to upper bytes, squared
  double smallest = std::numeric_limits<double>::infinity();
  double largest = 0;
  int64_t nonzero = 0;
  int64_t subnormal = 0;
  int64_t narrow_rows = 0;

  void add(const Sums& other) {
    squares += other.squares;
    errors += other.errors;
    smallest = std::min(smallest, other.smallest);
    largest = std::max(largest, other.largest);
    nonzero += other.nonzero;
    subnormal += other.subnormal;
    narrow_rows += other.narrow_rows;
  }
};

// One row as its upper bytes, exponent and factor give it.
void add_row(std::span<const uint16_t> exact, const uint8_t* upper, int exponent, float factor, Sums& sums) {
  const double scale = std::ldexp(static_cast<double>(factor), exponent - 8);
  double row_squares = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double w = fp16_to_fp32(exact[i]);
    const double q = e4m3_to_fp32(upper[i]) * scale;
    const double magnitude = std::abs(w);
    row_squares += w * w;
    sums.errors += (q - w) * (q - w);
    if (magnitude == 0) continue;
    ++sums.nonzero;
    sums.smallest = std::min(sums.smallest, magnitude);
    sums.largest = std::max(sums.largest, magnitude);
    sums.subnormal += magnitude < kSmallestNormal * scale ? 1 : 0;
  }
  sums.squares += row_squares;
  const double rms = std::sqrt(row_squares / static_cast<double>(exact.size()));
  sums.narrow_rows += rms > 0 && rms < kSmallestNormal * scale ? 1 : 0;
}

Result<Sums> sum_matrix(const MatrixReader& matrix, ThreadPool& threads) {
  Sums all;
  std::mutex mutex;
  std::optional<Error> failure;
  threads.parallel_for(matrix.rows(), 16, [&](Range range) {
    const auto cols = static_cast<size_t>(matrix.cols());
    std::vector<uint16_t> exact(cols);
    std::vector<uint8_t> upper(cols), lower(cols);
    Sums mine;
    Status status;
    for (int64_t r = range.begin; r < range.end && status.ok(); ++r) {
      int8_t exponent = 0;
      status = matrix.read_nested(r, 1, upper.data(), lower.data(), &exponent);
      float factor = 1;
      if (status.ok()) status = matrix.row_factors(r, 1, &factor);
      if (status.ok()) status = matrix.read_fp16(r, 1, exact.data());
      if (status.ok()) add_row(exact, upper.data(), exponent, factor, mine);
    }
    const std::lock_guard lock(mutex);
    if (!status.ok() && !failure) failure = std::move(status).error();
    all.add(mine);
  });
  if (failure) return *std::move(failure);
  return all;
}

Fp8Check check_of(const Sums& sums, int64_t elements) {
  Fp8Check check;
  if (sums.squares == 0) return check;
  check.relative_error = std::sqrt(sums.errors / sums.squares);
  check.outlier_ratio = sums.largest / std::sqrt(sums.squares / static_cast<double>(elements));
  check.dynamic_range = std::log2(sums.largest / sums.smallest);
  check.subnormal_share = static_cast<double>(sums.subnormal) / static_cast<double>(sums.nonzero);
  check.narrow_rows = sums.narrow_rows;
  return check;
}

void add_rounding(const MatrixReport& matrix, SourceRounding& rounding) {
  rounding.present = true;
  rounding.inexact += matrix.inexact();
  rounding.largest_error = std::max(rounding.largest_error, matrix.largest_error);
}

// E4M3's rounding alone costs about 2.6 % of a weight's size; what is far above it comes from weights too small for its
// range.
void judge(InspectReport& report) {
  // What is dense computes in FP16 in FP8 steps too: how well the rest rounds is not the whole answer.
  int64_t weights = 0, dense = 0;
  for (const MatrixReport& m : report.matrices) {
    if (m.type == GemmType::kHead) continue;
    weights += m.rows * m.cols;
    dense += m.nests ? 0 : m.rows * m.cols;
  }
  if (dense == weights) {
    report.verdict = Fp8Verdict::kPoor;
    report.verdict_text = "FP8 has nothing to compute: no linear layer nests, so FP8 steps compute all in FP16";
    return;
  }
  const auto worst = std::max_element(report.matrices.begin(), report.matrices.end(), [](const auto& a, const auto& b) {
    return a.fp8.relative_error < b.fp8.relative_error;
  });
  const double error = report.relative_error;
  // One bad matrix spoils its layer however large the others are.
  const double most = worst->fp8.relative_error;
  report.verdict = error < 0.035 && most < 0.06  ? Fp8Verdict::kGood
                   : error < 0.08 && most < 0.25 ? Fp8Verdict::kUsable
                                                 : Fp8Verdict::kPoor;
  const char* text = report.verdict == Fp8Verdict::kGood ? "FP8 fits this model: rounding is close to E4M3's best"
                     : report.verdict == Fp8Verdict::kUsable
                         ? "FP8 is usable: some matrices have many weights below E4M3's "
                           "normal range; compare perplexity before you rely on it"
                         : "FP8 is a poor fit: much of the weights lies below E4M3's "
                           "normal range; expect visible loss in FP8 steps";
  report.verdict_text = fmt::format("{} (relative error {:.2f} % in all; worst {} with {:.2f} %)", text, error * 100,
                                    worst->name, worst->fp8.relative_error * 100);
  if (dense > 0) {
    report.verdict_text += fmt::format("; {:.1f} % of the linear layers' weights do not nest, and compute in FP16",
                                       100.0 * static_cast<double>(dense) / static_cast<double>(weights));
  }
}

}  // namespace

Result<InspectReport> inspect(const ModelSource& source, ThreadPool& threads, const ProgressCallback& progress,
                              const TensorFilter& belongs) {
  InspectReport report;
  const auto counts = [&](const TensorInfo& tensor) {
    return !belongs || belongs(tensor.part_of.empty() ? tensor.name : tensor.part_of);
  };
  uint64_t total = 0, done = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    if (counts(tensor) && gemm_type(tensor.name)) total += tensor.file_bytes;
  }
  double squares = 0, errors = 0;
  for (const TensorInfo& tensor : source.tensors()) {
    if (!counts(tensor)) {
      report.left_out.push_back(tensor.name);
      continue;
    }
    const auto elements = static_cast<uint64_t>(tensor.shape.elements());
    report.parameters += elements;
    const auto type = gemm_type(tensor.name);
    if (!type) continue;
    if (*type != GemmType::kHead) report.linear_parameters += elements;
    MatrixAnalysis analysis;
    NFP_ASSIGN_OR_RETURN(const std::unique_ptr<MatrixReader> matrix, source.matrix(tensor.name, threads, &analysis));
    MatrixReport& m = report.matrices.emplace_back();
    m.name = tensor.name;
    m.part_of = tensor.part_of;
    m.type = *type;
    m.dtype = tensor.dtype;
    m.rows = matrix->rows();
    m.cols = matrix->cols();
    m.nests = matrix->storage() == Storage::kNested;
    m.nests_by_paper = analysis.nests_by_paper;
    m.largest = analysis.largest;
    m.reason = analysis.reason;
    m.inexact_fp16 = analysis.inexact_fp16;
    m.inexact_nested = analysis.inexact_nested;
    m.largest_error = m.nests ? analysis.largest_error_nested : analysis.largest_error_fp16;
    for (int8_t e : analysis.exponents) {
      if (e != 0) ++m.exponents[e];
    }
    if (m.nests) {
      NFP_ASSIGN_OR_RETURN(const Sums sums, sum_matrix(*matrix, threads));
      m.fp8 = check_of(sums, m.rows * m.cols);
      squares += sums.squares;
      errors += sums.errors;
    }
    if (m.dtype == DType::kBF16) add_rounding(m, report.bf16);
    if (m.dtype == DType::kF32) add_rounding(m, report.f32);

    const auto count = [&](KindSummary& summary) {
      ++summary.matrices;
      summary.by_paper += m.nests_by_paper && m.nests ? 1 : 0;
      summary.by_exponents += !m.nests_by_paper && m.nests ? 1 : 0;
      summary.dense += m.nests ? 0 : 1;
    };
    count(report.kinds[static_cast<size_t>(*type)]);
    if (*type != GemmType::kHead) {
      count(report.total);
      report.rows += m.rows;
      for (const auto& [e, rows] : m.exponents) {
        report.exponents[e] += rows;
        report.shifted_rows += rows;
      }
    }
    done += tensor.file_bytes;
    if (progress) progress({"inspecting", done, total});
  }
  report.fp16_bytes = report.parameters * 2;
  report.file_bytes = source.file_bytes();
  report.relative_error = squares > 0 ? std::sqrt(errors / squares) : 0;
  judge(report);
  return report;
}

}  // namespace nfp
