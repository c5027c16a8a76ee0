// The kernels' vector type on AVX-512 (F, BW, DQ, VL); with GFNI where NFP_AVX512_GFNI is defined, and with
// VBMI and BF16 dot products (NFP_HAVE_BF16_PAIRS), FP16 multiply-adds (NFP_HAVE_FP16_PAIRS) or AMX (NFP_HAVE_TILES).
// NFP_TUNED_FOR_ZEN5: for a processor whose multiply-adds leave two vector units free. Integer operations, and most of
// VCVTPH2PS, run there beside them, so tiles widen FP16 words themselves; the defaults are for Intel's, where they do
// not. Included by those translation units only.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>

#include "backend/cpu/panel.h"
#include "backend/cpu/unroll.h"
#include "backend/race.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

constexpr int kTileRows = 6;  // 6 x 4 accumulators, 4 vectors of weights and a broadcast fill 32 registers
constexpr int kTileVectors = 4;
constexpr int kDirectPanels = 4;  // of a pass, at most
// Rows up to which panels are unpacked in registers, where both planes are read, upper bytes only, and pairs of steps;
// and of them those for which so many panels' sums fit into registers beside weights and a broadcast.
#if defined(NFP_TUNED_FOR_ZEN5)
constexpr int kDirectRows = 14, kDirectUpperRows = 14, kHalvedPairRows = 48;
constexpr int most_direct_rows(int panels) { return panels == 4 ? 5 : panels == 2 ? 14 : 24; }
// Few rows wait for memory, which delivers the planes of two panels sooner than of four (docs/cpu-experiments.md).
constexpr int direct_panels(int rows, bool both_planes) { return both_planes && rows <= 3 ? 2 : kDirectPanels; }
#else
#ifdef NFP_AVX512_GFNI
constexpr int kDirectRows = 24;
#else
constexpr int kDirectRows = 18;  // a mask register is part of the unpacking
#endif
constexpr int kDirectUpperRows = 24, kHalvedPairRows = 0;
constexpr int most_direct_rows(int panels) { return 24 / panels; }
constexpr int direct_panels(int, bool) { return kDirectPanels; }
#endif
constexpr int kDirectPairRows = 24, kHalvedRows = 0;
// Rows of x that direct() can address one by one; more are packed, so that one pointer reads them all.
constexpr int kPointerRows = 4;
constexpr int kDotColumns = 4;  // of dots() at once: their sums, four each, are in registers

using Vec = __m512;
using Pairs = __m512i;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline __mmask16 lanes_below(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_some(const float* p, int count) { return _mm512_maskz_loadu_ps(lanes_below(count), p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline void store_some(float* p, Vec a, int count) { _mm512_mask_storeu_ps(p, lanes_below(count), a); }
inline Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_f16(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec load_e4m3(const uint8_t* p) {  // by way of FP16 * 2^8: sign, then exponent and mantissa one bit lower
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1),
                                          _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_or_si256(codes, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0xff));
  const __m256i with_nan = _mm256_or_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  return _mm512_mul_ps(_mm512_cvtph_ps(with_nan), _mm512_set1_ps(256.0f));
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round_even(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec and_bits(Vec a, uint32_t mask) {
  return _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(mask))));
}
inline Vec or_bits(Vec a, Vec b) { return _mm512_or_ps(a, b); }
inline Vec times_exp2(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline Vec keep_lanes(Vec a, int first, int end, Vec other) {
  if (first < 0) first = 0;
  if (end > 16) end = 16;
  const uint32_t mask = end > first ? (((1u << end) - 1u) & ~((1u << first) - 1u)) : 0u;
  return _mm512_mask_blend_ps(static_cast<__mmask16>(mask), other, a);
}
inline uint32_t greater_mask(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(Vec a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }  // to L2
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

// FP16 to FP32 straight from memory: one operation less than from the upper half of a register, which needs a shuffle
// to extract it and another inside VCVTPH2PS. (In assembly because compilers turn the reload back into the shuffle.)
inline Vec widen_stored(const uint16_t* p) {
  Vec r;
  asm("vcvtph2ps %1, %0" : "=v"(r) : "m"(*reinterpret_cast<const __m256i_u*>(p)));
  return r;
}

// out[j][i] = x[i][j] of four rows of four words of 32 bits.
inline void transpose_four(const void* x, int64_t stride, void* out, int64_t out_stride) {
  const auto* from = static_cast<const float*>(x);
  auto* to = static_cast<float*>(out);
  __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + stride);
  __m128 c = _mm_loadu_ps(from + 2 * stride), d = _mm_loadu_ps(from + 3 * stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + out_stride, b);
  _mm_storeu_ps(to + 2 * out_stride, c);
  _mm_storeu_ps(to + 3 * out_stride, d);
}

// packed[u][m] = x[m][u] of more than kPointerRows rows. Where fewer than four are left the four begin earlier.
template <typename X>
void pack_rows(const X* x, int64_t stride, int64_t units, int64_t rows, X* packed) {
  static_assert(sizeof(X) == 4 && kPointerRows >= 4);
  const int64_t whole = units / 4 * 4;
  for (int64_t u = 0; u < whole; u += 4) {
    for (int64_t m = 0; m < rows; m += 4) {
      const int64_t first = m + 4 > rows ? rows - 4 : m;
      transpose_four(x + first * stride + u, stride, packed + u * rows + first, rows);
    }
  }
  for (int64_t u = whole; u < units; ++u) {
    for (int64_t m = 0; m < rows; ++m) packed[u * rows + m] = x[m * stride + u];
  }
}

// A group's weights as FP16, step after step: what the unpacking below makes of bytes, kept in memory so that each step
// is widened when it is needed and registers stay free for sums.
#define NFP_HAVE_STAGES 1
constexpr int kStageWords = 64;
inline void stage(__m512i a, __m512i b, uint16_t* words) {  // a: steps 0 and 1, b: steps 2 and 3
  _mm512_store_si512(words, a);
  _mm512_store_si512(words + 32, b);
}

// The same, and a multiply-add, where the compiler is to leave them in the order in which they are written, and sums in
// the registers in which they are.
inline void widen_here(const uint16_t* p, Vec& r) {
  asm volatile("vcvtph2ps %1, %0" : "=v"(r) : "m"(*reinterpret_cast<const __m256i_u*>(p)));
}
inline void fma_here(Vec a, Vec b, Vec& sum) { asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

inline void widen(const uint16_t* words, Vec w[4]) {
  w[0] = widen_stored(words);
  w[1] = widen_stored(words + 16);
  w[2] = widen_stored(words + 32);
  w[3] = widen_stored(words + 48);
}

// FP16's high byte from a truncated upper byte: sign, 0, bits 6..1.
inline __m512i high_byte(__m512i t) {
#if defined(NFP_AVX512_GFNI) && !defined(NFP_SHIFTS_BESIDE)
  return _mm512_gf2p8affine_epi64_epi8(t, _mm512_set1_epi64(0x0204081020400080), 0);
#else
  const __m512i shifted = _mm512_and_si512(_mm512_srli_epi16(t, 1), _mm512_set1_epi8(0x3f));
  return _mm512_ternarylogic_epi32(shifted, t, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // a | (b & c)
#endif
}

// FP16's high bytes from upper and lower ones: Algorithm 1 with its borrow taken as a subtraction: as cheap as a biased
// lower byte, and right for every calibrated upper too. One interleave of bytes then gives sixteen rows of one k a
// 256-bit half.
inline __m512i both_high(__m512i u, __m512i l) {
#ifdef NFP_AVX512_GFNI
  // The borrow by a bit matrix: VPMOVB2M and a masked addition slow the multiply-adds beside them by up to a fifth.
#ifdef NFP_SHIFTS_BESIDE
  const __m512i borrow = _mm512_and_si512(_mm512_srli_epi16(l, 7), _mm512_set1_epi8(1));
  const __m512i t = _mm512_sub_epi8(u, borrow);
#else
  const __m512i borrow = _mm512_gf2p8affine_epi64_epi8(l, _mm512_set1_epi8(static_cast<char>(0x80)), 0);
  const __m512i t = _mm512_add_epi8(u, borrow);
#endif
#else
  const __m512i t = _mm512_mask_add_epi8(u, _mm512_movepi8_mask(l), u, _mm512_set1_epi8(-1));
#endif
  return high_byte(t);
}

inline void stage_both(const uint8_t* upper, const uint8_t* lower, uint16_t* words) {
  const __m512i l = _mm512_loadu_si512(lower);
  const __m512i h = both_high(_mm512_loadu_si512(upper), l);
  stage(_mm512_unpacklo_epi8(l, h), _mm512_unpackhi_epi8(l, h), words);
}

inline void stage_upper(const uint8_t* upper, uint16_t* words) {
  const __m512i u = _mm512_loadu_si512(upper);
#if defined(NFP_AVX512_GFNI) && !defined(NFP_SHIFTS_BESIDE)
  const __m512i h = high_byte(u);
  const __m512i l = _mm512_gf2p8affine_epi64_epi8(u, _mm512_set1_epi64(1), 0);  // bit 0 to bit 7
  stage(_mm512_unpacklo_epi8(l, h), _mm512_unpackhi_epi8(l, h), words);
#else
  const __m512i keep = _mm512_set1_epi16(static_cast<short>(0xbf80));
  const __m512i none = _mm512_setzero_si512();
  stage(_mm512_and_si512(_mm512_srai_epi16(_mm512_unpacklo_epi8(none, u), 1), keep),
        _mm512_and_si512(_mm512_srai_epi16(_mm512_unpackhi_epi8(none, u), 1), keep), words);
#endif
}

inline void unpack_both(const uint8_t* upper, const uint8_t* lower, Vec w[4]) {
  alignas(64) uint16_t words[kStageWords];
  stage_both(upper, lower, words);
  widen(words, w);
}

inline void unpack_upper(const uint8_t* upper, Vec w[4]) {
  alignas(64) uint16_t words[kStageWords];
  stage_upper(upper, words);
  widen(words, w);
}

inline void unpack_dense(const uint8_t* words, Vec w[4]) {
  const auto* h = reinterpret_cast<const uint16_t*>(words);
  for (int k = 0; k < 4; ++k) w[k] = load_f16(h + 16 * k);
}

#if defined(NFP_HAVE_BF16_PAIRS) || defined(NFP_HAVE_FP16_PAIRS)
#define NFP_HAVE_PAIRS 1
inline Pairs load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline void store_pairs(uint32_t* p, Pairs a) { _mm512_storeu_si512(p, a); }
inline Pairs splat_pair(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
// As widen_here.
inline void load_pairs_here(const uint16_t* p, Pairs& r) {
  asm volatile("vmovdqa64 %1, %0" : "=v"(r) : "m"(*reinterpret_cast<const __m512i*>(p)));
}
#endif

#if defined(NFP_HAVE_BF16_PAIRS) || defined(NFP_HAVE_TILES)
// x rounded to BF16 (to nearest even), as bits of FP32.
inline __m512i rounded_to_bf16(Vec x) {
  // Not VCVTNEPS2BF16, which flushes subnormals: the products flush them anyway, but NaN and ties are kept plain.
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}
#endif

#ifdef NFP_HAVE_BF16_PAIRS
// BF16 of E4M3 * 2^-8 by the code's lower seven bits, one byte of it: exponent + 112 and mantissa, and of the codes
// with exponent 0, m * 2^-17, the normal number that it is, because BF16 products take subnormal inputs as zero.
constexpr std::array<uint8_t, 128> bf16_bytes(int shift) {
  std::array<uint8_t, 128> bytes{};
  for (uint32_t code = 0; code < 128; ++code) {
    uint32_t exponent = (code >> 3) + 112, mantissa = code & 7;
    if (code < 8) {
      exponent = mantissa == 0 ? 0 : 113;
      while (mantissa != 0 && (mantissa & 8) == 0) mantissa <<= 1, --exponent;
    }
    bytes[code] = static_cast<uint8_t>((exponent << 7 | (mantissa & 7) << 4) >> shift);
  }
  return bytes;
}

// The words of BF16 whose codes are u: in each lane of 128 bits the first eight, then the others.
inline void look_up_bf16(__m512i u, Pairs w[2]) {
  alignas(64) static constexpr std::array<uint8_t, 128> kHigh = bf16_bytes(8), kLow = bf16_bytes(0);
  const auto look_up = [&](const std::array<uint8_t, 128>& table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table.data()), u, _mm512_load_si512(table.data() + 64));
  };
  const __m512i low = look_up(kLow);
  const __m512i high =  // a | (b & c)
      _mm512_ternarylogic_epi32(look_up(kHigh), u, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  w[0] = _mm512_unpacklo_epi8(low, high);
  w[1] = _mm512_unpackhi_epi8(low, high);
}

inline Vec dot_pairs(Vec acc, Pairs x, Pairs w) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
}
inline void store_bf16_pairs(uint32_t* out, Vec x) {
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(x), 16));
  const __m256i swapped = _mm256_or_si256(_mm256_slli_epi32(words, 16), _mm256_srli_epi32(words, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), swapped);
}

// By tables, which take as many operations for subnormal codes as for others.
inline void unpack_upper_pairs(const uint8_t* upper, Pairs w[2]) {
  // Destination lane L: rows 4L..4L+3, each (k1, k0), then each (k3, k2).
  alignas(64) static constexpr uint8_t kOrder[64] = {32, 0,  33, 1,  34, 2,  35, 3,  40, 8,  41, 9,  42, 10, 43, 11,  //
                                                     36, 4,  37, 5,  38, 6,  39, 7,  44, 12, 45, 13, 46, 14, 47, 15,  //
                                                     48, 16, 49, 17, 50, 18, 51, 19, 56, 24, 57, 25, 58, 26, 59, 27,  //
                                                     52, 20, 53, 21, 54, 22, 55, 23, 60, 28, 61, 29, 62, 30, 63, 31};
  look_up_bf16(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder), _mm512_loadu_si512(upper)), w);
}

// As fma_here.
inline void dot_pairs_here(Pairs a, Pairs b, Vec& sum) {
  asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}
#endif

#ifdef NFP_HAVE_FP16_PAIRS
// A word for each row and parity of the step: what is summed of even steps in the low half of 32 bits, of odd ones in
// the high half.
using HalfSums = __m512h;
inline HalfSums no_halves() { return _mm512_setzero_ph(); }
inline HalfSums fma_halves(Pairs a, Pairs b, HalfSums c) {
  return _mm512_fmadd_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b), c);
}
// As fma_here.
inline void fma_halves_here(Pairs a, Pairs b, HalfSums& sum) {
  asm volatile("vfmadd231ph %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Even and odd steps, added in FP32.
inline Vec widened(HalfSums a) {
  alignas(64) static constexpr std::array<uint16_t, 32> kApart = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                                  22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                                  13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  alignas(64) uint16_t words[32];
  _mm512_store_si512(words, _mm512_permutexvar_epi16(_mm512_load_si512(kApart.data()), _mm512_castph_si512(a)));
  return _mm512_add_ps(widen_stored(words), widen_stored(words + 16));
}

inline void store_fp16_pairs(uint32_t* out, Vec x) { store_f16(reinterpret_cast<uint16_t*>(out), x); }

// Where the bytes of steps `step` and `step` + 1 of a group are, each to go to the high byte of a word.
constexpr std::array<uint8_t, 64> pair_order(int step) {
  std::array<uint8_t, 64> order{};
  for (size_t row = 0; row < 16; ++row) {
    for (size_t odd = 0; odd < 2; ++odd) {
      const size_t at = cpu::group_position(static_cast<int>(row), step + static_cast<int>(odd));
      order[4 * row + 2 * odd] = order[4 * row + 2 * odd + 1] = static_cast<uint8_t>(at);
    }
  }
  return order;
}

// E4M3 * 2^-8 as FP16: sign, then exponent and mantissa one bit lower; subnormals are FP16's own.
inline void unpack_upper_halves(const uint8_t* upper, Pairs w[2]) {
  alignas(64) static constexpr std::array<uint8_t, 64> kFirst = pair_order(0), kSecond = pair_order(2);
  const __m512i u = _mm512_loadu_si512(upper);
  const __m512i keep = _mm512_set1_epi16(static_cast<short>(0xbf80));
  const auto placed = [&](const std::array<uint8_t, 64>& order) {
    const __m512i words = _mm512_permutexvar_epi8(_mm512_load_si512(order.data()), u);
    return _mm512_and_si512(_mm512_srai_epi16(words, 1), keep);
  };
  w[0] = placed(kFirst);
  w[1] = placed(kSecond);
}
#endif

#if defined(NFP_HAVE_TILES)
// A group's bytes as two rows of a tile: in lane L rows 4L..4L+3 at steps 0 and 1, then at 2 and 3.
constexpr std::array<uint8_t, 64> tile_order() {
  std::array<uint8_t, 64> order{};
  for (size_t i = 0; i < 64; ++i) {
    const int row = static_cast<int>(i / 16 * 4 + i % 8 / 2), step = static_cast<int>(i % 16 / 8 * 2 + i % 2);
    order[i] = static_cast<uint8_t>(cpu::group_position(row, step));
  }
  return order;
}

// FP16 numbers of up to 1.99 times 2^14, after which none of them is subnormal; the same times 2^-112 as BF16, whose
// exponent has three bits more: sign, exponent and mantissa at their places. Zero stays zero.
inline __m512h without_subnormals(__m512i words) {
  return _mm512_mul_ph(_mm512_castsi512_ph(words), _mm512_set1_ph(static_cast<_Float16>(16384.0f)));
}
inline __m512i narrow_to_bf16(__m512h normal) {
  return _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(normal), 3),
                          _mm512_set1_epi16(static_cast<short>(0x8fff)));
}

inline __m512i in_tile_order(const uint8_t* bytes) {
  alignas(64) static constexpr std::array<uint8_t, 64> kOrder = tile_order();
  return _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.data()), _mm512_loadu_si512(bytes));
}

// A group of E4M3 * 2^-106 as two rows of a tile of BF16.
inline void unpack_tile_rows(const uint8_t* upper, uint16_t* words) {
  const __m512i u = in_tile_order(upper), h = high_byte(u);
  const __m512i l = _mm512_gf2p8affine_epi64_epi8(u, _mm512_set1_epi64(1), 0);  // bit 0 to bit 7
  _mm512_store_si512(words, narrow_to_bf16(without_subnormals(_mm512_unpacklo_epi8(l, h))));
  _mm512_store_si512(words + 32, narrow_to_bf16(without_subnormals(_mm512_unpackhi_epi8(l, h))));
}

// As in simd_scalar.h.
inline void unpack_split_rows(const uint8_t* upper, const uint8_t* lower, uint16_t* first, uint16_t* second) {
  const __m512i l = in_tile_order(lower), h = both_high(in_tile_order(upper), l);
  const auto split = [](__m512i words, uint16_t* of_first, uint16_t* of_second) {
    const __m512h w = without_subnormals(words);
    const __m512i half_up = _mm512_add_epi16(_mm512_castph_si512(w), _mm512_set1_epi16(4));
    const __m512h kept = _mm512_castsi512_ph(_mm512_and_si512(half_up, _mm512_set1_epi16(static_cast<short>(0xfff8))));
    _mm512_store_si512(of_first, narrow_to_bf16(kept));
    _mm512_store_si512(of_second, narrow_to_bf16(_mm512_sub_ph(w, kept)));
  };
  split(_mm512_unpacklo_epi8(l, h), first, second);
  split(_mm512_unpackhi_epi8(l, h), first + 32, second + 32);
}

// Of FP16 numbers of any size: by way of FP32.
inline void unpack_dense_split_rows(const uint8_t* words, uint16_t* first, uint16_t* second) {
  // Two rows of sixteen words of FP32 as one of pairs.
  const auto pair = [](__m512i even, __m512i odd) {
    return _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, _mm512_set1_epi32(-65536)));
  };
  const auto half_up = [](Vec w) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(w), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
  };
  Vec w[4], kept[4], rest[4];
  unpack_dense(words, w);
  for (int k = 0; k < 4; ++k) {
    kept[k] = half_up(w[k]);
    rest[k] = mul(sub(w[k], kept[k]), splat(0x1p-98f));
    kept[k] = mul(kept[k], splat(0x1p-98f));
  }
  for (int k = 0; k < 4; k += 2) {
    _mm512_store_si512(first + k * 16, pair(_mm512_castps_si512(kept[k]), _mm512_castps_si512(kept[k + 1])));
    _mm512_store_si512(second + k * 16, pair(_mm512_castps_si512(rest[k]), _mm512_castps_si512(rest[k + 1])));
  }
}

inline Vec round_to_bf16(Vec x) {
  return _mm512_castsi512_ps(_mm512_and_si512(rounded_to_bf16(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void store_bf16(uint16_t* out, Vec x) {
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), words);
}
#endif

// As in simd_scalar.h. Counters lie in the low halves of lanes of 64 bits, where a product's halves are apart.
struct RoundKeys {
  __m512i key[kPhiloxRounds];
  explicit RoundKeys(uint32_t k) {
    for (auto& of_round : key) {
      of_round = _mm512_set1_epi64(k);
      k += kPhiloxKeyStep;
    }
  }
};
inline void coarse_bits_of_32(const RoundKeys& keys, uint32_t high, uint32_t four, uint16_t* out) {
  const __m512i factor = _mm512_set1_epi64(kPhilox2x32Factor);
  __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(four), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  __m512i c1 = _mm512_set1_epi64(high);
  NFP_UNROLL for (const __m512i key : keys.key) {
    const __m512i product = _mm512_mul_epu32(c0, factor);
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product, 32), c1, key, 0x96);  // exclusive or
    c1 = product;
  }
  _mm512_store_si512(out, _mm512_mask_blend_epi32(0xaaaa, c0, _mm512_slli_epi64(c1, 32)));
}
inline Vec log2_below(const uint16_t* bits) {
  const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(bits));
  const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(words));
  return _mm512_fmsub_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(whole)), _mm512_set1_ps(0x1p-23f),
                         _mm512_set1_ps(143.0f));
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
