// What a row's experts made of it, times what each counts, summed in their order: eight features of a row a thread.
#pragma once

#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/pairs.cuh"
#include "backend/expert_routes.h"

namespace nfp::cuda {

// Of lane t: where the row's t-th expert left its result, negative where nowhere, and what that counts.
struct RowExperts {
  int place = -1;
  float weight = 0.0f;
};
__device__ __forceinline__ RowExperts experts_of(const CombineExpertsArgs& p, int64_t row, int lane) {
  RowExperts out;
  if (lane < p.routes.top) {
    out.place = __ldcg(p.routes.place + row * p.routes.top + lane);
    out.weight = __ldcg(p.routes.weight + row * p.routes.top + lane);
  }
  return out;
}

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

// Features `first` to `first` + 7 of `row`, 0 unless `here`. All lanes of a warp call it together.
__device__ __forceinline__ uint4 sum_of_experts(const CombineExpertsArgs& p, const RowExperts& of, int64_t row,
                                                int first, bool here) {
  constexpr int kAtOnce = 8;  // experts whose loads are on their way together
  const auto* x = static_cast<const uint16_t*>(p.x) + first;
  Sum8 sum;
  for (int t = 0; t < p.routes.top; t += kAtOnce) {
    uint4 raw[kAtOnce];
    float by[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = __shfl_sync(0xffffffffu, of.place, (t + j) % 32);
      by[j] = __shfl_sync(0xffffffffu, of.weight, (t + j) % 32);
      const bool counts = t + j < p.routes.top && at >= 0 && here;
      raw[j] = ptx::load_16(x + int64_t{at} * p.hidden, counts);
      if (!counts) by[j] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) sum.add(by[j], raw[j], p.bf16);
  }
  if (p.shared != nullptr && here) {
    sum.add(p.shared_weight != nullptr ? p.shared_weight[row] : 1.0f,
            *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.shared) + row * p.hidden + first), p.bf16);
  }
  return make_uint4(pack_pair(sum.v[0], sum.v[1], p.bf16), pack_pair(sum.v[2], sum.v[3], p.bf16),
                    pack_pair(sum.v[4], sum.v[5], p.bf16), pack_pair(sum.v[6], sum.v[7], p.bf16));
}

}  // namespace nfp::cuda
