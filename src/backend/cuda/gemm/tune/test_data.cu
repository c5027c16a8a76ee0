#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backend/cuda/gemm/tune/test_data.h"

namespace nfp::cuda {
namespace {

__device__ uint32_t mix(uint64_t x) {  // splitmix64's finaliser
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return static_cast<uint32_t>((x ^ (x >> 31)) >> 32);
}
__device__ float normal(uint64_t seed, uint64_t index) {
  const uint64_t at = (seed * 0x9e3779b97f4a7c15ull) ^ (index * 2 + 1) * 0xd1342543de82ef95ull;
  const float u = (static_cast<float>(mix(at)) + 1.0f) * 0x1p-32f;
  const float v = static_cast<float>(mix(at + 0x632be59bd9b4e019ull)) * 0x1p-32f;
  return sqrtf(-2.0f * __logf(u)) * __cosf(6.2831853f * v);
}
__device__ uint8_t to_e4m3(float v) {
  return static_cast<uint8_t>(__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3));
}

__global__ void weights_kernel(int64_t n, int64_t k, int64_t k_groups, uint64_t seed, uint8_t* upper, uint8_t* lower,
                               uint16_t* dense, uint8_t* dense_e4m3) {
  const int64_t count = n * k;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / k, col = i % k;
    const uint16_t bits = __half_as_ushort(__float2half_rn(fminf(fmaxf(normal(seed, i) * 0.02f, -1.75f), 1.75f)));
    const uint8_t top = to_e4m3(__half2float(__ushort_as_half(bits)) * 256.0f);
    const int byte = permuted_byte(static_cast<int>(col % kBlockK));
    const int chunk = (byte / 16) ^ static_cast<int>(row / 2 % 4);
    const int64_t at = (row / kBlockRows * k_groups + col / kBlockK) * kBlockBytes + row % kBlockRows * kBlockK +
                       chunk * 16 + byte % 16;
    if (upper != nullptr) upper[at] = top;
    if (lower != nullptr) lower[at] = static_cast<uint8_t>(bits + kLowerBias);
    if (dense != nullptr) dense[i] = bits;
    if (dense_e4m3 != nullptr) dense_e4m3[i] = top;
  }
}
__global__ void f16_kernel(int64_t count, uint64_t seed, uint16_t* out) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = __half_as_ushort(__float2half_rn(normal(seed, i)));
  }
}
__global__ void e4m3_kernel(int64_t count, uint64_t seed, uint8_t* out) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = to_e4m3(normal(seed, i) * 32.0f);
  }
}
__global__ void f32_kernel(int64_t count, float value, float* out) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x)
    out[i] = value;
}

__device__ double value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ double value(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// A warp an output.
template <typename T>
__global__ void compare_kernel(int64_t m, int64_t n, int64_t k, const T* x, bool permuted, const T* dense, double scale,
                               const uint16_t* d, double* sums) {
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  double error = 0, total = 0;
  for (int64_t i = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / 32; i < m * n; i += warps) {
    const int64_t token = i / n, row = i % n;
    double sum = 0;
    for (int64_t c = lane; c < k; c += 32)
      sum += value(x[token * k + (permuted ? activation_byte(c) : c)]) * value(dense[row * k + c]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const double want = sum * scale, difference = value(d[i]) - want;
    error += difference * difference;
    total += want * want;
  }
  if (lane == 0) {
    atomicAdd(sums, error);
    atomicAdd(sums + 1, total);
  }
}

constexpr int kGrid = 132 * 8;

}  // namespace

void fill_weights(const PlaneShape& shape, uint64_t seed, uint8_t* upper, uint8_t* lower, uint16_t* dense,
                  uint8_t* dense_e4m3, CUstream_st* stream) {
  weights_kernel<<<kGrid, 256, 0, stream>>>(shape.n, shape.k, shape.k_groups(), seed, upper, lower, dense, dense_e4m3);
}
void fill_f16(int64_t count, uint64_t seed, uint16_t* out, CUstream_st* stream) {
  f16_kernel<<<kGrid, 256, 0, stream>>>(count, seed, out);
}
void fill_e4m3(int64_t count, uint64_t seed, uint8_t* out, CUstream_st* stream) {
  e4m3_kernel<<<kGrid, 256, 0, stream>>>(count, seed, out);
}
void fill_f32(int64_t count, float value, float* out, CUstream_st* stream) {
  f32_kernel<<<kGrid, 256, 0, stream>>>(count, value, out);
}

void compare_f16(int64_t m, const PlaneShape& shape, const uint16_t* x, const uint16_t* dense, const uint16_t* d,
                 double* sums, CUstream_st* stream) {
  compare_kernel<<<kGrid, 256, 0, stream>>>(m, shape.n, shape.k, x, false, dense, 1.0, d, sums);
}
void compare_e4m3(int64_t m, const PlaneShape& shape, const uint8_t* x, bool permuted, const uint8_t* dense,
                  double scale, const uint16_t* d, double* sums, CUstream_st* stream) {
  compare_kernel<<<kGrid, 256, 0, stream>>>(m, shape.n, shape.k, x, permuted, dense, scale, d, sums);
}

}  // namespace nfp::cuda
