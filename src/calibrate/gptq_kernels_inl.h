// The loops of gptq_kernels.h over vectors of NFP_VECTOR_BYTES, written once in the compiler's vector types. Included
// by one file an instruction set; all that it defines is in an anonymous namespace.
#include <cstdint>
#include <cstring>

#include "calibrate/gptq_kernels.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp::calibrate {
namespace {

using F32 = float __attribute__((vector_size(NFP_VECTOR_BYTES)));
using F64 = double __attribute__((vector_size(NFP_VECTOR_BYTES)));
using I32 = int32_t __attribute__((vector_size(NFP_VECTOR_BYTES)));

template <typename V, typename T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V, typename T>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

template <typename V, typename T>
inline void add_product(const T* a, const T* b, int64_t depth, T* c, int64_t stride) {
  constexpr int kWidth = sizeof(V) / sizeof(T);
  constexpr int kRows = 4;
  for (int i = 0; i < kPanel; i += kRows) {
    for (int j = 0; j < kPanel; j += 2 * kWidth) {
      V sum[kRows][2] = {};
      for (int64_t t = 0; t < depth; ++t) {
        const V b0 = load<V>(b + t * kPanel + j);
        const V b1 = load<V>(b + t * kPanel + j + kWidth);
        for (int r = 0; r < kRows; ++r) {
          const T x = a[t * kPanel + i + r];
          sum[r][0] += x * b0;
          sum[r][1] += x * b1;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        T* row = c + (i + r) * stride + j;
        store(row, load<V>(row) + sum[r][0]);
        store(row + kWidth, load<V>(row + kWidth) + sum[r][1]);
      }
    }
  }
}

void solve_lower(const double* l, int64_t stride, int64_t size, double* x) {
  constexpr int kWidth = sizeof(F64) / sizeof(double);
  for (int j = 0; j < kPanel; j += kWidth) {
    for (int64_t t = 0; t < size; ++t) {
      F64 sum = load<F64>(x + t * kPanel + j);
      for (int64_t s = 0; s < t; ++s) sum -= l[t * stride + s] * load<F64>(x + s * kPanel + j);
      store(x + t * kPanel + j, sum / l[t * stride + t]);
    }
  }
}

void sweep(const SweepTile& tile) {
  constexpr int kWidth = sizeof(F32) / sizeof(float);
  constexpr int kLanes = 2 * kWidth;
  static_assert(kLanes <= kMaxLanes);
  for (int64_t block = 0; block < tile.cols; block += kSweepBlock) {
    const float* factor = tile.factor + block * tile.cols;  // [cols][kSweepBlock]
    F32 carried[kSweepBlock][2] = {};
    for (int64_t i = 0; i < block; ++i) {
      const F32 e0 = load<F32>(tile.error + i * kLanes);
      const F32 e1 = load<F32>(tile.error + i * kLanes + kWidth);
      for (int t = 0; t < kSweepBlock; ++t) {
        const float x = factor[i * kSweepBlock + t];
        carried[t][0] += x * e0;
        carried[t][1] += x * e1;
      }
    }
    for (int t = 0; t < kSweepBlock; ++t) {
      const int64_t at = (block + t) * kLanes;
      for (int half = 0; half < 2; ++half) {
        const int64_t place = at + half * kWidth;
        const F32 weight = load<F32>(tile.weight + place);
        const F32 nearest = load<F32>(tile.nearest + place);
        const F32 step = load<F32>(tile.step + place);
        const F32 beyond = weight + carried[t][half] - nearest - 0.5f * step;
        const I32 other = (beyond * step > 0.0f) & reinterpret_cast<I32>(step);
        const F32 error = weight - (nearest + reinterpret_cast<F32>(other));
        store(tile.error + place, error);
        for (int u = t + 1; u < kSweepBlock; ++u) {
          carried[u][half] += factor[(block + t) * kSweepBlock + u] * error;
        }
      }
    }
  }
}

void solve(const SolveTile& tile) {
  constexpr int kWidth = sizeof(F32) / sizeof(float);
  constexpr int kLanes = 2 * kWidth;
  // U v = b, the last columns first: what is known of v leaves the right side of all columns before.
  for (int64_t block = tile.cols - kSweepBlock; block >= 0; block -= kSweepBlock) {
    const float* factor = tile.factor + block * tile.cols;  // [cols][kSweepBlock]
    F32 known[kSweepBlock][2];
    for (int t = kSweepBlock - 1; t >= 0; --t) {
      for (int half = 0; half < 2; ++half) {
        F32 v = load<F32>(tile.values + (block + t) * kLanes + half * kWidth);
        for (int u = t + 1; u < kSweepBlock; ++u) v -= factor[(block + t) * kSweepBlock + u] * known[u][half];
        known[t][half] = v;
        store(tile.values + (block + t) * kLanes + half * kWidth, v);
      }
    }
    for (int64_t i = 0; i < block; ++i) {
      for (int half = 0; half < 2; ++half) {
        float* place = tile.values + i * kLanes + half * kWidth;
        F32 v = load<F32>(place);
        for (int t = 0; t < kSweepBlock; ++t) v -= factor[i * kSweepBlock + t] * known[t][half];
        store(place, v);
      }
    }
  }
  // U^T y = P^-1 v, in the order of the sweep.
  for (int64_t block = 0; block < tile.cols; block += kSweepBlock) {
    const float* factor = tile.factor + block * tile.cols;
    F32 sum[kSweepBlock][2] = {};
    for (int64_t i = 0; i < block; ++i) {
      const F32 y0 = load<F32>(tile.values + i * kLanes);
      const F32 y1 = load<F32>(tile.values + i * kLanes + kWidth);
      for (int t = 0; t < kSweepBlock; ++t) {
        const float x = factor[i * kSweepBlock + t];
        sum[t][0] += x * y0;
        sum[t][1] += x * y1;
      }
    }
    for (int t = 0; t < kSweepBlock; ++t) {
      const float inverse = tile.inverse_squares[block + t];
      for (int half = 0; half < 2; ++half) {
        float* place = tile.values + (block + t) * kLanes + half * kWidth;
        const F32 y = load<F32>(place) * inverse - sum[t][half];
        store(place, y);
        for (int u = t + 1; u < kSweepBlock; ++u) sum[u][half] += factor[(block + t) * kSweepBlock + u] * y;
      }
    }
  }
}

int64_t descend(const DescentRow& row) {
  constexpr int64_t kWidth = sizeof(F32) / sizeof(float);
  int64_t taken = 0;
  for (int64_t j = 0; j < row.cols; ++j) {
    const float flip = row.flip[j];
    const float* h = row.hessian + j * row.stride;
    if (!(flip * (2.0f * row.gradient[j] + flip * h[j]) < 0.0f)) continue;
    ++taken;
    row.error[j] += flip;
    row.flip[j] = -flip;
    for (int64_t i = 0; i < row.stride; i += kWidth) {
      store(row.gradient + i, load<F32>(row.gradient + i) + flip * load<F32>(h + i));
    }
  }
  return taken;
}

void add_product_f32(const float* a, const float* b, int64_t depth, float* c, int64_t stride) {
  add_product<F32>(a, b, depth, c, stride);
}

void add_product_f64(const double* a, const double* b, int64_t depth, double* c, int64_t stride) {
  add_product<F64>(a, b, depth, c, stride);
}

constexpr Kernels kTable = {
    NFP_KERNELS_NAME, 2 * NFP_VECTOR_BYTES / 4, add_product_f32, add_product_f64, solve_lower, sweep, solve, descend};

}  // namespace
}  // namespace nfp::calibrate
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
