#include "backend/cuda/nest/nest.h"

#include <cuda_runtime_api.h>

#include "backend/cuda/launch.h"
#include "backend/cuda/nest/nest_kernels.h"

namespace nfp::cuda {
namespace {

bool aligned16(const void* p) { return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status check(const PlaneShape& shape, int64_t ld, std::string_view ld_name) {
  constexpr int64_t kMax = int64_t{1} << 30;
  if (shape.n <= 0 || shape.n > kMax || shape.k <= 0 || shape.k > kMax) {
    return error(ErrorCode::kUsage, "nest: n and k must be 1 to 2^30");
  }
  if (ld < shape.k) return error(ErrorCode::kUsage, "nest: {} is smaller than a row", ld_name);
  return ok_status();
}

template <typename Params>
Status launch_chunks(const void* kernel, int threads, Params params, const PlaneShape& shape, CUstream_st* stream) {
  ChunkGrid chunks{shape.n, shape.k, shape.k_groups(), static_cast<int64_t>(shape.bytes() / 16)};
  LaunchShape launch_shape;
  launch_shape.grid = static_cast<int>((chunks.chunks + threads - 1) / threads);
  launch_shape.block = threads;
  void* arguments[] = {&params, &chunks};
  return launch("nest", kernel, launch_shape, arguments, stream);
}

}  // namespace

Status nest_matrix(const NestCall& call, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check(call.shape, call.ldw, "ldw"));
  if (call.weights == nullptr || call.row_scale == nullptr || call.report == nullptr) {
    return error(ErrorCode::kUsage, "nest: weights, row_scale and report must not be null");
  }
  if (!aligned16(call.upper) || !aligned16(call.lower)) {
    return error(ErrorCode::kUsage, "nest: upper and lower must be 16-byte aligned device pointers");
  }
  const NestKernels kernels = nest_kernels();
  NestReport* report = call.report;
  auto n = static_cast<int32_t>(call.shape.n);
  void* clear[] = {&report, &n};
  NFP_RETURN_IF_ERROR(launch("nest", kernels.clear_report, {}, clear, stream));
  NestKernelParams params{};
  params.weights = call.weights;
  params.upper = call.upper;
  params.lower = call.lower;
  params.row_scale = call.row_scale;
  params.report = call.report;
  params.ldw = call.ldw;
  params.n = call.shape.n;
  params.k = call.shape.k;
  params.min_exponent = kMinRowExponent;
  params.max_exponent = kMaxRowExponent;
  params.bf16 = call.type == WeightType::kBF16;
  params.free_join = call.join == Join::kFree;
  LaunchShape rows;
  rows.grid = n;
  rows.block = kernels.threads;
  void* arguments[] = {&params};
  NFP_RETURN_IF_ERROR(launch("nest", kernels.find_exponents, rows, arguments, stream));
  return launch_chunks(kernels.nest_chunks, kernels.threads, params, call.shape, stream);
}

Status pack_plane(const PlaneShape& shape, Plane plane, Join join, const uint8_t* bytes, int64_t ld, uint8_t* out,
                  CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check(shape, ld, "ld"));
  if (bytes == nullptr || !aligned16(out)) {
    return error(ErrorCode::kUsage, "pack: bytes must not be null, and packed be a 16-byte aligned device pointer");
  }
  const NestKernels kernels = nest_kernels();
  const uint8_t bias = plane == Plane::kLower && join == Join::kBiased ? kLowerBias : 0;
  return launch_chunks(kernels.pack_chunks, kernels.threads, PackKernelParams{bytes, out, ld, bias}, shape, stream);
}

Status unnest_matrix(const PlaneShape& shape, Join join, const uint8_t* upper, const uint8_t* lower,
                     const float* row_scale, WeightType type, uint16_t* weights, int64_t ldw, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check(shape, ldw, "ldw"));
  if (!aligned16(upper) || !aligned16(lower) || weights == nullptr) {
    return error(ErrorCode::kUsage, "unnest: upper and lower must be 16-byte aligned, and weights not be null");
  }
  const NestKernels kernels = nest_kernels();
  return launch_chunks(
      kernels.unnest_chunks, kernels.threads,
      UnnestKernelParams{upper, lower, row_scale, weights, ldw, type == WeightType::kBF16, join == Join::kFree}, shape,
      stream);
}

}  // namespace nfp::cuda
