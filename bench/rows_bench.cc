// Times of what stands around a GEMM (backend/cuda/fused/gemm_input.h), a JSON line each with the memory traffic that
// cannot be avoided: residual add and norm, norm to E4M3, E4M3 codes of a linear layer's input, and another quantiser's
// codes put into order. Graph replays over rotating buffers that the L2 does not hold.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "backend/cuda/fused/arrange_codes.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/gemm/tune/timing.h"
#include "backend/cuda/linear/activations.h"
#include "device_memory.h"

namespace nfp::cuda {
namespace {

using bench::must;
using Memory = bench::DeviceMemory;

enum class What { kAddNorm, kAddNormE4m3, kE4m3, kArrange };

void report(What what, int64_t m, int64_t k) {
  constexpr size_t kBeyondL2 = size_t{240} << 20;
  const bool norm = what == What::kAddNorm || what == What::kAddNormE4m3, codes = what != What::kAddNorm;
  const size_t wide = static_cast<size_t>(m * k) * 2, narrow = static_cast<size_t>(m * e4m3_row_bytes(k));
  const double traffic = what == What::kArrange ? static_cast<double>(wide)
                                                : static_cast<double>(wide) * (norm ? 3 : 1) +
                                                      static_cast<double>(codes ? m * k : m * k * 2);
  const int copies = static_cast<int>(std::clamp<size_t>(kBeyondL2 / wide + 1, 1, 64));
  const Memory x(wide * copies, 0x31), residual(wide * copies, 0x2f), y(wide * copies);
  const Memory weight(static_cast<size_t>(k) * 4, 0x3c), e4m3(narrow + 4 * m);
  const Memory scales(static_cast<size_t>(m) * 4);
  GraphTimer timer = must(GraphTimer::create(std::max(copies, 8), [&](int index, CUstream_st* stream) {
    const size_t at = wide * static_cast<size_t>(index % copies);
    if (what == What::kArrange) {
      ArrangeCodesCall call;
      call.m = m;
      call.k = call.ld = k;
      call.codes = x.as<uint8_t>(at);
      call.scales = weight.as<float>();
      call.one_scale = true;
      call.y = e4m3.as<uint8_t>();
      call.ldy = e4m3_row_bytes(k);
      call.y_scales = scales.as<float>();
      return arrange_codes(call, stream);
    }
    GemmInputCall call;
    call.source = norm ? GemmInputCall::Source::kNorm : GemmInputCall::Source::kPlain;
    call.m = m;
    call.k = call.ldx = call.ldr = call.ldy = k;
    call.x = x.as<uint8_t>(at);
    if (norm) {
      call.weight = weight.get();
      call.weight_f32 = true;
      call.residual = residual.as<uint8_t>(at);
    }
    if (codes) {
      call.y_e4m3 = e4m3.as<uint8_t>();
      call.ldy_e4m3 = e4m3_row_bytes(k);
      call.scales = scales.as<float>();
    } else {
      call.y_f16 = y.as<uint8_t>(at);
    }
    return prepare_gemm_input(call, stream);
  }));
  const double us = must(timer.median(3, 11));
  static constexpr const char* kNames[] = {"add_norm", "add_norm_e4m3", "e4m3", "arrange"};
  fmt::print("{{\"what\": \"{}\", \"m\": {}, \"k\": {}, \"us\": {:.2f}, \"gb_s\": {:.0f}}}\n",
             kNames[static_cast<int>(what)], m, k, us, traffic / us * 1e-3);
}

}  // namespace
}  // namespace nfp::cuda

int main() {
  using nfp::cuda::What;
  for (const int64_t m : {1, 32, 128, 256, 512, 1024, 2048, 8192}) {
    for (const int64_t k : {4096, 5120}) {
      nfp::cuda::report(What::kAddNorm, m, k);
      nfp::cuda::report(What::kAddNormE4m3, m, k);
      nfp::cuda::report(What::kE4m3, m, k);
      nfp::cuda::report(What::kArrange, m, k);
    }
    for (const int64_t k : {14336, 32768}) nfp::cuda::report(What::kE4m3, m, k);
  }
  return 0;
}
