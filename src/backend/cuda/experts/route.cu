#include <cuda_fp16.h>

#include <cfloat>

#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/warp.cuh"

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

// A warp has one expert and kRows rows, which share the reading of its weights. The last expert is the shared one's
// gate, where there is one.
template <int kRows>
__global__ __launch_bounds__(kRouteWarps * 32) void route_logits_kernel(const RouteArgs p) {
  constexpr int kAtOnce = 8;  // loads on their way, of 128 columns each
  ptx::launch_dependents();
  const int expert = static_cast<int>(blockIdx.y) * kRouteWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = int64_t{blockIdx.x} * kRows;
  const bool gate = expert == p.routes.experts;
  if (expert > p.routes.experts || (gate && p.shared_gate == nullptr)) return;
  const float* weights = gate ? p.shared_gate : p.router + int64_t{expert} * p.hidden;
  const auto* x = static_cast<const uint16_t*>(p.x);
  float4 w[kAtOnce];
  const auto load_weights = [&](int base) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int k = base + i * 128 + lane * 4;
      w[i] = k < p.hidden ? __ldg(reinterpret_cast<const float4*>(weights + k)) : make_float4(0, 0, 0, 0);
    }
  };
  ptx::dependency_wait();
  float sums[kRows] = {};
  for (int base = 0; base < p.hidden; base += kAtOnce * 128) {
    load_weights(base);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= p.rows) continue;
      const uint16_t* row = x + (first + r) * p.hidden;
      uint2 raw[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int k = base + i * 128 + lane * 4;
        raw[i] = ptx::load_8(row + k, k < p.hidden);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 v = widen4(raw[i]);
        sums[r] += v.x * w[i].x + v.y * w[i].y + v.z * w[i].z + v.w * w[i].w;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = warp_sum(sums[r]);
    if (lane != 0 || first + r >= p.rows) continue;
    if (gate) {
      p.shared_weight[first + r] = 1.0f / (1.0f + expf(-sum));
    } else {
      p.logits[(first + r) * p.routes.experts + expert] = sum;
    }
  }
}

// The same of one row, the same bits: where so little is to be done what counts is to wait for memory once. So the
// weights, which nobody writes, are asked for while the kernel before is at work, and x at once.
__global__ __launch_bounds__(kRouteWarps * 32) void route_logits_row_kernel(const RouteArgs p) {
  extern __shared__ __align__(16) uint8_t memory[];
  static_assert(kRouteChunk == kRouteWarps * 32 * 8);
  ptx::launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int expert = static_cast<int>(blockIdx.y) * kRouteWarps + warp;
  const int64_t row = blockIdx.x;
  const bool gate = expert == p.routes.experts && p.shared_gate != nullptr, here = expert < p.routes.experts || gate;
  const float* weights = gate ? p.shared_gate : p.router + int64_t{here ? expert : 0} * p.hidden;
  const auto* x = static_cast<const uint16_t*>(p.x) + row * p.hidden;
  auto* const mine = reinterpret_cast<float4*>(memory) + warp * (kRouteChunk / 4);
  auto* const tokens = reinterpret_cast<uint2*>(memory + kRouteChunk * kRouteWarps * 4);
  const auto load_weights = [&](int base) {
#pragma unroll
    for (int i = 0; i < kRouteChunk / 128; ++i) {
      const int k = base + i * 128 + lane * 4;
      const bool inside = here && k < p.hidden;
      ptx::copy_async_16(ptx::shared_address(mine + i * 32 + lane), weights + (inside ? k : 0), inside);
    }
  };
  load_weights(0);
  ptx::dependency_wait();
  float sum = 0.0f;
  for (int base = 0; base < p.hidden; base += kRouteChunk) {
    if (base > 0) {
      __syncthreads();
      load_weights(base);
    }
    const int k = base + static_cast<int>(threadIdx.x) * 8;
    ptx::copy_async_16(ptx::shared_address(tokens + threadIdx.x * 2), x + (k < p.hidden ? k : 0), k < p.hidden);
    ptx::copy_async_wait();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRouteChunk / 128; ++i) {
      const float4 w = mine[i * 32 + lane], v = widen4(tokens[i * 32 + lane]);
      sum += v.x * w.x + v.y * w.y + v.z * w.z + v.w * w.w;
    }
  }
  sum = warp_sum(sum);
  if (lane != 0 || !here) return;
  if (gate) {
    p.shared_weight[row] = 1.0f / (1.0f + expf(-sum));
  } else {
    p.logits[row * p.routes.experts + expert] = sum;
  }
}

// The same for many rows on tensor cores: a warp has 16 rows, 32 experts and a part of k, as waiting for memory is what
// takes long. Rows are FP16, which TF32 holds exactly;
// a weight is two TF32 numbers, which leave 2^-22 of it. A lane's eight consecutive k are the operands of four products
// of eight k: whose k a lane takes is free as long as rows and weights agree.
__global__ __launch_bounds__(kRouteManyWarps* kRouteManyParts * 32) void route_logits_many_kernel(const RouteArgs p) {
  constexpr int kTiles = kRouteManyExperts / 8;
  __shared__ float4 of_parts[kRouteManyParts - 1][kRouteManyWarps][kTiles][32];
  ptx::launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % kRouteManyWarps;
  const int part = static_cast<int>(threadIdx.x) / 32 / kRouteManyWarps;
  const int span = (p.hidden + 32 * kRouteManyParts - 1) / (32 * kRouteManyParts) * 32;
  const int begin = part * span, end = min(begin + span, p.hidden);
  const int group = lane / 4, column = lane % 4;
  const int first_row = (static_cast<int>(blockIdx.x) * kRouteManyWarps + warp) * 16 + group;
  const int first_expert = static_cast<int>(blockIdx.y) * kRouteManyExperts;
  const auto* x = static_cast<const uint16_t*>(p.x);
  const auto weights_of = [&](int expert) {
    return expert < p.routes.experts                                ? p.router + int64_t{expert} * p.hidden
           : expert == p.routes.experts && p.shared_gate != nullptr ? p.shared_gate
                                                                    : p.router;  // whatever it is, nothing comes of it
  };
  struct Chunk {  // of 32 k
    uint4 rows[2];
    float4 weights[kTiles][2];
  };
  const auto load = [&](int base) {
    Chunk c;
    const int k = base + column * 8;
    const bool here = k < end;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(first_row + r * 8, p.rows - 1);
      c.rows[r] = here ? *reinterpret_cast<const uint4*>(x + int64_t{row} * p.hidden + k) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float* w = weights_of(first_expert + t * 8 + group) + k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        c.weights[t][half] = here ? __ldg(reinterpret_cast<const float4*>(w + half * 4)) : make_float4(0, 0, 0, 0);
      }
    }
    return c;
  };
  ptx::dependency_wait();
  float sums[kTiles][4] = {};
  Chunk now = load(begin);
  for (int base = begin; base < end; base += 32) {
    const Chunk next = load(base + 32);
    float rows[2][8];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 low = widen4(make_uint2(now.rows[r].x, now.rows[r].y)),
                   high = widen4(make_uint2(now.rows[r].z, now.rows[r].w));
      const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) rows[r][i] = all[i];
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float4 low = now.weights[t][0], high = now.weights[t][1];
      const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t a[4] = {__float_as_uint(rows[0][step * 2]), __float_as_uint(rows[1][step * 2]),
                               __float_as_uint(rows[0][step * 2 + 1]), __float_as_uint(rows[1][step * 2 + 1])};
        float rest[2];
        uint32_t most[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          most[i] = __float_as_uint(w[step * 2 + i]) & 0xffffe000u;
          rest[i] = w[step * 2 + i] - __uint_as_float(most[i]);
        }
        ptx::mma_tf32(sums[t], a, ptx::round_to_tf32(rest[0]), ptx::round_to_tf32(rest[1]));
        ptx::mma_tf32(sums[t], a, most[0], most[1]);
      }
    }
    now = next;
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (part > 0) of_parts[part - 1][warp][t][lane] = make_float4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
  }
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int other = 0; other < kRouteManyParts - 1; ++other) {
      const float4 more = of_parts[other][warp][t][lane];
      sums[t][0] += more.x;
      sums[t][1] += more.y;
      sums[t][2] += more.z;
      sums[t][3] += more.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i / 2 * 8, expert = first_expert + t * 8 + column * 2 + i % 2;
      if (row >= p.rows) continue;
      if (expert < p.routes.experts) {
        p.logits[int64_t{row} * p.routes.experts + expert] = sums[t][i];
      } else if (expert == p.routes.experts && p.shared_gate != nullptr) {
        p.shared_weight[row] = 1.0f / (1.0f + expf(-sums[t][i]));
      }
    }
  }
}

// What a warp finds for a row: softmax, and `top` times the likeliest that is left, of equals the first. Lane t has the
// row's expert t and its weight.
struct Choice {
  int expert = 0;
  float weight = 0.0f;
};
template <int kMine>  // experts a lane
__device__ __forceinline__ Choice choose_among(const RouteArgs& p, int64_t row, int lane) {
  const float* logits = p.logits + row * p.routes.experts;
  float mine[kMine];
  float largest = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int expert = i * 32 + lane;
    mine[i] = expert < p.routes.experts ? logits[expert] : -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) largest = fmaxf(largest, mine[i]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  // Powers as integers that are in the same order; 0: none, or chosen already.
  uint32_t keys[kMine];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const float power = expf(mine[i] - largest);
    const bool here = i * 32 + lane < p.routes.experts;
    keys[i] = here ? __float_as_uint(power) + 1 : 0;
    sum += here ? power : 0.0f;
  }
  sum = warp_sum(sum);
  float chosen_sum = 0.0f;
  Choice out;
  for (int t = 0; t < p.routes.top; ++t) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (keys[i] > best) {
        best = keys[i];
        at = i * 32 + lane;
      }
    }
    const uint32_t most = __reduce_max_sync(0xffffffffu, best);
    at = static_cast<int>(__reduce_min_sync(0xffffffffu, best == most ? static_cast<uint32_t>(at) : UINT32_MAX));
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (i * 32 + lane == at) keys[i] = 0;
    }
    const float power = __uint_as_float(most - 1);
    chosen_sum += power;
    if (lane == t) out = {at, power};
  }
  out.weight /= p.renormalise ? chosen_sum : sum;
  return out;
}
__device__ __forceinline__ Choice choose(const RouteArgs& p, int64_t row, int lane) {
  return p.routes.experts <= 128 ? choose_among<4>(p, row, lane) : choose_among<kMaxExperts / 32>(p, row, lane);
}

// A warp has a row. Its experts stay at the beginning of its logits, which nobody needs any more.
__global__ __launch_bounds__(kChooseWarps * 32) void choose_experts_kernel(const RouteArgs p) {
  ptx::launch_dependents();
  ptx::dependency_wait();
  const int64_t row = int64_t{blockIdx.x} * kChooseWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= p.rows) return;
  const Choice mine = choose(p, row, lane);
  if (lane >= p.routes.top) return;
  p.routes.weight[row * p.routes.top + lane] = mine.weight;
  reinterpret_cast<int32_t*>(p.logits + row * p.routes.experts)[lane] = mine.expert;
}

// All of few rows in one block: a warp has some rows, and marks it with its experts; what an expert's marks
// count up to is where its assignments begin and in which order.
__global__ __launch_bounds__(kRouteFewThreads) void route_few_kernel(const RouteArgs p) {
  __shared__ uint32_t marks[kMaxExperts];  // a bit for each row
  __shared__ int32_t chosen[kRouteFewRows][kMaxTopExperts];
  __shared__ int32_t start[kMaxExperts];
  __shared__ int32_t of_warps[kMaxExperts / 32];
  static_assert(kRouteFewThreads == kMaxExperts && kRouteFewRows <= 32);
  ptx::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  marks[thread] = 0;
  ptx::dependency_wait();
  __syncthreads();
  const int experts = p.routes.experts, top = p.routes.top;
  for (int row = warp; row < p.rows; row += kRouteFewThreads / 32) {
    const Choice mine = choose(p, row, lane);
    if (lane >= top) continue;
    p.routes.weight[row * top + lane] = mine.weight;
    chosen[row][lane] = mine.expert;
    atomicOr(&marks[mine.expert], 1u << row);
  }
  __syncthreads();
  const int count = __popc(marks[thread]);
  int before = warp_scan(count, lane);
  if (lane == 31) of_warps[warp] = before;
  __syncthreads();
  if (thread < experts) {
    for (int w = 0; w < warp; ++w) before += of_warps[w];
    start[thread] = before - count;
    p.routes.start[thread] = before - count;
    if (thread == experts - 1) p.routes.start[experts] = before;
  }
  __syncthreads();
  for (int i = thread; i < p.rows * top; i += kRouteFewThreads) {
    const int row = i / top, expert = chosen[row][i - row * top];
    const int at = start[expert] + __popc(marks[expert] & ((1u << row) - 1));
    p.routes.row[at] = row;
    p.routes.place[i] = at;
  }
}

}  // namespace

const void* route_logits_function(int rows) {
  return rows == 2 ? reinterpret_cast<const void*>(&route_logits_kernel<2>)
                   : reinterpret_cast<const void*>(&route_logits_kernel<kMostRouteRows>);
}
const void* route_logits_row_function() { return reinterpret_cast<const void*>(&route_logits_row_kernel); }
const void* choose_experts_function() { return reinterpret_cast<const void*>(&choose_experts_kernel); }
const void* route_logits_many_function() { return reinterpret_cast<const void*>(&route_logits_many_kernel); }
const void* route_few_function() { return reinterpret_cast<const void*>(&route_few_kernel); }

}  // namespace nfp::cuda
