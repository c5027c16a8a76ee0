#include <cuda_fp16.h>

#include "backend/cuda/experts/choose.cuh"
#include "backend/cuda/experts/router_pairs.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/load.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {
namespace {

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

// The same for many rows on tensor cores: a block has 32 rows and some experts, a warp every eighth 32 k of them, and
// the warps' sums meet in shared memory. A lane's eight consecutive k are the operands of two products of 16 k: whose k
// a lane takes is free as long as rows and weights agree. (Through a ring in shared memory, with 8 to 32 warps that
// share what they load, it took longer: 11.5 to 18 us with 128 rows, 19 to 24 with 1024.)
template <int kTiles>  // of eight experts
__global__ __launch_bounds__(kRouteManyWarps * 32, 1) void route_logits_many_kernel(const RouteArgs p) {
  constexpr int kGroup = 4;  // tiles whose weights are asked for at once, while the group before is multiplied
  constexpr int kHalves = kRouteManyRows / 16;
  static_assert(kTiles % kGroup == 0 && kTiles * kHalves % kRouteManyWarps == 0);
  extern __shared__ __align__(16) uint8_t memory[];
  auto* const of_warps = reinterpret_cast<float4*>(memory);  // [warp][half][tile][lane]
  ptx::launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = lane / 4, column = lane % 4;
  const int first_row = static_cast<int>(blockIdx.x) * kRouteManyRows;
  const int first_expert = static_cast<int>(blockIdx.y) * kTiles * 8;
  const int all = p.routes.experts + (p.shared_gate != nullptr ? 1 : 0);
  const auto* x = static_cast<const uint16_t*>(p.x);
  const auto weights_of = [&](int expert) {
    return expert < p.routes.experts ? p.router + int64_t{expert} * p.hidden
           : expert < all            ? p.shared_gate
                                     : p.router;  // whatever it is, nothing comes of it
  };
  struct Weights {
    uint4 eight[kGroup][2];
  };
  const auto load_weights = [&](int base, int tile) {
    Weights w;
    int own = group;  // found again each time: there are no registers to keep all experts' addresses in
    asm volatile("" : "+r"(own));
    const int k = base + column * 8;
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      const float* from = weights_of(first_expert + (tile + t) * 8 + own) + k;
#pragma unroll
      for (int half = 0; half < 2; ++half) w.eight[t][half] = ptx::load_16(from + half * 4, k < p.hidden);
    }
    return w;
  };
  struct Rows {
    uint4 eight[kHalves][2];
  };
  const auto load_rows = [&](int base) {
    Rows r;
    const int k = base + column * 8;
#pragma unroll
    for (int i = 0; i < kHalves * 2; ++i) {
      const int row = min(first_row + i * 8 + group, p.rows - 1);
      r.eight[i / 2][i % 2] = ptx::load_16(x + int64_t{row} * p.hidden + k, k < p.hidden);
    }
    return r;
  };
  const int begin = warp * 32;
  ptx::dependency_wait();
  float sums[kHalves][kTiles][4] = {}, rests[kHalves][kTiles][4] = {};
  Rows rows = load_rows(begin);
  Weights weights = load_weights(begin, 0);
  for (int base = begin; base < p.hidden; base += kRouteManyWarps * 32) {
    const Rows now = rows;
    rows = load_rows(base + kRouteManyWarps * 32);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += kGroup) {
      const Weights here = weights;
      weights =
          tile + kGroup < kTiles ? load_weights(base, tile + kGroup) : load_weights(base + kRouteManyWarps * 32, 0);
#pragma unroll
      for (int t = 0; t < kGroup; ++t) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint4 four = here.eight[t][step];
          const SplitPair b0 = split(__uint_as_float(four.x), __uint_as_float(four.y));
          const SplitPair b1 = split(__uint_as_float(four.z), __uint_as_float(four.w));
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            const uint4 upper = now.eight[half][0], lower = now.eight[half][1];
            const uint32_t operand[4] = {step == 0 ? upper.x : upper.z, step == 0 ? lower.x : lower.z,
                                         step == 0 ? upper.y : upper.w, step == 0 ? lower.y : lower.w};
            ptx::mma_f16(rests[half][tile + t], operand, b0.rest, b1.rest);
            ptx::mma_f16(sums[half][tile + t], operand, b0.most, b1.most);
          }
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = fmaf(rests[half][t][i], 1.0f / kRouteRestScale, sums[half][t][i]);
      of_warps[((warp * kHalves + half) * kTiles + t) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles * kHalves / kRouteManyWarps; ++i) {
    const int at = i * kRouteManyWarps + warp, half = at / kTiles, t = at % kTiles;
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < kRouteManyWarps; ++w) {
      const float4 part = of_warps[((w * kHalves + half) * kTiles + t) * 32 + lane];
      sum[0] += part.x;
      sum[1] += part.y;
      sum[2] += part.z;
      sum[3] += part.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + half * 16 + j / 2 * 8 + group, expert = first_expert + t * 8 + column * 2 + j % 2;
      if (row >= p.rows) continue;
      if (expert < p.routes.experts) {
        p.logits[int64_t{row} * p.routes.experts + expert] = sum[j];
      } else if (expert < all) {
        p.shared_weight[row] = 1.0f / (1.0f + expf(-sum[j]));
      }
    }
  }
}

__device__ __forceinline__ Choice choose(const RouteArgs& p, int64_t row, int lane) {
  const float* logits = p.logits + row * p.routes.experts;
  return p.routes.experts <= 128 ? choose_among<4>(p, logits, lane) : choose_among<kMaxExperts / 32>(p, logits, lane);
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
const void* route_logits_many_function(int experts) {
  return experts == 64 ? reinterpret_cast<const void*>(&route_logits_many_kernel<8>)
                       : reinterpret_cast<const void*>(&route_logits_many_kernel<4>);
}
const void* route_few_function() { return reinterpret_cast<const void*>(&route_few_kernel); }

}  // namespace nfp::cuda
