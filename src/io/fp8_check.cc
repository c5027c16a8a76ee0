#include "io/fp8_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "base/float_types.h"
#include "io/checkpoint_writer.h"
#include "nested/format.h"
#include "nested/fp8_channel.h"

namespace nfp {
namespace {

struct Sums {
  double squares = 0;
  double nested_errors = 0;
  double channel_errors = 0;
  double largest = 0;
  double smallest_row = std::numeric_limits<double>::infinity();
  int64_t narrow_rows = 0;

  void add(const Sums& other) {
    squares += other.squares;
    nested_errors += other.nested_errors;
    channel_errors += other.channel_errors;
    largest = std::max(largest, other.largest);
    smallest_row = std::min(smallest_row, other.smallest_row);
    narrow_rows += other.narrow_rows;
  }
};

std::array<float, 256> e4m3_values() {
  std::array<float, 256> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = e4m3_to_fp32(static_cast<uint8_t>(i));
  return values;
}

// Of one row: v are the FP16 bits of w * 2^-e.
Sums row_sums(std::span<const uint16_t> v, const uint8_t* upper, int exponent) {
  static const std::array<float, 256> kE4m3 = e4m3_values();
  std::vector<uint8_t> codes(v.size());
  const double scale = quantise_fp8_channel(v, codes.data());
  Sums sums;
  for (size_t i = 0; i < v.size(); ++i) {
    const double value = fp16_to_fp32(v[i]);
    sums.squares += value * value;
    sums.largest = std::max(sums.largest, std::abs(value));
    const double channel = kE4m3[codes[i]] * scale - value;
    sums.channel_errors += channel * channel;
    if (upper == nullptr) continue;
    const double nested = kE4m3[upper[i]] * 0x1p-8 - value;
    sums.nested_errors += nested * nested;
  }
  if (sums.largest == 0) return sums;
  sums.narrow_rows = std::sqrt(sums.squares / static_cast<double>(v.size())) < kNarrowRowRms ? 1 : 0;
  sums.largest = std::ldexp(sums.largest, exponent);
  sums.smallest_row = sums.largest;
  for (double* sum : {&sums.squares, &sums.nested_errors, &sums.channel_errors}) *sum = std::ldexp(*sum, 2 * exponent);
  return sums;
}

}  // namespace

Result<Fp8Check> check_fp8(const MatrixReader& reader, ThreadPool& threads) {
  const auto cols = static_cast<size_t>(reader.cols());
  std::vector<Sums> rows(static_cast<size_t>(reader.rows()));  // added in row order: the same on any number of threads
  Status status = for_rows(threads, reader.rows(), [&](int64_t first, int64_t count) -> Status {
    std::vector<uint16_t> v(cols);
    std::vector<uint8_t> upper(cols), lower(cols);
    for (int64_t r = first; r < first + count; ++r) {
      int8_t exponent = 0;
      const bool nested = reader.storage() == Storage::kNested;
      if (nested) {
        NFP_RETURN_IF_ERROR(reader.read_nested(r, 1, upper.data(), lower.data(), &exponent));
        join(upper.data(), lower.data(), cols, v.data());
      } else {
        NFP_RETURN_IF_ERROR(reader.read_fp16(r, 1, v.data()));
      }
      rows[static_cast<size_t>(r)] = row_sums(v, nested ? upper.data() : nullptr, exponent);
    }
    return ok_status();
  });
  NFP_RETURN_IF_ERROR(status);
  Sums all;
  for (const Sums& row : rows) all.add(row);
  Fp8Check check;
  if (all.squares == 0) return check;
  const double elements = static_cast<double>(reader.rows()) * static_cast<double>(cols);
  check.outlier_ratio = all.largest / std::sqrt(all.squares / elements);
  check.dynamic_range = std::log2(all.largest / all.smallest_row);
  check.narrow_rows = all.narrow_rows;
  check.nested_error = std::sqrt(all.nested_errors / all.squares);
  check.channel_error = std::sqrt(all.channel_errors / all.squares);
  return check;
}

}  // namespace nfp
