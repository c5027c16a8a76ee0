#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/pairs.cuh"

namespace nfp::cuda {
namespace {

// A thread block a row, four features a thread at a time.
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const CombineExpertsArgs p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t row = blockIdx.x;
  const int32_t* place = p.routes.place + row * p.routes.top;
  const float* weight = p.routes.weight + row * p.routes.top;
  const auto add = [&p](float4& sum, float by, const void* from, int64_t at) {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at);
    const float2 low = unpack_pair(raw.x, p.bf16), high = unpack_pair(raw.y, p.bf16);
    sum = make_float4(fmaf(by, low.x, sum.x), fmaf(by, low.y, sum.y), fmaf(by, high.x, sum.z), fmaf(by, high.y, sum.w));
  };
  for (int i = static_cast<int>(threadIdx.x) * 4; i < p.hidden; i += kCombineThreads * 4) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int t = 0; t < p.routes.top; ++t) {
      if (place[t] >= 0) add(sum, weight[t], p.x, int64_t{place[t]} * p.hidden + i);
    }
    if (p.shared != nullptr) {
      add(sum, p.shared_weight != nullptr ? p.shared_weight[row] : 1.0f, p.shared, row * p.hidden + i);
    }
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + row * p.hidden + i) =
        make_uint2(pack_pair(sum.x, sum.y, p.bf16), pack_pair(sum.z, sum.w, p.bf16));
  }
}

}  // namespace

const void* combine_function() { return reinterpret_cast<const void*>(&combine_kernel); }

}  // namespace nfp::cuda
