// Host time of one product through the C interface, shape seen before: what a step without a CUDA graph waits for.
#include <algorithm>
#include <chrono>
#include <utility>

#include "device_memory.h"
#include "nestedfp.h"

using nfp::bench::DeviceMemory;

namespace {

void must(nfp_status code) {
  if (code != NFP_OK) nfp::bench::fail(nfp_last_error());
}

// Median of single calls. The stream is emptied every 64, so that a call never waits for a place in it.
template <typename F>
double host_us(F&& call) {
  constexpr int kCalls = 4000, kQueue = 64;
  std::vector<double> times;
  for (int i = 0; i < kCalls; ++i) {
    if (i % kQueue == 0) cudaDeviceSynchronize();
    const auto begin = std::chrono::steady_clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  cudaDeviceSynchronize();
  std::nth_element(times.begin(), times.begin() + kCalls / 2, times.end());
  return times[kCalls / 2];
}

}  // namespace

int main() {
  nfp_gpu* gpu = nullptr;
  must(nfp_gpu_create(&gpu));
  cudaStream_t made = nullptr;
  if (cudaStreamCreate(&made) != cudaSuccess) nfp::bench::fail("no stream");
  auto* const stream = reinterpret_cast<nfp_stream>(made);
  DeviceMemory workspace(nfp_gpu_workspace_bytes());
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}) {
    const DeviceMemory upper(nfp_plane_bytes(n, k)), lower(nfp_plane_bytes(n, k));
    const nfp_weight weight{sizeof(nfp_weight), upper.as<uint8_t>(), lower.as<uint8_t>(), nullptr, n, k,
                            NFP_JOIN_BIASED};
    nfp_linear* linear = nullptr;
    must(nfp_linear_create(gpu, &weight, workspace.as<uint8_t>(), nfp_gpu_workspace_bytes(), &linear));
    for (const int64_t m : {1, 64, 1024}) {
      const auto rows = static_cast<size_t>(m);
      const DeviceMemory x(rows * static_cast<size_t>(k) * 2), residual(rows * static_cast<size_t>(k) * 2),
          h(rows * static_cast<size_t>(k) * 2), norm_weight(static_cast<size_t>(k) * 2),
          y(rows * static_cast<size_t>(n) * 2), scratch(nfp_linear_norm_scratch_bytes(linear, m));
      const nfp_norm norm{sizeof(nfp_norm), norm_weight.as<void>(), 1e-5f, residual.as<void>(), h.as<void>(), k,
                          nullptr};
      const auto plain = [&](nfp_precision precision) {
        return host_us([&] {
          must(nfp_linear_run(linear, precision, NFP_F16, m, x.as<void>(), k, y.as<void>(), n, nullptr,
                              scratch.as<void>(), stream));
        });
      };
      const auto normed = [&](nfp_precision precision) {
        return host_us([&] {
          must(nfp_linear_run_norm(linear, precision, NFP_F16, m, x.as<void>(), k, &norm, y.as<void>(), n, nullptr, 0,
                                   scratch.as<void>(), stream));
        });
      };
      fmt::print(
          R"({{"n": {}, "k": {}, "m": {}, "fp16_us": {:.2f}, "fp8_us": {:.2f}, "norm_fp16_us": {:.2f}, "norm_fp8_us": {:.2f}}})"
          "\n",
          n, k, m, plain(NFP_PRECISION_FP16), plain(NFP_PRECISION_FP8), normed(NFP_PRECISION_FP16),
          normed(NFP_PRECISION_FP8));
    }
    nfp_linear_destroy(linear);
  }
  nfp_gpu_destroy(gpu);
}
