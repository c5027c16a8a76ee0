// The products of a mixture's experts on wgmma, for sm_90a: y[a, n] = x[a, k] * W_e[n, k]^T for every assignment a of
// every expert e, with counts that only the device knows. Ring, producers' copies and main loops are the GEMM's
// (gemm/kernel); what differs is the list of work, which each block makes for itself from the routes, weights that are
// another expert's with every tile, and stores that end with an expert's last row.
//
// Tiles are in order of experts, in an expert of rows of its matrix, and then of its tokens, so that blocks that run at
// the same time read the same weights from the L2. A tile may read tokens of the next expert; nothing comes of them.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "backend/cuda/experts/grouped_kernels.h"
#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/gemm/kernel/epilogue.cuh"
#include "backend/cuda/gemm/kernel/multiply_e4m3.cuh"
#include "backend/cuda/gemm/kernel/multiply_f16.cuh"
#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {

template <Operand kOperand, int kTokens>
struct GroupedKernel {
  static constexpr Tile kTile{kTokens, 1, 1, 1};
  using Ring = nfp::cuda::Ring<kOperand, kTile>;
  using Pipe = typename Ring::Pipe;
  static constexpr int kConsumers = Ring::kConsumers;
  static constexpr int kBlocks = Ring::kBlocks;
  static constexpr bool kFp8 = Ring::kFp8;
  static constexpr bool kLean = Ring::kLean;
  static constexpr bool kBf16 = has_bf16_tokens(kOperand);
  using Stage = Epilogue<kTile, kFp8, kBf16>;
  static_assert(halves(kTile) == 1 && threads(kTile) >= kConsumers * 128 + 64);

  // Shared memory behind the ring: outputs on their way out, a chunk for each warpgroup, and how many tiles of tokens
  // the experts before each one have, where the GEMM's staging leaves room for it and else at the end.
  static constexpr int kChunk = kTokens < 32 ? kTokens : 32;
  static constexpr int kChunkBytes = kChunk * 128;
  static constexpr int kTableBytes = (kMaxExperts + 4) * 4;
  static constexpr int kStagingBytes = kConsumers * staging_bytes(kTile);
  static constexpr bool kTableInside = kStagingBytes >= kConsumers * kChunkBytes + kTableBytes;
  static constexpr int kSharedBytes = Ring::kSharedBytes + (kTableInside ? 0 : kTableBytes);
  static_assert(kSharedBytes <= 227 * 1024);

  struct Places {
    uint32_t staging, table, bars;
  };
  static __device__ __forceinline__ Places places(uint32_t base) {
    const uint32_t staging = base + Ring::kRingBytes;
    return {staging, kTableInside ? staging + kConsumers * kChunkBytes : base + Ring::kSharedBytes,
            staging + kStagingBytes + kConsumers * kTokens * 4};
  }

  static __device__ __forceinline__ int load_table(uint32_t table, int expert) {
    int v;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(table + expert * 4));
    return v;
  }

  // By one warp.
  static __device__ __forceinline__ void make_table(const GroupedShape& p, uint32_t table) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int each = (p.experts + 31) / 32;
    const int first = min(lane * each, p.experts), last = min(first + each, p.experts);
    constexpr int kMost = kMaxExperts / 32;
    int begins[kMost + 1];  // asked for at once, and waited for once
#pragma unroll
    for (int i = 0; i <= kMost; ++i) begins[i] = first + i <= last ? __ldcg(p.start + first + i) : 0;
    int sum = 0;
    int tiles[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      tiles[i] = first + i < last ? (begins[i + 1] - begins[i] + kTokens - 1) / kTokens : 0;
      sum += tiles[i];
    }
    int before = warp_scan(sum, lane);
    const int all = __shfl_sync(0xffffffffu, before, 31);
    before -= sum;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (first + i >= last) break;
      ptx::store_shared_4(table + (first + i) * 4, static_cast<uint32_t>(before));
      before += tiles[i];
    }
    if (lane == 0) ptx::store_shared_4(table + p.experts * 4, static_cast<uint32_t>(all));
  }

  struct Item {
    int expert, row_tile, token;  // token: the tile's first of its expert's
  };
  static __device__ __forceinline__ Item item_at(const GroupedShape& p, uint32_t table, int index) {
    const int wanted = index / p.row_tiles;  // tiles of tokens before, as if each had all rows
    int low = 0, high = p.experts;           // the last expert that begins at or before it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (load_table(table, middle) <= wanted) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int before = load_table(table, low), tiles = load_table(table, low + 1) - before;
    const int inside = index - before * p.row_tiles;
    return {low, inside / tiles, inside % tiles * kTokens};
  }

  enum class Role { kWeights, kUppers, kLowers, kActivations };
  template <Role kRole>
  static __device__ __forceinline__ void produce(const GroupedShape& p, const ExpertMatrix* matrices, uint32_t table,
                                                 Pipe pipe) {
    constexpr int kCopyBytes = kFp8 || Ring::kSlices == 2 ? 2 * kBlockBytes : kBlockBytes;
    constexpr int kTokenBytes = Ring::kSlices * Ring::kTokenBytes;
    const int items = load_table(table, p.experts) * p.row_tiles;
    pipe.parity = 1;  // a fresh barrier counts as just emptied
    for (int index = static_cast<int>(blockIdx.x); index < items; index += static_cast<int>(gridDim.x)) {
      const Item item = item_at(p, table, index);
      const ExpertMatrix& matrix = matrices[item.expert];
      int64_t offset[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {  // past the end: any rows, never stored
        offset[b] = static_cast<int64_t>(min(item.row_tile * kBlocks + b, p.row_blocks - 1)) * p.slab_bytes;
      }
      const int token = kRole == Role::kActivations && !p.one_row ? __ldcg(p.start + item.expert) + item.token : 0;
      if (kRole == Role::kActivations && index == static_cast<int>(blockIdx.x)) ptx::dependency_wait();
      const uint64_t policy = ptx::kEvictNormal;
#pragma unroll 1
      for (int k = 0; k < p.k_iterations * Ring::kStagesPerStep; ++k) {
        ptx::mbarrier_wait(pipe.empty_bar(), pipe.parity);
        const auto load_plane = [&](const uint8_t* plane, uint32_t dst) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            ptx::bulk_load(dst + b * kCopyBytes, plane + offset[b], kCopyBytes, pipe.full_bar(), policy);
          }
        };
        if constexpr (kRole == Role::kWeights || kRole == Role::kUppers) {
          ptx::mbarrier_expect(pipe.full_bar(), Ring::kWeightBytes + kTokenBytes);
          load_plane(matrix.upper, pipe.data());
        }
        if constexpr (kRole == Role::kLowers || (kRole == Role::kWeights && Ring::kLowers)) {
          load_plane(matrix.lower, pipe.data() + kBlocks * kCopyBytes);
        }
        if constexpr (kRole == Role::kActivations) {
#pragma unroll
          for (int slice = 0; slice < Ring::kSlices; ++slice) {
            ptx::tensor_load_2d(pipe.data() + Ring::kWeightBytes + slice * Ring::kTokenBytes, &p.x,
                                (k * Ring::kSlices + slice) * (kFp8 ? 128 : 64), token, pipe.full_bar(),
                                ptx::kEvictLast);
          }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) offset[b] += kCopyBytes;
        pipe.advance();
      }
    }
  }

  // One warpgroup's 64 rows x kTokens of sums: scales, the gate, one rounding, and whole lines by way of shared memory.
  template <bool kGated>
  static __device__ __forceinline__ void store(const GroupedShape& p, const ExpertMatrix& matrix,
                                               const float (&acc)[kTokens / 2], uint32_t buffer, int row0, int first,
                                               int end, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    const int row = row0 + warp * 16 + lane / 4;
    float scale0 = p.weight_scale, scale1 = p.weight_scale;
    if (matrix.row_scale != nullptr) {
      scale0 *= row < p.n ? __ldg(matrix.row_scale + row) : 0.0f;
      scale1 *= row + 8 < p.n ? __ldg(matrix.row_scale + row + 8) : 0.0f;
    }
    constexpr int kLanes = kGated ? 4 : 8;  // threads of 16 bytes a token
    const bool bf16 = kFp8 ? p.bf16 : kBf16;
    const int column0 = kGated ? row0 / 2 : row0;
#pragma unroll
    for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
      const int token0 = first + chunk * kChunk;
      if (token0 >= end) break;
#pragma unroll
      for (int j = 0; j < kChunk / 8; ++j) {
        const int base = (chunk * (kChunk / 8) + j) * 4;
        float v0 = acc[base] * scale0, v1 = acc[base + 1] * scale0;
        float v2 = acc[base + 2] * scale1, v3 = acc[base + 3] * scale1;
        if constexpr (kFp8) {
          const int token = token0 + j * 8 + lane % 4 * 2;
          const float left = __ldg(p.token_scale + min(token, end - 1));
          const float right = __ldg(p.token_scale + min(token + 1, end - 1));
          v0 *= left;
          v1 *= right;
          v2 *= left;
          v3 *= right;
        }
        const int t = j * 8 + lane % 8;
        if constexpr (kGated) {  // v0, v1: gate; v2, v3: up
          v0 = (p.gelu ? gate_of<true>(v0) : gate_of<false>(v0)) * v2;
          v1 = (p.gelu ? gate_of<true>(v1) : gate_of<false>(v1)) * v3;
          ptx::store_matrix_x1_trans(buffer + Stage::template staged<true>(t, warp), pack_pair(v0, v1, bf16));
        } else {
          ptx::store_matrix_x2_trans(buffer + Stage::template staged<false>(t, warp * 2 + lane / 8 % 2),
                                     pack_pair(v0, v1, bf16), pack_pair(v2, v3, bf16));
        }
      }
      ptx::named_barrier(1 + warpgroup, 128);
#pragma unroll
      for (int i = thread; i < kChunk * kLanes; i += 128) {
        const int t = i / kLanes, column = column0 + i % kLanes * 8;
        if (token0 + t < end && column < p.columns) {
          *reinterpret_cast<uint4*>(p.y + int64_t{token0 + t} * p.columns + column) =
              ptx::load_shared_16(buffer + Stage::template staged<kGated>(t, i % kLanes));
        }
      }
      ptx::named_barrier(1 + warpgroup, 128);
    }
  }

  static __device__ __forceinline__ void consume(const GroupedShape& p, const ExpertMatrix* matrices, const Places& at,
                                                 Pipe pipe) {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    const uint32_t buffer = at.staging + warpgroup * kChunkBytes;
    const int items = load_table(at.table, p.experts) * p.row_tiles;
    for (int index = static_cast<int>(blockIdx.x); index < items; index += static_cast<int>(gridDim.x)) {
      const Item item = item_at(p, at.table, index);
      const int row0 = (item.row_tile * kBlocks + warpgroup) * kBlockRows;
      const int first = __ldcg(p.start + item.expert) + item.token, end = __ldcg(p.start + item.expert + 1);
      float acc[1][kTokens / 2];
      const int iterations = p.k_iterations * Ring::kStagesPerStep;
      if constexpr (kFp8) {
        MultiplyE4m3<kOperand, kTile>::plain(acc, pipe, iterations, warpgroup);
      } else {
        MultiplyF16<kOperand, kTile>::run(acc, pipe, iterations, warpgroup, p.one);
      }
      if (row0 >= p.n) continue;
      if (p.gated) {
        store<true>(p, matrices[item.expert], acc[0], buffer, row0, first, end, warpgroup);
      } else {
        store<false>(p, matrices[item.expert], acc[0], buffer, row0, first, end, warpgroup);
      }
    }
  }

  static __device__ __forceinline__ void run(const GroupedShape& p, const ExpertMatrix* matrices, uint8_t* memory) {
    const uint32_t base = ptx::shared_address(memory);
    const Places at = places(base);
    Pipe pipe;
    pipe.ring = base;
    pipe.full = at.bars;
    pipe.empty = at.bars + Ring::kStages * 8;
    pipe.group = 0;
    if (threadIdx.x == kConsumers * 128) {
      ptx::prefetch_tensor_map(&p.x);
      for (int s = 0; s < Ring::kStages; ++s) {
        ptx::mbarrier_init(pipe.full + s * 8, 1);
        ptx::mbarrier_init(pipe.empty + s * 8, kConsumers * 4);
      }
      ptx::mbarrier_init_fence();
    }
    // The routes, and soon the tokens, come from the kernels before. What follows is let in only when the routes are
    // there, so that a product that comes next may go by them, and read weights, while this one is still at work.
    if (!p.follows) ptx::dependency_wait();
    if (threadIdx.x < 32) make_table(p, at.table);
    __syncthreads();
    if (threadIdx.x >= kConsumers * 128) {
      if constexpr (!kLean) ptx::release_registers<producer_registers(kTile)>();
      const int warp = static_cast<int>(threadIdx.x) / 32 - kConsumers * 4;
      if constexpr (kLean) {
        if (warp == 0 && ptx::elect_one()) produce<Role::kWeights>(p, matrices, at.table, pipe);
        if (warp == 1 && ptx::elect_one()) produce<Role::kActivations>(p, matrices, at.table, pipe);
      } else {
        if (warp == 0 && ptx::elect_one()) produce<Role::kUppers>(p, matrices, at.table, pipe);
        if (Ring::kLowers && warp == 1 && ptx::elect_one()) produce<Role::kLowers>(p, matrices, at.table, pipe);
        if (warp == 2 && ptx::elect_one()) produce<Role::kActivations>(p, matrices, at.table, pipe);
      }
      __syncwarp();
    } else {
      if constexpr (!kLean) ptx::claim_registers<consumer_registers(kTile)>();
      ptx::dependency_wait();
      ptx::launch_dependents();
      consume(p, matrices, at, pipe);
    }
  }
};

template <Operand kOperand, int kTokens, int kMost>
__global__ __launch_bounds__(threads(Tile{kTokens, 1, 1, 1}), lean(Tile{kTokens, 1, 1, 1}) ? 2 : 1) void grouped_gemm(
    const __grid_constant__ GroupedParams<kMost> params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  GroupedKernel<kOperand, kTokens>::run(params.shape, params.matrices, memory);
}

// The kernels of an operand, by the tokens of a tile, ascending.
template <Operand kOperand, int... kTokens>
std::span<const GroupedEntry> grouped_entries() {
  static const std::array entries{
      GroupedEntry{kTokens,
                   {reinterpret_cast<const void*>(&grouped_gemm<kOperand, kTokens, kSomeExperts>),
                    reinterpret_cast<const void*>(&grouped_gemm<kOperand, kTokens, kMaxExperts>)},
                   threads(Tile{kTokens, 1, 1, 1}),
                   GroupedKernel<kOperand, kTokens>::kSharedBytes}...};
  return entries;
}

}  // namespace nfp::cuda
