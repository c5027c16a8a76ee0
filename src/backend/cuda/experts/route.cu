#include <cuda_fp16.h>

#include <cfloat>

#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {
namespace {

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}
__device__ __forceinline__ float4 widen4(uint2 raw) {
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

// A warp has one expert and kRouteRows rows, which share the reading of its weights. The last expert is the shared
// one's gate, where there is one.
__global__ __launch_bounds__(kRouteWarps * 32) void route_logits_kernel(const RouteArgs p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int expert = static_cast<int>(blockIdx.y) * kRouteWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = int64_t{blockIdx.x} * kRouteRows;
  const bool gate = expert == p.routes.experts;
  if (expert > p.routes.experts || (gate && p.shared_gate == nullptr)) return;
  const float* weights = gate ? p.shared_gate : p.router + int64_t{expert} * p.hidden;
  const auto* x = static_cast<const uint16_t*>(p.x);
  float sums[kRouteRows] = {};
  for (int k = lane * 4; k < p.hidden; k += 128) {
    const float4 w = *reinterpret_cast<const float4*>(weights + k);
#pragma unroll
    for (int r = 0; r < kRouteRows; ++r) {
      if (first + r >= p.rows) continue;
      const float4 v = widen4(*reinterpret_cast<const uint2*>(x + (first + r) * p.hidden + k));
      sums[r] += v.x * w.x + v.y * w.y + v.z * w.z + v.w * w.w;
    }
  }
#pragma unroll
  for (int r = 0; r < kRouteRows; ++r) {
    const float sum = warp_sum(sums[r]);
    if (lane != 0 || first + r >= p.rows) continue;
    if (gate) {
      p.shared_weight[first + r] = 1.0f / (1.0f + expf(-sum));
    } else {
      p.logits[(first + r) * p.routes.experts + expert] = sum;
    }
  }
}

// A warp has a row: softmax, and `top` times the likeliest that is left, of equals the first. The row's experts stay at
// the beginning of its logits, which nobody needs any more.
__global__ __launch_bounds__(kChooseWarps * 32) void choose_experts_kernel(const RouteArgs p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  constexpr int kMine = kMaxExperts / 32;
  const int64_t row = int64_t{blockIdx.x} * kChooseWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.rows) return;
  float* logits = p.logits + row * p.routes.experts;
  float mine[kMine];
  float largest = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int expert = i * 32 + lane;
    mine[i] = expert < p.routes.experts ? logits[expert] : -INFINITY;
    largest = fmaxf(largest, mine[i]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    mine[i] = i * 32 + lane < p.routes.experts ? expf(mine[i] - largest) : -1.0f;
    sum += fmaxf(mine[i], 0.0f);
  }
  sum = warp_sum(sum);
  float chosen_sum = 0.0f, my_weight = 0.0f;
  int my_expert = 0;
  for (int t = 0; t < p.routes.top; ++t) {
    float best = -2.0f;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (mine[i] > best) {
        best = mine[i];
        at = i * 32 + lane;
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, offset);
      const int other_at = __shfl_xor_sync(0xffffffffu, at, offset);
      if (other > best || (other == best && other_at < at)) {
        best = other;
        at = other_at;
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (i * 32 + lane == at) mine[i] = -1.0f;
    }
    chosen_sum += best;
    if (lane == t) {
      my_weight = best;
      my_expert = at;
    }
  }
  if (lane >= p.routes.top) return;
  p.routes.weight[row * p.routes.top + lane] = my_weight / (p.renormalise ? chosen_sum : sum);
  reinterpret_cast<int32_t*>(logits)[lane] = my_expert;
}

// A block has an expert: how many assignments those before it have, and then its own in order of rows.
__global__ __launch_bounds__(kAssignThreads) void assign_rows_kernel(const RouteArgs p) {
  constexpr int kWarps = kAssignThreads / 32;
  __shared__ int counts[kWarps];
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int expert = static_cast<int>(blockIdx.x);
  const auto top = static_cast<uint32_t>(p.routes.top);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto total = static_cast<uint32_t>(p.rows) * top;
  const auto expert_of = [&](uint32_t assignment) {
    const uint32_t row = assignment / top;
    return reinterpret_cast<const int32_t*>(p.logits + int64_t{row} * p.routes.experts)[assignment - row * top];
  };
  int before = 0;
  for (uint32_t i = threadIdx.x; i < total; i += kAssignThreads) before += expert_of(i) < expert;
  before = __reduce_add_sync(0xffffffffu, before);
  if (lane == 0) counts[warp] = before;
  __syncthreads();
  int next = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) next += counts[w];
  if (threadIdx.x == 0) {
    p.routes.start[expert] = next;
    if (expert == 0) p.routes.start[p.routes.experts] = static_cast<int32_t>(total);
  }
  for (uint32_t base = 0; base < total; base += kAssignThreads) {
    const uint32_t i = base + threadIdx.x;
    const bool own = i < total && expert_of(i) == expert;
    const uint32_t votes = __ballot_sync(0xffffffffu, own);
    __syncthreads();  // the counts before were read
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int at = next + __popc(votes & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += counts[w];
      next += counts[w];
    }
    if (!own) continue;
    p.routes.row[at] = static_cast<int32_t>(i / top);
    p.routes.place[i] = at;
  }
}

}  // namespace

const void* route_logits_function() { return reinterpret_cast<const void*>(&route_logits_kernel); }
const void* choose_experts_function() { return reinterpret_cast<const void*>(&choose_experts_kernel); }
const void* assign_rows_function() { return reinterpret_cast<const void*>(&assign_rows_kernel); }

}  // namespace nfp::cuda
