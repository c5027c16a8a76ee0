// Nesting and packing on the device, for weights that are there already: the device's counterpart of
// nested/matrix_analysis.h (row exponents), nested/format.h (split) and gemm/plan/pack.h (layout), with the same
// results.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/nest/nest_report.h"
#include "base/result.h"
#include "nested/matrix_analysis.h"

struct CUstream_st;

namespace nfp::cuda {

// All pointers are device memory. Planes are PlaneShape{n, k}.bytes(), 16-byte aligned. Each enqueues kernels only.
struct NestCall {
  PlaneShape shape;
  const uint16_t* weights = nullptr;  // bits of `type`
  int64_t ldw = 0;
  WeightType type = WeightType::kF16;
  Join join = Join::kBiased;
  uint8_t* upper = nullptr;
  uint8_t* lower = nullptr;
  float* row_scale = nullptr;  // [n], 2^e
  NestReport* report = nullptr;
};
Status nest_matrix(const NestCall& call, CUstream_st* stream);

// bytes[n, k], ld bytes from row to row -> a plane.
Status pack_plane(const PlaneShape& shape, Plane plane, Join join, const uint8_t* bytes, int64_t ld, uint8_t* out,
                  CUstream_st* stream);

// Both planes -> weights[n, k] of `type`. row_scale may be null (all 1).
Status unnest_matrix(const PlaneShape& shape, Join join, const uint8_t* upper, const uint8_t* lower,
                     const float* row_scale, WeightType type, uint16_t* weights, int64_t ldw, CUstream_st* stream);

}  // namespace nfp::cuda
