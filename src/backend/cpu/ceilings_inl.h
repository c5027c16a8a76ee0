// Loops that do nothing but what a ceiling counts: multiply-adds on registers, reads of memory. Included after one
// simd_*.h.
#pragma once

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/linear_inl.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

constexpr int kChains = 12;  // enough to hide the latency of two units, few enough for 16 registers of two halves

#if defined(__GNUC__)
// Keeps the compiler from seeing through a value.
template <typename T>
inline void opaque(T& value) {
  asm volatile("" : "+m"(value));
}
#endif

// Returns floating-point operations done.
double fma_loop(int64_t iterations) {
  Vec acc[kChains];
  float start = 1.0f, scale = 0.999f;
  opaque(start);
  opaque(scale);
  const Vec x = splat(start), y = splat(scale);
  for (Vec& a : acc) a = x;
  for (int64_t i = 0; i < iterations; ++i) {
    NFP_UNROLL for (int c = 0; c < kChains; ++c) acc[c] = fma(acc[c], y, x);
  }
  for (Vec& a : acc) opaque(a);
  return 2.0 * 16 * kChains * static_cast<double>(iterations);
}

#if defined(NFP_HAVE_PAIRS)
template <cpu::PairArithmetic A>
double dot_loop(int64_t iterations) {
  using Steps = StepsOf<A>;
  typename Steps::Sum acc[kChains];
  uint32_t pair = 0x3c003c00;  // small enough for either format
  opaque(pair);
  const Pairs x = splat_pair(pair);
  for (auto& a : acc) a = Steps::none();
  for (int64_t i = 0; i < iterations; ++i) {
    NFP_UNROLL for (int c = 0; c < kChains; ++c) acc[c] = Steps::mac(acc[c], x, x);
  }
  for (auto& a : acc) opaque(a);
  return 4.0 * 16 * kChains * static_cast<double>(iterations);
}
#endif

#if defined(NFP_HAVE_TILES)
double tile_loop(int64_t iterations) {
  begin_tiles(static_cast<int>(kTileHeight), weight_tile(0));
  each_tile<2>([](auto i) {
    zero_tile<x_tile(i)>();
    zero_tile<weight_tile(i)>();
    each_tile<2>([&](auto j) { zero_tile<sum_tile(i, j)>(); });
  });
  for (int64_t i = 0; i < iterations; ++i) {
    each_tile<2>(
        [](auto r) { each_tile<2>([&](auto p) { multiply_tiles<sum_tile(r, p), x_tile(r), weight_tile(p)>(); }); });
  }
  end_tiles();
  return 4 * 2.0 * 16 * 16 * cpu::kTileSteps * static_cast<double>(iterations);
}
#endif

// Reads all of it.
void read_loop(const void* data, size_t bytes) {
  const auto* p = static_cast<const float*>(data);
  const size_t floats = bytes / sizeof(float);
  Vec a = zero(), b = a, c = a, d = a;
  for (size_t i = 0; i + 64 <= floats; i += 64) {
    a = or_bits(a, load(p + i));
    b = or_bits(b, load(p + i + 16));
    c = or_bits(c, load(p + i + 32));
    d = or_bits(d, load(p + i + 48));
  }
  a = or_bits(or_bits(a, b), or_bits(c, d));
  opaque(a);
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
