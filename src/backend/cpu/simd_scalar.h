// The vector type of the kernels without any vector instruction: sixteen lanes, one after the other. What the other
// simd_*.h must equal bit for bit. Included by one translation unit only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "backend/race.h"
#include "base/float_types.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

// Tile of the matrix kernel (rows of x by vectors of sixteen outputs) that the registers hold.
constexpr int kTileRows = 4;
constexpr int kTileVectors = 1;
constexpr int kDirectRows = 4;  // up to which panels are unpacked in registers
constexpr int kDirectUpperRows = kDirectRows, kDirectPairRows = kDirectRows, kHalvedRows = 0, kHalvedPairRows = 0;
constexpr int kDirectPanels = 1;  // of a pass
constexpr int direct_panels(int, bool) { return kDirectPanels; }
constexpr int most_direct_rows(int panels) { return kDirectRows / panels; }
constexpr int kPointerRows = kDirectRows;  // of x that direct() addresses one by one: all
constexpr int kDotColumns = 1;             // of dots() at once

struct Vec {
  float v[16];
};
// Sixteen pairs: of BF16 with the even k in the high half, because VDPBF16PS adds the high product first, or of FP16
// with the even k in the low half.
struct Pairs {
  uint32_t v[16];
};

template <typename F>
inline Vec each(F f) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}

inline Vec zero() { return Vec{}; }
inline Vec splat(float x) {
  return each([&](int) { return x; });
}
inline Vec load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline Vec load_some(const float* p, int count) {
  return each([&](int i) { return i < count ? p[i] : 0.0f; });
}
inline void store(float* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline void store_some(float* p, Vec a, int count) {
  for (int i = 0; i < count; ++i) p[i] = a.v[i];
}
inline Vec load_f16(const uint16_t* p) {
  return each([&](int i) { return fp16_to_fp32(p[i]); });
}
inline void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < 16; ++i) p[i] = fp32_to_fp16(a.v[i]);
}
inline Vec load_e4m3(const uint8_t* p) {
  return each([&](int i) { return e4m3_to_fp32(p[i]); });
}
inline Vec add(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec div(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c, rounded once
  return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Vec max(Vec a, Vec b) {  // b where either is NaN, as VMAXPS
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec round_even(Vec a) {
  return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline Vec and_bits(Vec a, uint32_t mask) {
  return each([&](int i) { return std::bit_cast<float>(std::bit_cast<uint32_t>(a.v[i]) & mask); });
}
inline Vec or_bits(Vec a, Vec b) {
  return each(
      [&](int i) { return std::bit_cast<float>(std::bit_cast<uint32_t>(a.v[i]) | std::bit_cast<uint32_t>(b.v[i])); });
}
// a * 2^n for integral n in -126..127.
inline Vec times_exp2(Vec a, Vec n) {
  return each([&](int i) {
    return a.v[i] * std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
  });
}
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {  // a < b ? yes : no
  return each([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
// The lanes of a from `first` to `end` - 1, others `other`.
inline Vec keep_lanes(Vec a, int first, int end, Vec other) {
  return each([&](int i) { return i >= first && i < end ? a.v[i] : other.v[i]; });
}
// Bit i: a[i] > b[i], false for NaN.
inline uint32_t greater_mask(Vec a, Vec b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(a.v[i] > b.v[i]) << i;
  return mask;
}
// Halves are added (compared) until one lane is left: the order that every path keeps.
inline float sum_lanes(Vec a) {
  for (int w = 8; w > 0; w /= 2) {
    for (int i = 0; i < w; ++i) a.v[i] = a.v[i] + a.v[i + w];
  }
  return a.v[0];
}
inline float max_lanes(Vec a) {
  for (int w = 8; w > 0; w /= 2) {
    for (int i = 0; i < w; ++i) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  }
  return a.v[0];
}
inline void prefetch(const void*) {}
inline void prefetch_far(const void*) {}
inline void prefetch_to_write(const void*) {}

// Position of row r (0..15), step k (0..3) in a group's 64 bytes (panel.h).
inline int group_position(int r, int k) { return ((k & 1) * 2 + (r >> 3)) * 16 + (k >> 1) * 8 + (r & 7); }

// Four steps of k of sixteen rows as FP32: from both bytes (Algorithm 1), from uppers (E4M3 * 2^-8), from plain FP16.
inline void unpack_both(const uint8_t* upper, const uint8_t* lower, Vec w[4]) {
  for (int k = 0; k < 4; ++k) {
    w[k] = each([&](int r) {
      const uint32_t u = upper[group_position(r, k)];
      const uint32_t l = lower[group_position(r, k)];
      const uint32_t truncated = u - (l >> 7);
      return fp16_to_fp32(static_cast<uint16_t>(((truncated & 0x80u) << 8) | ((truncated & 0x7eu) << 7) | l));
    });
  }
}
inline void unpack_upper(const uint8_t* upper, Vec w[4]) {
  for (int k = 0; k < 4; ++k) {
    w[k] = each([&](int r) {
      const uint32_t u = upper[group_position(r, k)];
      return fp16_to_fp32(static_cast<uint16_t>(((u & 0x80u) << 8) | ((u & 0x7fu) << 7)));
    });
  }
}
inline void unpack_dense(const uint8_t* words, Vec w[4]) {
  const auto* h = reinterpret_cast<const uint16_t*>(words);
  for (int k = 0; k < 4; ++k) w[k] = load_f16(h + 16 * k);
}

#define NFP_HAVE_PAIRS 1

// VDPBF16PS in scalar arithmetic (Intel SDM): inputs and results that are subnormal become zero, each product is
// added with one rounding, the high half first.
inline Pairs load_pairs(const uint32_t* p) {
  Pairs r;
  for (int i = 0; i < 16; ++i) r.v[i] = p[i];
  return r;
}
inline void store_pairs(uint32_t* p, Pairs a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline Pairs splat_pair(uint32_t x) {
  Pairs r;
  for (int i = 0; i < 16; ++i) r.v[i] = x;
  return r;
}
inline float flush_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline Vec dot_pairs(Vec acc, Pairs x, Pairs w) {
  return each([&](int i) {
    const auto half = [](uint32_t bits) { return flush_subnormal(std::bit_cast<float>(bits)); };
    float a = flush_subnormal(acc.v[i]);
    a = flush_subnormal(std::fma(half(x.v[i] & 0xffff0000u), half(w.v[i] & 0xffff0000u), a));
    return flush_subnormal(std::fma(half(x.v[i] << 16), half(w.v[i] << 16), a));
  });
}
// out[i] holds x[2i] (high) and x[2i+1] (low) rounded to BF16, for i = 0..7.
inline void store_bf16_pairs(uint32_t* out, Vec x) {
  for (int i = 0; i < 8; ++i) {
    out[i] = (static_cast<uint32_t>(fp32_to_bf16(x.v[2 * i])) << 16) | fp32_to_bf16(x.v[2 * i + 1]);
  }
}
inline void unpack_upper_pairs(const uint8_t* upper, Pairs w[2]) {
  Vec f[4];
  unpack_upper(upper, f);
  for (int p = 0; p < 2; ++p) {
    for (int i = 0; i < 16; ++i) {
      w[p].v[i] = std::bit_cast<uint32_t>(f[2 * p].v[i]) | (std::bit_cast<uint32_t>(f[2 * p + 1].v[i]) >> 16);
    }
  }
}

// VFMADDPH in scalar arithmetic: one rounding to FP16 of a product and a sum.
struct HalfSums {
  uint16_t even[16], odd[16];
};
inline HalfSums no_halves() { return HalfSums{}; }
inline uint16_t fma_fp16(uint32_t a, uint32_t b, uint16_t c) {
  const auto value = [](uint32_t h) { return double{fp16_to_fp32(static_cast<uint16_t>(h))}; };
  // The product has 22 bits and is exact. So is the sum, unless its bits span more than FP64's 53: then the product is
  // under 2^-31 of c, a quarter of c's last bit at most, and both roundings give c.
  const double exact = value(a) * value(b) + value(c);
  // To FP32 by rounding to odd, after which rounding to FP16, 13 bits shorter, is as if it were the first.
  auto narrow = static_cast<float>(exact);
  if (static_cast<double>(narrow) != exact && std::isfinite(exact)) {
    uint32_t bits = std::bit_cast<uint32_t>(narrow);
    if (std::fabs(static_cast<double>(narrow)) > std::fabs(exact)) --bits;
    narrow = std::bit_cast<float>(bits | 1u);
  }
  return fp32_to_fp16(narrow);
}
inline HalfSums fma_halves(Pairs a, Pairs b, HalfSums c) {
  for (int i = 0; i < 16; ++i) {
    c.even[i] = fma_fp16(a.v[i] & 0xffffu, b.v[i] & 0xffffu, c.even[i]);
    c.odd[i] = fma_fp16(a.v[i] >> 16, b.v[i] >> 16, c.odd[i]);
  }
  return c;
}
inline Vec widened(HalfSums a) {
  return each([&](int i) { return fp16_to_fp32(a.even[i]) + fp16_to_fp32(a.odd[i]); });
}
inline void store_fp16_pairs(uint32_t* out, Vec x) {
  for (int i = 0; i < 8; ++i) {
    out[i] = (static_cast<uint32_t>(fp32_to_fp16(x.v[2 * i + 1])) << 16) | fp32_to_fp16(x.v[2 * i]);
  }
}
inline void unpack_upper_halves(const uint8_t* upper, Pairs w[2]) {
  Vec f[4];
  unpack_upper(upper, f);
  for (int p = 0; p < 2; ++p) {
    for (int i = 0; i < 16; ++i) {
      w[p].v[i] = (static_cast<uint32_t>(fp32_to_fp16(f[2 * p + 1].v[i])) << 16) | fp32_to_fp16(f[2 * p].v[i]);
    }
  }
}

// A group of E4M3 * 2^-106 as two rows of a tile of BF16: each row's steps 0 and 1, then its steps 2 and 3.
template <typename F>
inline void each_of_tile_rows(const Vec f[4], F put) {
  for (int step = 0; step < 4; ++step) {
    for (int row = 0; row < 16; ++row) put(step / 2 * 32 + 2 * row + step % 2, f[step].v[row]);
  }
}
inline void unpack_tile_rows(const uint8_t* upper, uint16_t* words) {
  Vec f[4];
  unpack_upper(upper, f);
  each_of_tile_rows(f, [&](int at, float w) { words[at] = fp32_to_bf16(w * 0x1p-98f); });
}
// A group of FP16 * 2^-98 as two rows of a tile of its first parts and two of one of its second parts: w rounded to
// BF16, halves away from zero, and the rest.
inline void split_rows(const Vec f[4], uint16_t* first, uint16_t* second) {
  each_of_tile_rows(f, [&](int at, float w) {
    const float of_first = std::bit_cast<float>((std::bit_cast<uint32_t>(w) + 0x8000u) & 0xffff0000u);
    first[at] = fp32_to_bf16(of_first * 0x1p-98f);
    second[at] = fp32_to_bf16((w - of_first) * 0x1p-98f);
  });
}
inline void unpack_split_rows(const uint8_t* upper, const uint8_t* lower, uint16_t* first, uint16_t* second) {
  Vec f[4];
  unpack_both(upper, lower, f);
  split_rows(f, first, second);
}
inline void unpack_dense_split_rows(const uint8_t* words, uint16_t* first, uint16_t* second) {
  Vec f[4];
  unpack_dense(words, f);
  split_rows(f, first, second);
}

inline Vec round_to_bf16(Vec x) {
  return each([&](int i) { return bf16_to_fp32(fp32_to_bf16(x.v[i])); });
}
// x has numbers of BF16.
inline void store_bf16(uint16_t* out, Vec x) {
  for (int i = 0; i < 16; ++i) out[i] = fp32_to_bf16(x.v[i]);
}

// The keys of Philox2x32's rounds (philox.h).
struct RoundKeys {
  uint32_t key;
  explicit RoundKeys(uint32_t k) : key(k) {}
};
// The coarse bits of 32 tokens, 4 * four and those after it (race.h).
inline void coarse_bits_of_32(const RoundKeys& keys, uint32_t high, uint32_t four, uint16_t* out) {
  for (uint32_t i = 0; i < 8; ++i) {
    const auto words = coarse_words({keys.key, high}, four + i);
    for (uint32_t j = 0; j < 4; ++j) out[4 * i + j] = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
  }
}
// A bound below log2(v) of the numbers v in (0, 1) that begin with these bits.
inline Vec log2_below(const uint16_t* bits) {
  return each([&](int i) {
    const auto whole = static_cast<float>(bits[i]);
    return static_cast<float>(static_cast<int32_t>(std::bit_cast<uint32_t>(whole))) * 0x1p-23f - 143.0f;
  });
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
