#include "backend/cuda/gemm/plan/pack.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "base/clones.h"

namespace nfp::cuda {
namespace {

using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));

// 16 bytes past the caches (aligned), which have no use for bytes that the copy engine reads next, or through them.
template <bool kStream>
[[gnu::always_inline]] inline void store16(uint8_t* out, const Words& value) {
#if defined(__x86_64__)
  if constexpr (kStream) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out), reinterpret_cast<const __m128i&>(value));
    return;
  }
#endif
  std::memcpy(out, &value, sizeof(value));
}

// 64 bytes of a row into its place in a block. Byte pairs 2c and 2c + 8 of k16 step j become word j of chunk c: a
// shuffle inside each step, and then a transpose of 4 x 4 words.
template <bool kStream>
[[gnu::always_inline]] inline void pack_group(const uint8_t* in, int row, const Bytes& bias, uint8_t* out) {
  Words step[4];
  for (int j = 0; j < 4; ++j) {
    Bytes v;
    std::memcpy(&v, in + int64_t{16} * j, sizeof(v));
    v += bias;
    v = __builtin_shufflevector(v, v, 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    std::memcpy(&step[j], &v, sizeof(v));
  }
  const Words low01 = __builtin_shufflevector(step[0], step[1], 0, 4, 1, 5);
  const Words low23 = __builtin_shufflevector(step[2], step[3], 0, 4, 1, 5);
  const Words high01 = __builtin_shufflevector(step[0], step[1], 2, 6, 3, 7);
  const Words high23 = __builtin_shufflevector(step[2], step[3], 2, 6, 3, 7);
  const int swizzle = row / 2 % 4;
  store16<kStream>(out + int64_t{16} * (0 ^ swizzle), __builtin_shufflevector(low01, low23, 0, 1, 4, 5));
  store16<kStream>(out + int64_t{16} * (1 ^ swizzle), __builtin_shufflevector(low01, low23, 2, 3, 6, 7));
  store16<kStream>(out + int64_t{16} * (2 ^ swizzle), __builtin_shufflevector(high01, high23, 0, 1, 4, 5));
  store16<kStream>(out + int64_t{16} * (3 ^ swizzle), __builtin_shufflevector(high01, high23, 2, 3, 6, 7));
}

// All whole groups of the rows. Eight rows at a time: they write 512 neighbouring bytes and read eight streams.
template <bool kStream>
[[gnu::always_inline]] inline void pack_groups(const uint8_t* rows, int64_t k, int first_row, int row_count,
                                               uint8_t bias, uint8_t* slab) {
  const Bytes bias16 = Bytes{} + bias;
  for (int first = 0; first < row_count; first += 8) {
    const int last = std::min(first + 8, row_count);
    for (int64_t group = 0; group < k / kBlockK; ++group) {
      for (int r = first; r < last; ++r) {
        const int row = first_row + r;
        pack_group<kStream>(rows + r * k + group * kBlockK, row, bias16,
                            slab + group * kBlockBytes + int64_t{row} * kBlockK);
      }
    }
  }
}
NFP_CLONES void pack_groups_streaming(const uint8_t* rows, int64_t k, int first_row, int row_count, uint8_t bias,
                                      uint8_t* slab) {
  pack_groups<true>(rows, k, first_row, row_count, bias, slab);
}
NFP_CLONES void pack_groups_cached(const uint8_t* rows, int64_t k, int first_row, int row_count, uint8_t bias,
                                   uint8_t* slab) {
  pack_groups<false>(rows, k, first_row, row_count, bias, slab);
}

uint8_t bias_of(Plane plane, Join join) { return plane == Plane::kLower && join == Join::kBiased ? kLowerBias : 0; }

// Zero weights (upper 0, lower 0) in the groups from `group` on.
void fill_groups(const PlaneShape& shape, int64_t group, int first_row, int row_count, uint8_t bias, uint8_t* slab) {
  for (; group < shape.k_groups(); ++group) {
    std::fill_n(slab + group * kBlockBytes + int64_t{first_row} * kBlockK, row_count * kBlockK, bias);
  }
}

}  // namespace

void pack_rows(const PlaneShape& shape, Plane plane, Join join, std::span<const uint8_t> rows, int first_row,
               int row_count, uint8_t* slab) {
  const uint8_t bias = bias_of(plane, join);
  const int64_t whole = shape.k / kBlockK;
  fill_groups(shape, whole, first_row, row_count, bias, slab);
  const bool aligned = reinterpret_cast<uintptr_t>(slab) % 16 == 0;
  (aligned ? pack_groups_streaming : pack_groups_cached)(rows.data(), shape.k, first_row, row_count, bias, slab);
  for (int r = 0; r < row_count; ++r) {
    for (int64_t k = whole * kBlockK; k < shape.k; ++k) {
      slab[plane_offset(shape, first_row + r, k)] =
          static_cast<uint8_t>(rows[static_cast<size_t>(r * shape.k + k)] + bias);
    }
  }
#if defined(__x86_64__)
  _mm_sfence();  // the bytes that went past the caches are there before anything that says so
#endif
}

void pack_zero_rows(const PlaneShape& shape, Plane plane, Join join, int first_row, int row_count, uint8_t* slab) {
  fill_groups(shape, 0, first_row, row_count, bias_of(plane, join), slab);
}

}  // namespace nfp::cuda
