#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/clones.h"
#include "base/float_types.h"
#include "base/power_of_two.h"
#include "nested/format.h"
#include "nested/matrix_analysis.h"
#include "nested/narrow.h"

namespace nfp {
namespace {

// Smallest e of either sign, within the limits, with largest * 2^-e <= 1.75. Needs largest > 0.
int smallest_exponent(float largest) {
  int exponent = 0;
  const float fraction = std::frexp(largest, &exponent);  // [0.5, 1)
  // largest * 2^-(exponent - 1) is in [1, 2).
  const int smallest = fraction * 2.0f <= kNestableMax ? exponent - 1 : exponent;
  return std::max(smallest, kMinRowExponent);
}

NFP_CLONES uint32_t largest_magnitude(std::span<const uint16_t> row) {
  uint32_t largest = 0;
  for (uint16_t w : row) largest = std::max<uint32_t>(largest, w & 0x7fffu);
  return largest;
}

// Where the first weight of that magnitude is; whole pieces are passed over at once.
NFP_CLONES int64_t first_of_magnitude(std::span<const uint16_t> row, uint32_t magnitude) {
  constexpr size_t kPiece = 64;
  size_t begin = 0;
  for (; begin + kPiece <= row.size(); begin += kPiece) {
    uint16_t found = 0;
    for (size_t i = begin; i < begin + kPiece; ++i) found |= (row[i] & 0x7fffu) == magnitude ? 1u : 0u;
    if (found != 0) break;
  }
  while ((row[begin] & 0x7fffu) != magnitude) ++begin;
  return static_cast<int64_t>(begin);
}

struct Rounding {
  int64_t changed = 0;
  float largest_error = 0;
};

// Whether v * 2^e is each of these BF16 weights itself, by their exponents alone: eight significant bits fit FP16 from
// 2^-17 (its unit below 2^-14 is 2^-24) up to 2^16. False says nothing: trailing zeros may save a smaller weight.
[[gnu::always_inline]] inline bool surely_exact(std::span<const uint16_t> weights, uint16_t lowest, uint16_t span) {
  uint16_t outside = 0;
  for (uint16_t w : weights) {
    const auto magnitude = static_cast<uint16_t>(w & 0x7fffu);
    const auto above = static_cast<uint16_t>(magnitude - lowest);
    outside |= static_cast<uint16_t>(static_cast<uint16_t>(above >= span) & static_cast<uint16_t>(magnitude != 0));
  }
  return outside == 0;
}

// What v * 2^e changes in a row whose weights are all within FP16's range after the shift. Most pieces of a row need
// no arithmetic.
NFP_CLONES Rounding rounding_of(std::span<const uint16_t> row, int exponent) {
  constexpr size_t kPiece = 128;
  const auto lowest = static_cast<uint16_t>(std::max(127 + exponent - 17, 1) << 7);
  const auto highest = static_cast<uint16_t>(std::min(127 + exponent + 16, 255) << 7);
  const auto span = static_cast<uint16_t>(highest - lowest);
  const float down = power_of_two(-exponent);
  int64_t changed = 0;
  uint32_t worst = 0;  // of non-negative floats the order of the bits is the order of the numbers
  for (size_t begin = 0; begin < row.size(); begin += kPiece) {
    const auto piece = row.subspan(begin, std::min(kPiece, row.size() - begin));
    if (surely_exact(piece, lowest, span)) continue;
    for (uint16_t w : piece) {
      const float magnitude = bf16_to_fp32(w & 0x7fffu) * down;
      const bool in_range = magnitude < 65520.0f;
      const float x = in_range ? magnitude : 0.0f;
      const uint32_t off = std::bit_cast<uint32_t>(round_to_fp16(x) - x) & 0x7fffffffu;
      changed += off != 0 || !in_range ? 1 : 0;
      worst = off > worst ? off : worst;
    }
  }
  return {changed, std::bit_cast<float>(worst) * power_of_two(exponent)};
}

// The first weight that the shift takes farther from the source than FP16(w) is; -1 when there is none.
int64_t first_broken(std::span<const uint16_t> row, WeightType type, int exponent) {
  const float down = power_of_two(-exponent);
  const float up = power_of_two(exponent);
  for (size_t i = 0; i < row.size(); ++i) {
    const float w = value_of(row[i], type);
    const float kept = fp16_to_fp32(fp32_to_fp16(w * down)) * up;
    if (kept != w && kept != fp16_to_fp32(fp32_to_fp16(w))) return static_cast<int64_t>(i);
  }
  return -1;
}

template <typename Predicate>
int64_t first_where(std::span<const uint16_t> row, Predicate&& holds) {
  const auto found = std::find_if(row.begin(), row.end(), holds);
  return found == row.end() ? -1 : found - row.begin();
}

}  // namespace

RowAnalysis analyse_row(std::span<const uint16_t> row, WeightType type) {
  RowAnalysis out;
  const uint32_t largest = largest_magnitude(row);
  out.largest = static_cast<uint16_t>(largest);
  out.largest_col = row.empty() ? 0 : first_of_magnitude(row, largest);

  const uint32_t infinity = type == WeightType::kF16 ? 0x7c00u : 0x7f80u;
  if (largest >= infinity) {
    out.not_finite_col = first_where(row, [infinity](uint16_t w) { return (w & 0x7fffu) >= infinity; });
    return out;
  }
  const float largest_value = value_of(out.largest, type);
  const int smallest = largest == 0 ? 0 : smallest_exponent(largest_value);
  int exponent = std::max(smallest, 0);
  if (type == WeightType::kBF16) {
    const Rounding plain = rounding_of(row, 0);
    out.inexact_fp16 = plain.changed;
    out.largest_error_fp16 = plain.largest_error;
    if (largest_value >= 65520.0f) {
      out.over_col = first_where(row, [](uint16_t w) { return bf16_to_fp32(w & 0x7fffu) >= 65520.0f; });
    }
    if (exponent == 0 && plain.changed > 0) exponent = smallest;
  }
  if (exponent > kMaxRowExponent) {
    out.breaking_col = out.largest_col;
    return out;
  }
  if (exponent > 0) out.breaking_col = first_broken(row, type, exponent);
  out.nests = out.breaking_col < 0;
  out.exponent = static_cast<int8_t>(exponent);
  if (type == WeightType::kBF16 && out.nests) {
    const Rounding nested =
        exponent == 0 ? Rounding{out.inexact_fp16, out.largest_error_fp16} : rounding_of(row, exponent);
    out.inexact_nested = nested.changed;
    out.largest_error_nested = nested.largest_error;
  }
  return out;
}

NFP_CLONES void shift_row(std::span<const uint16_t> row, WeightType type, int exponent, uint16_t* shifted) {
  const float down = power_of_two(-exponent);
  if (type == WeightType::kBF16) {
    for (size_t i = 0; i < row.size(); ++i) shifted[i] = narrow_to_fp16(bf16_to_fp32(row[i]) * down);
  } else if (exponent == 0) {
    if (!row.empty() && shifted != row.data()) std::memmove(shifted, row.data(), row.size_bytes());
  } else {
    for (size_t i = 0; i < row.size(); ++i) shifted[i] = narrow_to_fp16(fp16_to_fp32(row[i]) * down);
  }
}

NFP_CLONES void narrow_to_fp16(std::span<const float> values, uint16_t* out) {
  for (size_t i = 0; i < values.size(); ++i) out[i] = narrow_to_fp16(values[i]);
}

}  // namespace nfp
