// Adding up the parts of a row (decode.cuh): those of a block's warps, of a cluster's blocks, and the pieces of a row
// that is cut between blocks. Always in one order.
#pragma once

#include "backend/cuda/attention/decode_exchange.cuh"
#include "backend/cuda/attention/decode_walk.cuh"
#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"

namespace nfp::cuda {

__device__ __forceinline__ uint16_t* decode_output(const DecodeParams& p, int query, int head) {
  return p.a.out + (int64_t{query} * p.a.heads + head * p.a.group) * p.a.head_dim;
}
template <KvType kKv>
__device__ __forceinline__ void store_output(const DecodeParams& p, uint16_t* out, int row, int column, float2 v,
                                             float total) {
  if (column >= p.a.head_dim) return;
  const float inverse = total > 0.0f ? p.a.value_scale / total : 0.0f;
  *reinterpret_cast<uint32_t*>(out + row * p.a.head_dim + column) = pack_pair<kKv>(v.x * inverse, v.y * inverse);
}
__device__ __forceinline__ float finite_base(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// Numbers from one row of a warp's sums in shared memory to the next: warps store their sums without bank conflicts.
template <int kDim>
inline constexpr int kSumStride = kDim + 4;

// Parts of a row added up in their order: tops [part] (largest, sum) and part_of(part), two columns of its sums, all
// brought to the base of `largest`.
struct RowSum {
  float total = 0.0f;
  float2 v = {0.0f, 0.0f};
};
template <int kParts, typename PartOf>
__device__ __forceinline__ RowSum add_parts(const float2 (&tops)[kParts], float largest, const PartOf& part_of) {
  const float base = finite_base(largest);
  RowSum sum;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float scale = exp2_fast(tops[i].x - base);
    const float2 part = part_of(i);
    sum.total += tops[i].y * scale;
    sum.v.x += part.x * scale;
    sum.v.y += part.y * scale;
  }
  return sum;
}

inline constexpr int kFewDecodeBlocks = 4;

enum class MergeTo : uint8_t { kOutput, kSlot, kExchange, kShared };

// Adds up what the warps have of a piece, [warp][row][kDim] sums and [warp][row] (largest, sum). It becomes the output,
// or a slot of the workspace or of the exchange, or the first warp's sums with block_tops [row]. kDim columns come in
// pairs.
template <int kDim, int kRows, KvType kKv>
__device__ __forceinline__ void merge_warps(const DecodeParams& p, const DecodeWalk& walk, float* sums,
                                            const float2* tops, float2* block_tops, float* slot, MergeTo to) {
  for (int i = threadIdx.x; i < p.a.group * kDim / 2; i += kDecodeWarps * 32) {
    const int row = i / (kDim / 2), column = i % (kDim / 2) * 2;
    float2 top[kDecodeWarps];
    float largest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      top[w] = tops[w * kRows + row];
      largest = fmaxf(largest, top[w].x);
    }
    const auto [total, v] = add_parts(top, largest, [&](int w) {
      return *reinterpret_cast<const float2*>(sums + (w * kRows + row) * kSumStride<kDim> + column);
    });
    if (to == MergeTo::kOutput) {
      store_output<kKv>(p, decode_output(p, walk.token, walk.head), row, column, v, total);
    } else if (to == MergeTo::kSlot) {
      __stcg(reinterpret_cast<float2*>(slot + row * kDim + column), v);
      if (column == 0) __stcg(reinterpret_cast<float2*>(slot + kRows * kDim + row * 2), make_float2(largest, total));
    } else if (to == MergeTo::kExchange) {
      send(slot + row * kDim + column, v);
      if (column == 0) send(slot + kRows * kDim + row * 2, make_float2(largest, total));
    } else {
      *reinterpret_cast<float2*>(sums + row * kSumStride<kDim> + column) = v;
      if (column == 0) block_tops[row] = make_float2(largest, total);
    }
  }
}

// The same over the pieces of a row, from their slots.
template <int kDim, int kRows, KvType kKv, typename Slot>
__device__ __forceinline__ void merge_pieces(const DecodeParams& p, const DecodeWalk& walk, int pieces,
                                             const Slot& slot_of) {
  for (int i = threadIdx.x; i < p.a.group * kDim / 4; i += kDecodeWarps * 32) {
    const int row = i / (kDim / 4), column = i % (kDim / 4) * 4;
    const auto top_of = [&](int piece) {
      return __ldcg(reinterpret_cast<const float2*>(slot_of(piece) + kRows * kDim + row * 2));
    };
    float largest = -INFINITY;
#pragma unroll 8
    for (int piece = 0; piece < pieces; ++piece) largest = fmaxf(largest, top_of(piece).x);
    const float base = finite_base(largest);
    float total = 0.0f;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int piece = 0; piece < pieces; ++piece) {
      const float2 top = top_of(piece);
      const float4 part = __ldcg(reinterpret_cast<const float4*>(slot_of(piece) + row * kDim + column));
      const float scale = exp2_fast(top.x - base);
      total += top.y * scale;
      v.x += part.x * scale;
      v.y += part.y * scale;
      v.z += part.z * scale;
      v.w += part.w * scale;
    }
    uint16_t* out = decode_output(p, walk.token, walk.head);
    store_output<kKv>(p, out, row, column, make_float2(v.x, v.y), total);
    store_output<kKv>(p, out, row, column + 2, make_float2(v.z, v.w), total);
  }
}

// Adds the slots of the exchange, `pieces` from `slot` on, to what merge_warps left in shared memory, as output.
template <int kDim, int kRows, KvType kKv>
__device__ __forceinline__ void merge_exchange(const DecodeParams& p, const DecodeWalk& walk, int pieces, float* slot,
                                               const float* sums, const float2* block_tops) {
  constexpr int kAtOnce = kDim == 128 ? 4 : 2;
  constexpr int kSlotFloats = kRows * (kDim + 2);
  for (int i = threadIdx.x; i < p.a.group * kDim / 2; i += kDecodeWarps * 32) {
    const int row = i / (kDim / 2), column = i % (kDim / 2) * 2;
    float largest = block_tops[row].x, total = block_tops[row].y;
    float2 v = *reinterpret_cast<const float2*>(sums + row * kSumStride<kDim> + column);
    const auto add = [&](const Numbers<2>& other) {
      const float top = fmaxf(largest, other[0].x), base = finite_base(top);
      const float mine = exp2_fast(largest - base), theirs = exp2_fast(other[0].x - base);
      largest = top;
      total = total * mine + other[0].y * theirs;
      v = make_float2(v.x * mine + other[1].x * theirs, v.y * mine + other[1].y * theirs);
    };
    const auto place = [&](int j) {  // of piece j / 2: its top, or its sums
      const float* from = slot + int64_t{j / 2} * kSlotFloats;
      return j % 2 == 0 ? from + kRows * kDim + row * 2 : from + row * kDim + column;
    };
    int piece = 0;
    for (; piece + kAtOnce <= pieces; piece += kAtOnce) {
      const Numbers<2 * kAtOnce> n = wait_for<2 * kAtOnce>([&](int j) { return place(piece * 2 + j); });
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) add({n[2 * j], n[2 * j + 1]});
    }
    for (; piece < pieces; ++piece) add(wait_for<2>([&](int j) { return place(piece * 2 + j); }));
    store_output<kKv>(p, decode_output(p, walk.token, walk.head), row, column, v, total);
  }
  __syncthreads();  // until all have read
  for (int piece = 0; piece < pieces; ++piece) {
    float* const from = slot + int64_t{piece} * kSlotFloats;
    for (int i = threadIdx.x; i < p.a.group * kDim / 2; i += kDecodeWarps * 32) take_back(from + i * 2);
    if (threadIdx.x < p.a.group) take_back(from + kRows * kDim + threadIdx.x * 2);
  }
}

// The same over the first `blocks` of the cluster, of which this is one, from their shared memory. Every block has a
// share of the columns: few blocks' sums are added by a thread for each pair of them, many by eight lanes.
template <int kDim, int kRows, KvType kKv>
__device__ __forceinline__ void merge_few(const DecodeParams& p, const DecodeWalk& walk, int blocks, const float* sums,
                                          const float2* block_tops) {
  constexpr int kThreads = kDecodeWarps * 32;
  const int pairs = p.a.group * kDim / 2;
  for (int pair = static_cast<int>(ptx::cluster_rank() * kThreads + threadIdx.x); pair < pairs;
       pair += blocks * kThreads) {
    const int row = pair / (kDim / 2), column = pair % (kDim / 2) * 2;
    float2 top[kFewDecodeBlocks], part[kFewDecodeBlocks];
#pragma unroll
    for (int i = 0; i < kFewDecodeBlocks; ++i) {
      top[i] = make_float2(-INFINITY, 0.0f);
      part[i] = make_float2(0.0f, 0.0f);
      if (i < blocks) {
        top[i] = ptx::load_cluster_8(ptx::map_to_rank(ptx::shared_address(block_tops + row), i));
        part[i] = ptx::load_cluster_8(ptx::map_to_rank(ptx::shared_address(sums + row * kSumStride<kDim> + column), i));
      }
    }
    float largest = top[0].x;
#pragma unroll
    for (int i = 1; i < kFewDecodeBlocks; ++i) largest = fmaxf(largest, top[i].x);
    const auto [total, v] = add_parts(top, largest, [&](int i) { return part[i]; });
    store_output<kKv>(p, decode_output(p, walk.token, walk.head), row, column, v, total);
  }
}

template <int kDim, int kRows, KvType kKv>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const DecodeWalk& walk, int blocks,
                                              const float* sums, const float2* block_tops) {
  if (blocks <= kFewDecodeBlocks) return merge_few<kDim, kRows, kKv>(p, walk, blocks, sums, block_tops);
  constexpr int kLanes = 8, kPairsAtOnce = kDecodeWarps * 32 / kLanes;
  const int pairs = p.a.group * kDim / 2, lane = threadIdx.x % kLanes;
  for (int base_pair = static_cast<int>(ptx::cluster_rank()) * kPairsAtOnce; base_pair < pairs;
       base_pair += p.cluster * kPairsAtOnce) {
    const int pair = base_pair + static_cast<int>(threadIdx.x) / kLanes;
    const int row = min(pair, pairs - 1) / (kDim / 2), column = pair % (kDim / 2) * 2;
    float2 top[kMaxDecodeCluster / kLanes], part[kMaxDecodeCluster / kLanes];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kMaxDecodeCluster / kLanes; ++i) {
      const int from = lane + i * kLanes;
      top[i] = make_float2(-INFINITY, 0.0f);
      part[i] = make_float2(0.0f, 0.0f);
      if (from < blocks) {
        top[i] = ptx::load_cluster_8(ptx::map_to_rank(ptx::shared_address(block_tops + row), from));
        part[i] =
            ptx::load_cluster_8(ptx::map_to_rank(ptx::shared_address(sums + row * kSumStride<kDim> + column), from));
      }
    }
#pragma unroll
    for (int i = 0; i < kMaxDecodeCluster / kLanes; ++i) largest = fmaxf(largest, top[i].x);
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    auto [total, v] = add_parts(top, largest, [&](int i) { return part[i]; });
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, offset);
      v.x += __shfl_xor_sync(0xffffffffu, v.x, offset);
      v.y += __shfl_xor_sync(0xffffffffu, v.y, offset);
    }
    if (lane == 0 && pair < pairs) store_output<kKv>(p, decode_output(p, walk.token, walk.head), row, column, v, total);
  }
}

}  // namespace nfp::cuda
