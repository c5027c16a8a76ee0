#include "backend/cuda/gemm/tune/tune.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/tune/test_data.h"
#include "backend/cuda/gemm/tune/timing.h"

namespace nfp::cuda {
namespace {

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
using DeviceMemory = std::unique_ptr<void, DeviceFree>;

Result<DeviceMemory> allocate(size_t bytes) {
  void* data = nullptr;
  cudaError_t status = cudaMalloc(&data, bytes);
  DeviceMemory memory(data);
  if (status == cudaSuccess) status = cudaMemset(data, 0, bytes);
  if (status != cudaSuccess)
    return error(ErrorCode::kResource, "tune: {} MB of device memory: {}", bytes >> 20, cudaGetErrorString(status));
  return memory;
}

constexpr size_t kRotation = size_t{400} << 20;

}  // namespace

Result<TuningTable> tune(const Gemm& gemm, std::span<const GemmShape> shapes, const TuneOptions& options) {
  TuningTable table;
  int id = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&id) == cudaSuccess && cudaGetDeviceProperties(&properties, id) == cudaSuccess) {
    table.device = properties.name;
    if (const TuningTable* known = built_in_table(properties.name, properties.multiProcessorCount); known != nullptr)
      table.copy_models(*known);
  }
  NFP_ASSIGN_OR_RETURN(const DeviceMemory workspace, allocate(Workspace::kBytes));
  const int most = options.tokens.empty() ? 1 : *std::max_element(options.tokens.begin(), options.tokens.end());
  for (const GemmShape& shape : shapes) {
    const PlaneShape planes{shape.n, shape.k};
    // The copy engine wants rows of x and d at multiples of 16 bytes.
    const int64_t ldx = planes.padded_k(), ldd = (shape.n + 7) / 8 * 8;
    NFP_ASSIGN_OR_RETURN(const DeviceMemory x, allocate(static_cast<size_t>(most * ldx) * 2));
    NFP_ASSIGN_OR_RETURN(const DeviceMemory x_e4m3, allocate(static_cast<size_t>(most * ldx)));
    NFP_ASSIGN_OR_RETURN(const DeviceMemory d, allocate(static_cast<size_t>(most * ldd) * 2));
    NFP_ASSIGN_OR_RETURN(const DeviceMemory scales, allocate(static_cast<size_t>(most) * sizeof(float)));
    // The norm adds zeros to a residual stream, which therefore stays as it is however often it runs.
    NFP_ASSIGN_OR_RETURN(const DeviceMemory zeros, allocate(static_cast<size_t>(kChainTokens * ldx) * 2));
    NFP_ASSIGN_OR_RETURN(const DeviceMemory residual, allocate(static_cast<size_t>(kChainTokens * ldx) * 2));
    fill_f16(kChainTokens * ldx, 3, static_cast<uint16_t*>(residual.get()), nullptr);
    fill_f16(most * ldx, 1, static_cast<uint16_t*>(x.get()), nullptr);
    fill_e4m3(most * ldx, 2, static_cast<uint8_t*>(x_e4m3.get()), nullptr);
    fill_f32(most, 0.01f, static_cast<float*>(scales.get()), nullptr);
    std::vector<std::pair<DeviceMemory, DeviceMemory>> copies;
    const size_t count = std::max<size_t>(2, kRotation / planes.bytes() + 1);
    for (size_t i = 0; i < count; ++i) {
      NFP_ASSIGN_OR_RETURN(DeviceMemory upper, allocate(planes.bytes()));
      NFP_ASSIGN_OR_RETURN(DeviceMemory lower, allocate(planes.bytes()));
      fill_weights(planes, i + 10, static_cast<uint8_t*>(upper.get()), static_cast<uint8_t*>(lower.get()), nullptr,
                   nullptr, nullptr);
      copies.emplace_back(std::move(upper), std::move(lower));
    }
    if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) {
      return error(ErrorCode::kResource, "tune: filling operands: {}", cudaGetErrorString(status));
    }
    for (const Mode mode : options.modes) {
      for (const int m : options.tokens) {
        const Problem problem{m, shape.n, shape.k, mode, false};
        Config best;
        double best_us = 1e30;
        int tried = 0;
        for (const Config& config : candidates(problem, gemm.device())) {
          if (tried++ >= options.most_candidates) break;
          const auto launch = [&](int i, CUstream_st* stream) -> Status {
            const auto& copy = copies[static_cast<size_t>(i) % copies.size()];
            if (is_fp8(mode) && m <= kChainTokens && shape.k <= kMaxColumns) {
              GemmInputCall rows;
              rows.source = GemmInputCall::Source::kNorm;
              rows.m = m;
              rows.k = shape.k;
              rows.x = zeros.get();
              rows.ldx = ldx;
              rows.weight = x.get();
              rows.residual = residual.get();
              rows.ldr = ldx;
              rows.y_e4m3 = static_cast<uint8_t*>(x_e4m3.get());
              rows.ldy_e4m3 = ldx;
              rows.scales = static_cast<float*>(scales.get());
              NFP_RETURN_IF_ERROR(prepare_gemm_input(rows, stream));
            }
            GemmCall call;
            call.w = {static_cast<const uint8_t*>(copy.first.get()),
                      static_cast<const uint8_t*>(copy.second.get()),
                      nullptr,
                      shape.n,
                      shape.k,
                      Join::kBiased};
            call.mode = mode;
            call.m = m;
            call.x = is_fp8(mode) ? x_e4m3.get() : x.get();
            call.ldx = ldx;
            call.token_scale = is_fp8(mode) ? static_cast<const float*>(scales.get()) : nullptr;
            call.d = d.get();
            call.ldd = ldd;
            call.workspace = {workspace.get(), Workspace::kBytes};
            return gemm.run(call, config, stream);
          };
          const int launches = static_cast<int>(std::min<size_t>(copies.size(), 24));
          NFP_ASSIGN_OR_RETURN(GraphTimer timer, GraphTimer::create(launches, launch));
          NFP_ASSIGN_OR_RETURN(const double us, timer.median(2, 5));
          if (us < best_us) {
            best_us = us;
            best = config;
          }
        }
        table.set(shape.n, shape.k, mode, m, best);
        if (options.progress) {
          options.progress(fmt::format("n {}, k {}, m {}, {}: {}, {:.1f} us", shape.n, shape.k, m, name_of(mode),
                                       to_string(best), best_us));
        }
      }
    }
  }
  return table;
}

}  // namespace nfp::cuda
