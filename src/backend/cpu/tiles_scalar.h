// What tiles_amx.h does, in scalar arithmetic (Intel SDM volume 2, TDPBF16PS). Included by one
// translation unit only, after simd_scalar.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/float_types.h"

// NOLINTBEGIN(misc-definitions-in-headers): unnamed namespaces give each source file its own definitions
namespace nfp {
namespace {

union TileData {
  float sums[16][16];
  uint16_t bf16[16][32];
};
thread_local struct {
  int rows[8];
  TileData data[8];
} emulated_tiles;

inline void begin_tiles(int rows, int first_weights) {
  std::memset(&emulated_tiles.data, 0, sizeof emulated_tiles.data);
  for (int i = 0; i < 8; ++i) emulated_tiles.rows[i] = i < first_weights ? rows : 16;
}
inline void end_tiles() {}

template <int T>
inline void zero_tile() {
  std::memset(&emulated_tiles.data[T], 0, sizeof emulated_tiles.data[T]);
}
template <int T>
inline void load_tile(const void* p, int64_t stride) {
  for (int r = 0; r < emulated_tiles.rows[T]; ++r) {
    std::memcpy(emulated_tiles.data[T].bf16[r], static_cast<const char*>(p) + r * stride, 64);
  }
}
template <int T>
inline void store_tile(void* p, int64_t stride) {
  for (int r = 0; r < emulated_tiles.rows[T]; ++r) {
    std::memcpy(static_cast<char*>(p) + r * stride, emulated_tiles.data[T].sums[r], 64);
  }
}
template <int Sums, int X, int Weights>
inline void multiply_tiles() {
  for (int m = 0; m < emulated_tiles.rows[Sums]; ++m) {
    for (int n = 0; n < 16; ++n) {
      float halves[2] = {};
      for (int k = 0; k < 32; ++k) {
        const float x = flush_subnormal(bf16_to_fp32(emulated_tiles.data[X].bf16[m][k]));
        const float w = flush_subnormal(bf16_to_fp32(emulated_tiles.data[Weights].bf16[k / 2][2 * n + k % 2]));
        halves[k % 2] = flush_subnormal(std::fma(x, w, halves[k % 2]));
      }
      float& sum = emulated_tiles.data[Sums].sums[m][n];
      sum = flush_subnormal(flush_subnormal(sum) + flush_subnormal(halves[0] + halves[1]));
    }
  }
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers)
