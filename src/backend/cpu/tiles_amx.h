// Eight tiles of AMX, each 16 rows of 64 bytes, and BF16 products (TDPBF16PS). In assembly, where a tile's number may
// be a template's. Included by one translation unit only.
#pragma once

#include <immintrin.h>

#include <cstdint>

// NOLINTBEGIN(misc-definitions-in-headers): unnamed namespaces give each source file its own definitions
namespace nfp {
namespace {

struct alignas(64) TileConfig {  // what LDTILECFG reads
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles of sums and of x have `rows` rows, those of weights (from `first_weights` on) 16.
inline void begin_tiles(int rows, int first_weights) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < first_weights ? rows : 16);
  }
  asm volatile("ldtilecfg %0" : : "m"(config));
}
inline void end_tiles() { asm volatile("tilerelease"); }

template <int T>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
// sums[m][n] += x[m] . weights[n] over 32 steps.
template <int Sums, int X, int Weights>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(X), "i"(Weights));
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers)
