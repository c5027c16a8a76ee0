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

constexpr float kRouteRestScale = 2048.0f;

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

// Two weights as two FP16 numbers each: the nearest, and 2^11 times what is left, which leave 2^-22 of it.
struct SplitPair {
  uint32_t most, rest;
};
__device__ __forceinline__ SplitPair split(float first, float second) {
  const __half2 most = __floats2half2_rn(first, second);
  const float2 back = __half22float2(most);
  const __half2 rest = __floats2half2_rn((first - back.x) * kRouteRestScale, (second - back.y) * kRouteRestScale);
  return {reinterpret_cast<const uint32_t&>(most), reinterpret_cast<const uint32_t&>(rest)};
}

// The same for many rows on tensor cores: a block has 32 rows and kExperts experts, which come through a ring in shared
// memory; a warp has some of the products. A lane's eight consecutive k are the operands of two products of 16 k: whose
// k a lane takes is free as long as rows and weights agree.
template <int kExperts>
__global__ __launch_bounds__(kRouteManyThreads) void route_logits_many_kernel(const RouteArgs p) {
  using Many = RouteMany<kExperts>;
  // A warp has eight experts, one or both halves of the rows, and 32 k of each chunk: one wait behind the other is what
  // takes the time.
  constexpr int kHalves = kExperts == 128 ? 2 : 1, kParts = Many::kChunk / 32;
  constexpr int kWarps = kRouteManyThreads / 32 / kParts;  // that have a part
  static_assert(kExperts / 8 * (kRouteManyRows / 16) == kHalves * kWarps);
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t ring = ptx::shared_address(memory);
  ptx::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int group = lane / 4, column = lane % 4;
  const int first_row = static_cast<int>(blockIdx.x) * kRouteManyRows;
  const int first_expert = static_cast<int>(blockIdx.y) * kExperts;
  const int all = p.routes.experts + (p.shared_gate != nullptr ? 1 : 0);
  const int chunks = (p.hidden + Many::kChunk - 1) / Many::kChunk;
  // What a thread loads of every chunk: the same 16-byte piece of some experts, and of some rows. Pieces are swapped
  // around so that the eight lanes that read at once meet no bank twice.
  constexpr int kPieces = Many::kChunk / 4, kRowPieces = Many::kChunk / 8;  // of an expert, of a row
  constexpr int kStep = kRouteManyThreads / kPieces, kRowStep = kRouteManyThreads / kRowPieces;
  constexpr int kLoads = kExperts / kStep;
  static_assert(kStep % 2 == 0 && kLoads * kStep == kExperts && kRowStep >= kRouteManyRows);
  const int piece = thread % kPieces, row_piece = thread % kRowPieces;
  const float* weights_from[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int expert = first_expert + thread / kPieces + i * kStep;
    weights_from[i] = expert < p.routes.experts ? p.router + int64_t{expert} * p.hidden
                      : expert < all            ? p.shared_gate
                                                : nullptr;
  }
  const uint32_t weights_to = (thread / kPieces * kPieces + (piece ^ (thread / kPieces & 1))) * 16;
  const uint32_t rows_to = (thread / kRowPieces * kRowPieces + (row_piece ^ (thread / kRowPieces & 1) * 4)) * 16;
  const auto load_weights = [&](int chunk, uint32_t stage) {
    const int k = chunk * Many::kChunk + piece * 4;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool wanted = weights_from[i] != nullptr && k < p.hidden;
      ptx::copy_async_16(stage + weights_to + i * (kStep * kPieces * 16), wanted ? weights_from[i] + k : p.router,
                         wanted);
    }
  };
  const auto load_rows = [&](int chunk, uint32_t stage) {
    const int row = thread / kRowPieces, k = chunk * Many::kChunk + row_piece * 8;
    if (row >= kRouteManyRows) return;
    const bool wanted = first_row + row < p.rows && k < p.hidden;
    const auto* x = static_cast<const uint16_t*>(p.x);
    ptx::copy_async_16(stage + Many::kWeightBytes + rows_to,
                       x + (wanted ? int64_t{first_row + row} * p.hidden + k : int64_t{0}), wanted);
  };
  const auto stage_of = [&](int index) { return ring + index * Many::kStageBytes; };
  // Nobody writes weights, so the first of them are asked for while the kernel before is at work.
  for (int c = 0; c < Many::kStages - 1 && c < chunks; ++c) load_weights(c, stage_of(c));
  ptx::dependency_wait();
  for (int c = 0; c < Many::kStages - 1; ++c) {
    if (c < chunks) load_rows(c, stage_of(c));
    ptx::copy_async_commit();
  }
  const int part = warp / kWarps, of_part = warp % kWarps;
  const int tile = kHalves == 2 ? of_part : of_part / 2, half0 = kHalves == 2 ? 0 : of_part % 2;
  const uint32_t weights_at = (tile * 8 + group) * kPieces * 16, swap = group & 1;
  const uint32_t rows_at = Many::kWeightBytes + (half0 * 16 + group) * kRowPieces * 16, row_swap = (group & 1) * 4;
  float sums[kHalves][4] = {}, rests[kHalves][4] = {};
  int now = 0, next = Many::kStages - 1;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ptx::copy_async_wait_group<Many::kStages - 2>();
    __syncthreads();  // this chunk is there, and all have read the one whose place the next takes
    if (chunk + Many::kStages - 1 < chunks) {
      load_weights(chunk + Many::kStages - 1, stage_of(next));
      load_rows(chunk + Many::kStages - 1, stage_of(next));
    }
    ptx::copy_async_commit();
    const uint32_t stage = stage_of(now);
    now = now + 1 == Many::kStages ? 0 : now + 1;
    next = next + 1 == Many::kStages ? 0 : next + 1;
    uint4 a[kHalves][2];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        a[half][r] = ptx::load_shared_16(stage + rows_at + (half * 16 + r * 8) * (kRowPieces * 16) +
                                         ((part * 4 + column) ^ row_swap) * 16);
      }
    }
    float w[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = ptx::load_shared_16(stage + weights_at + (((part * 4 + column) * 2 + i) ^ swap) * 16);
      w[i * 4] = __uint_as_float(four.x);
      w[i * 4 + 1] = __uint_as_float(four.y);
      w[i * 4 + 2] = __uint_as_float(four.z);
      w[i * 4 + 3] = __uint_as_float(four.w);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const SplitPair b0 = split(w[step * 4], w[step * 4 + 1]), b1 = split(w[step * 4 + 2], w[step * 4 + 3]);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint4 upper = a[half][0], lower = a[half][1];
        const uint32_t operand[4] = {step == 0 ? upper.x : upper.z, step == 0 ? lower.x : lower.z,
                                     step == 0 ? upper.y : upper.w, step == 0 ? lower.y : lower.w};
        ptx::mma_f16(rests[half], operand, b0.rest, b1.rest);
        ptx::mma_f16(sums[half], operand, b0.most, b1.most);
      }
    }
  }
  // The parts of k meet in the ring, in their order.
  ptx::copy_async_wait_group<0>();
  __syncthreads();
  auto* const of_parts = reinterpret_cast<float4*>(memory);  // [part - 1][warp][half][sums, rests][lane]
  const auto place = [&](int of, int half, int which) {
    return ((((of - 1) * kWarps + of_part) * kHalves + half) * 2 + which) * 32 + lane;
  };
  if (part > 0) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float(&v)[4] = sums[half];
      const float(&r)[4] = rests[half];
      of_parts[place(part, half, 0)] = make_float4(v[0], v[1], v[2], v[3]);
      of_parts[place(part, half, 1)] = make_float4(r[0], r[1], r[2], r[3]);
    }
  }
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int of = 1; of < kParts; ++of) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float4 v = of_parts[place(of, half, 0)], r = of_parts[place(of, half, 1)];
      const float more[4] = {v.x, v.y, v.z, v.w}, left[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[half][i] += more[i];
        rests[half][i] += left[i];
      }
    }
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + (half0 + half) * 16 + i / 2 * 8 + group;
      const int expert = first_expert + tile * 8 + column * 2 + i % 2;
      if (row >= p.rows) continue;
      const float logit = fmaf(rests[half][i], 1.0f / kRouteRestScale, sums[half][i]);
      if (expert < p.routes.experts) {
        p.logits[int64_t{row} * p.routes.experts + expert] = logit;
      } else if (expert < all) {
        p.shared_weight[row] = 1.0f / (1.0f + expf(-logit));
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
const void* route_logits_many_function(int experts) {
  return experts == 128  ? reinterpret_cast<const void*>(&route_logits_many_kernel<128>)
         : experts == 64 ? reinterpret_cast<const void*>(&route_logits_many_kernel<64>)
                         : reinterpret_cast<const void*>(&route_logits_many_kernel<32>);
}
const void* route_few_function() { return reinterpret_cast<const void*>(&route_few_kernel); }

}  // namespace nfp::cuda
