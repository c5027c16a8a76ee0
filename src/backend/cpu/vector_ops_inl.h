// Kernels on one row: norms, rotary embedding, conversions, and the passes over logits that sampling needs.
#pragma once

#include <bit>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/math_inl.h"
#include "backend/cpu/unroll.h"
#include "backend/race.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

using cpu::Candidate;
using cpu::RacePass;
using cpu::RopeHead;

inline Vec load_tail(const float* p, int64_t left) {
  return left >= 16 ? load(p) : load_some(p, static_cast<int>(left));
}
inline void store_tail(float* p, Vec v, int64_t left) {
  if (left >= 16) {
    store(p, v);
  } else {
    store_some(p, v, static_cast<int>(left));
  }
}

inline float inverse_rms(const float* x, float eps, int64_t n) {
  Vec sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const Vec v = load_tail(x + i, n - i);
    sum = fma(v, v, sum);
  }
  const float mean = sum_lanes(sum) / static_cast<float>(n);
  return 1.0f / __builtin_sqrtf(mean + eps) + (mean - mean);  // squares that overflow make no zeros, but no numbers
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const Vec factor = splat(inverse_rms(x, eps, n));
  for (int64_t i = 0; i < n; i += 16) {
    store_tail(out + i, mul(mul(load_tail(x + i, n - i), factor), load_tail(weight + i, n - i)), n - i);
  }
}

void residual_add(const float* x, const float* residual, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    store_tail(out + i, add(load_tail(residual + i, n - i), load_tail(x + i, n - i)), n - i);
  }
}

// out[c] = x times row c of w, in an order that depends on n alone.
template <int C>
void dot_columns(const float* x, const float* w, int64_t n, float* out) {
  Vec sum[C][4];
  NFP_UNROLL for (int c = 0; c < C; ++c) { NFP_UNROLL for (int j = 0; j < 4; ++j) sum[c][j] = zero(); }
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    NFP_UNROLL for (int j = 0; j < 4; ++j) {
      const Vec a = load(x + i + 16 * j);
      NFP_UNROLL for (int c = 0; c < C; ++c) sum[c][j] = fma(a, load(w + c * n + i + 16 * j), sum[c][j]);
    }
  }
  NFP_UNROLL for (int j = 0; j < 4; ++j, i += 16) {
    if (i >= n) break;
    const Vec a = load_tail(x + i, n - i);
    NFP_UNROLL for (int c = 0; c < C; ++c) sum[c][j] = fma(a, load_tail(w + c * n + i, n - i), sum[c][j]);
  }
  NFP_UNROLL for (int c = 0; c < C; ++c) {
    out[c] = sum_lanes(add(add(sum[c][0], sum[c][1]), add(sum[c][2], sum[c][3])));
  }
}

void dots(const float* x, int64_t rows, const float* w, int64_t columns, int64_t n, float* out, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    for (; c + kDotColumns <= columns; c += kDotColumns) {
      dot_columns<kDotColumns>(x + r * n, w + c * n, n, out + r * stride + c);
    }
    for (; c < columns; ++c) dot_columns<1>(x + r * n, w + c * n, n, out + r * stride + c);
  }
}

void weighted_sum(const float* const* rows, const float* weight, int32_t count, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    Vec sum = zero();
    for (int32_t r = 0; r < count; ++r) sum = fma(load_tail(rows[r] + i, n - i), splat(weight[r]), sum);
    store_tail(out + i, sum, n - i);
  }
}

void rope(const RopeHead& head) {
  const float* in = head.in;
  if (head.norm != nullptr) {
    rms_norm(in, head.norm, head.norm_eps, head.head_dim, head.out);
    in = head.out;
  }
  const int64_t half = head.rotary_dim / 2;
  if (in != head.out) {
    for (int64_t i = head.rotary_dim; i < head.head_dim; ++i) head.out[i] = in[i];
  }
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const Vec a = load_tail(in + i, left), b = load_tail(in + half + i, left);
    const Vec c = load_tail(head.cos + i, left), s = load_tail(head.sin + i, left);
    store_tail(head.out + i, fma(a, c, sub(zero(), mul(b, s))), left);
    store_tail(head.out + half + i, fma(b, c, mul(a, s)), left);
  }
}

void to_f16(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i += 16) {
    if (n - i >= 16) {
      store_f16(out + i, load(x + i));
    } else {
      uint16_t lanes[16];
      store_f16(lanes, load_some(x + i, static_cast<int>(n - i)));
      for (int64_t j = i; j < n; ++j) out[j] = lanes[j - i];
    }
  }
}

// Rounding to E4M3 is adding and taking away a number whose unit in the last place is E4M3's there: 2^20 times the
// power of two below the magnitude (at most 448), with exponents under -6 (subnormals) treated as -6.
inline Vec round_e4m3(Vec magnitude) {
  const Vec shift = mul(max(and_bits(magnitude, 0x7f800000u), splat(0x1p-6f)), splat(0x1p20f));
  return sub(add(magnitude, shift), shift);
}

// Codes. Magnitudes over 448 become 448; NaN stays (min keeps its second operand).
void to_e4m3(const float* x, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i < 16 ? n - i : 16;
    const Vec v = load_tail(x + i, left);
    const Vec rounded = round_e4m3(min(splat(448.0f), and_bits(v, 0x7fffffffu)));
    uint16_t halves[16];  // 2^-8 of it is exact in FP16, whose bits are the code's with one more of exponent
    uint8_t codes[16];
    store_f16(halves, mul(or_bits(rounded, and_bits(v, 0x80000000u)), splat(0x1p-8f)));
    for (int j = 0; j < 16; ++j) {
      const uint32_t h = halves[j];
      const uint32_t nan = (h & 0x7fffu) > 0x7c00u ? 0x7fu : 0u;
      codes[j] = static_cast<uint8_t>((h >> 8 & 0x80u) | (h >> 7 & 0x7fu) | nan);
    }
    __builtin_memcpy(out + i, codes, static_cast<size_t>(left));
  }
}

// Of what is not NaN.
inline float largest_magnitude(const float* x, int64_t k) {
  Vec most = zero();
  for (int64_t i = 0; i < k; i += 16) most = max(and_bits(load_tail(x + i, k - i), 0x7fffffffu), most);
  return max_lanes(most);
}

#if defined(NFP_HAVE_PAIRS) || defined(NFP_HAVE_TILES)
// Calls store(pairs, vector) for sixteen values of x at a time.
template <typename Store>
inline void each_sixteen(const float* x, int64_t k, uint32_t* pairs, Store store) {
  for (int64_t i = 0; i < k; i += 16) {
    if (k - i >= 16) {
      store(pairs + i / 2, load(x + i));
    } else {
      uint32_t lanes[8];
      store(lanes, load_some(x + i, static_cast<int>(k - i)));
      for (int64_t j = i / 2; j < (k + 1) / 2; ++j) pairs[j] = lanes[j - i / 2];
    }
  }
}

#if defined(NFP_HAVE_TILES)
// Calls f(i, v) with sixteen numbers from x[i] on, scaled as PairArithmetic::kBf16Tiles says, zeros past the end of x,
// for whole chunks. Returns the factor of the result.
template <typename F>
float each_scaled(const float* x, int64_t k, F f) {
  // An exponent of 98 at least keeps the factor a number. Infinity's, 255, takes every number that is finite to one.
  const uint32_t exponent = std::bit_cast<uint32_t>(largest_magnitude(x, k)) >> 23;
  const uint32_t kept = exponent < 98 ? 98 : exponent;
  const Vec factor = splat(std::bit_cast<float>((352 - kept) << 23));
  const int64_t end = cpu::tile_chunks(k) * cpu::kTileSteps;
  for (int64_t i = 0; i < end; i += 16) f(i, i < k ? mul(load_tail(x + i, k - i), factor) : zero());
  return std::bit_cast<float>(kept << 23);
}

inline float to_split(const float* x, int64_t k, uint32_t* split) {
  auto* first = reinterpret_cast<uint16_t*>(split);
  uint16_t* second = first + cpu::tile_chunks(k) * cpu::kTileSteps;
  return each_scaled(x, k, [&](int64_t i, Vec v) {
    const Vec rounded = round_to_bf16(v);
    store_bf16(first + i, rounded);
    store_bf16(second + i, round_to_bf16(sub(v, rounded)));
  });
}
#endif

template <cpu::PairArithmetic A>
float to_pairs(const float* x, int64_t k, uint32_t* pairs) {
#if defined(NFP_HAVE_BF16_PAIRS)
  if constexpr (A == cpu::PairArithmetic::kBf16) {
    each_sixteen(x, k, pairs, [](uint32_t* out, Vec v) { store_bf16_pairs(out, v); });
    return 1.0f;
  }
#endif
#if defined(NFP_HAVE_FP16_PAIRS)
  if constexpr (A == cpu::PairArithmetic::kFp16) {
    // An exponent of 8 at least keeps both powers of two normal numbers; infinity's, 255, takes every number that is
    // finite to one that FP16 holds.
    const uint32_t exponent = std::bit_cast<uint32_t>(largest_magnitude(x, k)) >> 23;
    const uint32_t kept = exponent < 8 ? 8 : exponent;
    const Vec factor = splat(std::bit_cast<float>((261 - kept) << 23));
    each_sixteen(x, k, pairs, [&](uint32_t* out, Vec v) { store_fp16_pairs(out, mul(v, factor)); });
    return std::bit_cast<float>((kept - 7) << 23);
  }
#endif
#if defined(NFP_HAVE_TILES)
  if constexpr (A == cpu::PairArithmetic::kBf16Tiles) {
    auto* words = reinterpret_cast<uint16_t*>(pairs);
    return each_scaled(x, k, [&](int64_t i, Vec v) { store_bf16(words + i, round_to_bf16(v)); });
  }
#endif
}
#endif

float quantize_e4m3(const float* x, int64_t k, float* out) {
  const float largest = largest_magnitude(x, k);
  // A row may be so small that 448 / largest is no number.
  const bool tiny = largest > 0.0f && largest < 448.0f * 0x1p-126f;
  const Vec inverse = splat(tiny ? 0x1p126f : largest > 0.0f ? 448.0f / largest : 0.0f);
  for (int64_t i = 0; i < k; i += 16) {
    const Vec v = mul(load_tail(x + i, k - i), inverse);
    const Vec magnitude = min(splat(448.0f), and_bits(v, 0x7fffffffu));  // NaN stays NaN
    store_tail(out + i, or_bits(round_e4m3(magnitude), and_bits(v, 0x80000000u)), k - i);
  }
  return tiny ? 0x1p-126f : largest / 448.0f;
}

// ---- logits --------------------------------------------------------------------------------------------------------

int32_t argmax(const float* x, int32_t n) {
  // The largest value by vectors (NaN never is: max keeps its second operand), then its first place.
  Vec most = splat(kMinusInfinity);
  int32_t i = 0;
  Vec other = most;
  for (; i + 32 <= n; i += 32) {
    most = max(load(x + i), most);
    other = max(load(x + i + 16), other);
  }
  most = max(most, other);
  float largest = max_lanes(most);
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  if (!(largest > kMinusInfinity)) return 0;
  const Vec wanted = splat(largest);
  for (i = 0; i + 16 <= n; i += 16) {
    const Vec v = load(x + i);
    const uint32_t less = greater_mask(wanted, v);
    if (less == 0xffffu) continue;
    for (int32_t j = i; j < i + 16; ++j) {
      if (x[j] == largest) return j;
    }
  }
  for (; i < n; ++i) {
    if (x[i] == largest) return i;
  }
  return 0;
}

inline Vec or_minus_infinity(Vec x) { return max(x, splat(kMinusInfinity)); }  // max gives its second operand for NaN

double sum_exp(const float* x, int32_t n, float maximum, float factor) {
  const Vec m = splat(maximum), f = splat(factor);
  double total = 0;
  for (int32_t block = 0; block < n; block += 4096) {  // FP32 inside a block, FP64 across
    const int32_t end = n - block < 4096 ? n : block + 4096;
    Vec even = zero(), odd = zero();
    int32_t i = block;
    for (; i + 32 <= end; i += 32) {
      even = add(even, exp_of(mul(sub(or_minus_infinity(load(x + i)), m), f)));
      odd = add(odd, exp_of(mul(sub(or_minus_infinity(load(x + i + 16)), m), f)));
    }
    for (; i < end; i += 16) {
      const int left = end - i < 16 ? end - i : 16;
      Vec v = left == 16 ? load(x + i) : load_some(x + i, left);
      v = keep_lanes(or_minus_infinity(v), 0, left, splat(kMinusInfinity));
      even = add(even, exp_of(mul(sub(v, m), f)));
    }
    total += static_cast<double>(sum_lanes(add(even, odd)));
  }
  return total;
}

void exps(const float* x, int32_t n, float maximum, float factor, float* out) {
  const Vec m = splat(maximum), f = splat(factor);
  for (int32_t i = 0; i < n; i += 16) {
    store_tail(out + i, exp_of(mul(sub(or_minus_infinity(load_tail(x + i, n - i)), m), f)), n - i);
  }
}

// E of race.h is at least the number v in (0, 1) that it is made of; v is at least what its coarse bits say; and
// log2(v) is at least what the bits of v read as an integer say (a chord below the curve, by at most 0.09).
int32_t racers(const RacePass& pass, Candidate* out) {
  constexpr float kRounding = 1e-3f;  // of what follows, where it is not infinitely more than `latest`
  const RoundKeys keys(pass.key.key);
  const Vec m = splat(pass.maximum), f = splat(pass.factor * 1.44269504088896341f);
  const Vec latest = splat(pass.latest + kRounding),
            hopeless = splat(pass.latest + kRounding - kLeastLog2OfExponential);
  int32_t count = 0;
  for (int32_t i = pass.first; i < pass.end; i += 32) {
    Vec down[2];  // from the maximum, as a logarithm of weights; NaN for NaN
    uint32_t are_able = 0;
    NFP_UNROLL for (int half = 0; half < 2; ++half) {
      const int32_t left = pass.end - i - 16 * half;
      if (left <= 0) break;
      down[half] = mul(sub(m, load_tail(pass.logits + i + 16 * half, left)), f);
      const uint32_t mask = greater_mask(hopeless, down[half]) & (left < 16 ? (1u << left) - 1u : 0xffffu);
      are_able |= mask << (16 * half);
    }
    if (are_able == 0) continue;
    alignas(64) uint16_t bits[32];
    coarse_bits_of_32(keys, pass.key.high, static_cast<uint32_t>(i) / 4, bits);
    NFP_UNROLL for (int half = 0; half < 2; ++half) {
      uint32_t mask = are_able >> (16 * half) & 0xffffu;
      if (mask == 0) continue;
      mask &= greater_mask(latest, add(down[half], log2_below(bits + 16 * half)));
      for (; mask != 0; mask &= mask - 1) {
        const int32_t id = i + 16 * half + __builtin_ctz(mask);
        out[count++] = {pass.logits[id], id};
      }
    }
  }
  return count;
}

int32_t at_least(const float* x, int32_t n, float threshold, Candidate* out, int32_t capacity) {
  int32_t count = 0;
  const auto take = [&](int32_t i) {
    if (x[i] >= threshold) {
      if (count < capacity) out[count] = {x[i], i};
      ++count;
    }
  };
  const Vec t = splat(threshold);
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const Vec v = load(x + i);
    if (greater_mask(t, v) == 0xffffu) continue;
    for (int32_t j = i; j < i + 16; ++j) take(j);
  }
  for (; i < n; ++i) take(i);
  return count;
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
