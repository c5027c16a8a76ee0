// The kernels' vector type on AVX2, FMA and F16C: two 256-bit halves. Included by that translation unit only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/unroll.h"
#include "backend/race.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

constexpr int kTileRows = 6;  // 6 x 2 accumulators, 2 halves of weights and a broadcast fill 16 registers
constexpr int kTileVectors = 1;
constexpr int kDirectRows = 6;  // up to which panels are unpacked in registers
// Of up to kHalvedRows two halves are faster than a block (measured on Zen 3: 7 to 11 rows).
constexpr int kDirectUpperRows = kDirectRows, kDirectPairRows = kDirectRows, kHalvedRows = 12, kHalvedPairRows = 0;
// Panels of a pass: with one row or two a panel's sums alone are chains of multiply-adds that take longer than reading.
// Where both planes are read, four take more registers than there are.
constexpr int kDirectPanels = 4;
constexpr int direct_panels(int, bool both_planes) { return both_planes ? 2 : kDirectPanels; }
constexpr int most_direct_rows(int panels) { return panels == 4 ? 1 : panels == 2 ? 2 : kDirectRows; }
constexpr int kPointerRows = kDirectRows;  // of x that direct() addresses one by one: all
constexpr int kDotColumns = 1;             // of dots() at once: their sums, four each, are in registers

struct Vec {
  __m256 lo, hi;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256i lane_ids(int from) {
  return _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
}
inline __m256i lanes_below(int count, int from) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane_ids(from)); }
inline Vec load_some(const float* p, int count) {
  return {_mm256_maskload_ps(p, lanes_below(count, 0)), _mm256_maskload_ps(p + 8, lanes_below(count, 8))};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_some(float* p, Vec a, int count) {
  _mm256_maskstore_ps(p, lanes_below(count, 0), a.lo);
  _mm256_maskstore_ps(p + 8, lanes_below(count, 8), a.hi);
}
inline Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_f16(uint16_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec round_even(Vec a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec and_bits(Vec a, uint32_t mask) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(mask)));
  return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)};
}
inline Vec or_bits(Vec a, Vec b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
inline Vec times_exp2(Vec a, Vec n) {
  const auto half = [](__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  };
  return mul(a, {half(n.lo), half(n.hi)});
}
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline Vec keep_lanes(Vec a, int first, int end, Vec other) {
  const auto half = [&](__m256 x, __m256 y, int from) {
    const __m256i inside =
        _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane_ids(from)), lanes_below(end, from));
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(inside));
  };
  return {half(a.lo, other.lo, 0), half(a.hi, other.hi, 8)};
}
inline uint32_t greater_mask(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ))) |
         (static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) << 8);
}
inline float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(Vec a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }  // to L2
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

inline Vec widen(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

inline Vec load_e4m3(const uint8_t* p) {  // by way of FP16 * 2^8: sign, then exponent and mantissa one bit lower
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1),
                                          _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_or_si256(codes, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0xff));
  const Vec v = widen(_mm256_or_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00))));
  return mul(v, splat(256.0f));
}

// The first 32 bytes of a group are steps 0 and 2, the others 1 and 3 (panel.h).
inline void unpack_both(const uint8_t* upper, const uint8_t* lower, Vec w[4]) {
  for (int half = 0; half < 2; ++half) {
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper + 32 * half));
    const __m256i l = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower + 32 * half));
    const __m256i t = _mm256_add_epi8(u, _mm256_cmpgt_epi8(_mm256_setzero_si256(), l));  // Algorithm 1's borrow
    const __m256i h = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(t, 1), _mm256_set1_epi8(0x3f)),
                                      _mm256_and_si256(t, _mm256_set1_epi8(static_cast<char>(0x80))));
    w[half] = widen(_mm256_unpacklo_epi8(l, h));
    w[half + 2] = widen(_mm256_unpackhi_epi8(l, h));
  }
}

inline void unpack_upper(const uint8_t* upper, Vec w[4]) {
  const __m256i keep = _mm256_set1_epi16(static_cast<short>(0xbf80));
  const __m256i none = _mm256_setzero_si256();
  for (int half = 0; half < 2; ++half) {
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper + 32 * half));
    w[half] = widen(_mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(none, u), 1), keep));
    w[half + 2] = widen(_mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(none, u), 1), keep));
  }
}

// unpack_upper()'s numbers times 2^-112 by moving bits, where that converts FP16: an E4M3 number's exponent and
// mantissa lie at the end of an FP32 number's exponent and in front of its mantissa, and its subnormals become FP32's.
// A step's columns are the upper halves of such numbers; moved() has the even ones, then the odd ones, and in_order()
// is for sums.
#define NFP_HAVE_MOVED_UPPERS 1
using UpperHalves = __m256i;
inline void move_upper(const uint8_t* upper, UpperHalves w[4]) {
  const __m256i keep = _mm256_set1_epi16(static_cast<short>(0x87f0)), none = _mm256_setzero_si256();
  for (int half = 0; half < 2; ++half) {
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper + 32 * half));
    w[half] = _mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(none, u), 4), keep);
    w[half + 2] = _mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(none, u), 4), keep);
  }
}
inline Vec moved(UpperHalves w) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(_mm256_and_si256(w, odd))};
}
inline Vec in_order(Vec even_odd) {
  const __m256 first = _mm256_unpacklo_ps(even_odd.lo, even_odd.hi),
               second = _mm256_unpackhi_ps(even_odd.lo, even_odd.hi);
  return {_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31)};
}

inline void unpack_dense(const uint8_t* words, Vec w[4]) {
  const auto* h = reinterpret_cast<const uint16_t*>(words);
  for (int k = 0; k < 4; ++k) w[k] = load_f16(h + 16 * k);
}

// As in simd_scalar.h. Counters lie in the low halves of lanes of 64 bits, where a product's halves are apart.
struct RoundKeys {
  __m256i key[kPhiloxRounds];
  explicit RoundKeys(uint32_t k) {
    for (auto& of_round : key) {
      of_round = _mm256_set1_epi64x(k);
      k += kPhiloxKeyStep;
    }
  }
};
inline void coarse_bits_of_32(const RoundKeys& keys, uint32_t high, uint32_t four, uint16_t* out) {
  const __m256i factor = _mm256_set1_epi64x(kPhilox2x32Factor);
  __m256i c0[2], c1[2];
  NFP_UNROLL for (int h = 0; h < 2; ++h) {
    c0[h] = _mm256_add_epi64(_mm256_set1_epi64x(int64_t{four} + 4 * h), _mm256_setr_epi64x(0, 1, 2, 3));
    c1[h] = _mm256_set1_epi64x(high);
  }
  for (const __m256i key : keys.key) {
    NFP_UNROLL for (int h = 0; h < 2; ++h) {
      const __m256i product = _mm256_mul_epu32(c0[h], factor);
      c0[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product, 32), c1[h]), key);
      c1[h] = product;
    }
  }
  NFP_UNROLL for (int h = 0; h < 2; ++h) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + 16 * h),
                       _mm256_blend_epi32(c0[h], _mm256_slli_epi64(c1[h], 32), 0xaa));
  }
}
inline Vec log2_below(const uint16_t* bits) {
  const auto of_eight = [](const uint16_t* b) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(b)));
    const __m256i as_integers = _mm256_castps_si256(_mm256_cvtepi32_ps(words));
    return _mm256_fmsub_ps(_mm256_cvtepi32_ps(as_integers), _mm256_set1_ps(0x1p-23f), _mm256_set1_ps(143.0f));
  };
  return {of_eight(bits), of_eight(bits + 8)};
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
