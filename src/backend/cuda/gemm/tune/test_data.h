// Random operands on the device for tuning and benchmarks: weights like a model's (normal, sigma 0.02), never zeros,
// and enough copies that the L2 cannot hold them.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/plan/layout.h"

struct CUstream_st;

namespace nfp::cuda {

// Any of the outputs may be null. dense: FP16 [n, k]; dense_e4m3: [n, k] uppers in logical order.
void fill_weights(const PlaneShape& shape, uint64_t seed, uint8_t* upper, uint8_t* lower, uint16_t* dense,
                  uint8_t* dense_e4m3, CUstream_st* stream);
// Normal, sigma 1, as FP16; or E4M3 of 32 times that (a token's largest value is then near 128).
void fill_f16(int64_t count, uint64_t seed, uint16_t* out, CUstream_st* stream);
void fill_e4m3(int64_t count, uint64_t seed, uint8_t* out, CUstream_st* stream);
void fill_f32(int64_t count, float value, float* out, CUstream_st* stream);

// Sums for judging errors: |d - want|^2 and want^2 over D[m, n], want = scale * X W^T in float64. Operands as the fill
// functions make them: FP16 (x, dense), or E4M3 (x_e4m3 in logical or, with `permuted`, the GEMM's order; dense_e4m3).
// sums: device [2], added to.
void compare_f16(int64_t m, const PlaneShape& shape, const uint16_t* x, const uint16_t* dense, const uint16_t* d,
                 double* sums, CUstream_st* stream);
void compare_e4m3(int64_t m, const PlaneShape& shape, const uint8_t* x, bool permuted, const uint8_t* dense,
                  double scale, const uint16_t* d, double* sums, CUstream_st* stream);

}  // namespace nfp::cuda
