#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/pairs.cuh"

namespace nfp::cuda {
namespace {

struct Sum8 {
  float v[8] = {};
  __device__ __forceinline__ void add(float by, const uint4& raw, bool bf16) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair(words[i], bf16);
      v[i * 2] = fmaf(by, pair.x, v[i * 2]);
      v[i * 2 + 1] = fmaf(by, pair.y, v[i * 2 + 1]);
    }
  }
};

// A thread block has a row, or some of its features; a thread eight of them, of eight experts at a time.
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const CombineExpertsArgs p) {
  constexpr int kAtOnce = 8;
  ptx::launch_dependents();
  if (!p.follows) ptx::dependency_wait();
  const int64_t row = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32, top = p.routes.top;
  // Of lane t: the row's t-th expert.
  const int place = lane < top ? __ldcg(p.routes.place + row * top + lane) : -1;
  const float weight = place >= 0 ? __ldcg(p.routes.weight + row * top + lane) : 0.0f;
  if (p.follows) ptx::dependency_wait();
  const auto* x = static_cast<const uint16_t*>(p.x);
  const int step = static_cast<int>(gridDim.y * blockDim.x) * 8, hidden = p.hidden;
  const int first = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * 8;
  const int lane0 = first - lane * 8;  // all lanes of a warp go round as often
  for (int base = lane0; base < hidden; base += step) {
    const int i = base + lane * 8;
    const bool here = i < hidden;
    Sum8 sum;
    for (int t = 0; t < top; t += kAtOnce) {
      uint4 raw[kAtOnce];
      float by[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = __shfl_sync(0xffffffffu, place, (t + j) % 32);
        by[j] = __shfl_sync(0xffffffffu, weight, (t + j) % 32);
        const bool counts = t + j < top && at >= 0 && here;
        raw[j] = ptx::load_16(x + int64_t{at} * hidden + i, counts);
        if (!counts) by[j] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum.add(by[j], raw[j], p.bf16);
    }
    if (!here) continue;
    if (p.shared != nullptr) {
      sum.add(p.shared_weight != nullptr ? p.shared_weight[row] : 1.0f,
              *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.shared) + row * hidden + i), p.bf16);
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + row * hidden + i) =
        make_uint4(pack_pair(sum.v[0], sum.v[1], p.bf16), pack_pair(sum.v[2], sum.v[3], p.bf16),
                   pack_pair(sum.v[4], sum.v[5], p.bf16), pack_pair(sum.v[6], sum.v[7], p.bf16));
  }
}

}  // namespace

const void* combine_function() { return reinterpret_cast<const void*>(&combine_kernel); }

}  // namespace nfp::cuda
