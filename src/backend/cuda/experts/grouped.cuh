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
#include "backend/cuda/experts/grouped_unit.h"
#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/gemm/kernel/epilogue.cuh"
#include "backend/cuda/gemm/kernel/multiply_e4m3.cuh"
#include "backend/cuda/gemm/kernel/multiply_f16.cuh"
#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {

// Wide tiles of E4M3 products are short beside their stores, as nothing is rebuilt: there each of two warpgroups has
// a tile of its own, one stores while the other multiplies, and they take turns at the ring.
template <Operand kOperand, int kTokens>
struct GroupedKernel {
  static constexpr Tile kShape{kTokens, 1, 1, 1};  // threads and registers
  static constexpr bool kTurns = kOperand == Operand::kE4M3 && kTokens >= 128;
  static constexpr Tile kTile{kTokens, kTurns ? 2 : 1, 1, 1, kTurns ? 1 : 2};  // what a tile's warpgroups compute
  using Ring = nfp::cuda::Ring<kOperand, kTile>;
  using Pipe = typename Ring::Pipe;
  static constexpr int kConsumers = kShape.warpgroups;
  static constexpr int kBlocks = Ring::kBlocks;
  static constexpr bool kFp8 = Ring::kFp8;
  static constexpr bool kLean = lean(kShape);
  static constexpr bool kBf16 = has_bf16_tokens(kOperand);
  using Stage = Epilogue<kTile, kFp8, kBf16>;
  static_assert(halves(kTile) == 1 && kBlocks == 2 && threads(kShape) >= kConsumers * 128 + 64);

  // An expert's tokens are shared out evenly among its tiles, and a wide tile multiplies no more units of tokens than
  // it has.
  static constexpr int kUnit = grouped_unit(kTokens);
  static constexpr int kUnits = kTokens / kUnit;
  static_assert(kUnit % 8 == 0 && kTokens % kUnit == 0);

  // Shared memory behind the ring: outputs on their way out, chunks for each warpgroup in turns, its tokens' scales,
  // how many tiles of tokens the experts before each one have, and barriers.
  static constexpr int kChunk = kTokens < 32 ? kTokens : 32;
  static constexpr int kChunkBytes = kChunk * 128;
  static constexpr int kChunks = kTokens > kChunk ? 2 : 1;
  static constexpr int kStagingBytes = kConsumers * kChunks * kChunkBytes;
  static constexpr int kScaleBytes = kFp8 ? kConsumers * kTokens * 4 : 0;
  static constexpr int kTableBytes = (kMaxExperts + 4) * 4;
  // Where a tile's sums go: the widest have no registers for it, and of the others every cycle counts.
  static constexpr bool kNotes = kTokens >= 128;
  static constexpr int kNoteBytes = kNotes ? kConsumers * 4 * 16 : 0;  // a warp's
  static constexpr int kBarrierBytes = (2 * Ring::kStages + 2) * 8;
  static constexpr int kSharedBytes =
      Ring::kRingBytes + kStagingBytes + kScaleBytes + kTableBytes + kNoteBytes + kBarrierBytes;
  static_assert(kSharedBytes <= 227 * 1024);

  struct Places {
    uint32_t staging, scales, table, notes, bars;
  };
  static __device__ __forceinline__ Places places(uint32_t base) {
    const uint32_t staging = base + Ring::kRingBytes, scales = staging + kStagingBytes, table = scales + kScaleBytes;
    const uint32_t notes = table + kTableBytes;
    return {staging, scales, table, notes, notes + kNoteBytes};
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
    int expert, row_tile, tile, tiles;  // tile of the expert's tiles of tokens
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
    return {low, inside / tiles, inside % tiles, tiles};
  }
  struct Tokens {
    int first, end;  // of assignments
    __device__ __forceinline__ int units() const { return (end - first + kUnit - 1) / kUnit; }
  };
  static __device__ __forceinline__ Tokens tokens_of(const GroupedShape& p, const Item& item) {
    const int begin = __ldcg(p.start + item.expert), end = __ldcg(p.start + item.expert + 1);
    if constexpr (kUnits == 1) return {begin + item.tile * kTokens, min(begin + (item.tile + 1) * kTokens, end)};
    const int each = (end - begin + item.tiles * kUnit - 1) / (item.tiles * kUnit) * kUnit;
    const int first = begin + item.tile * each;
    return {first, min(first + each, end)};
  }

  enum class Role { kWeights, kUppers, kLowers, kActivations };
  template <Role kRole>
  static __device__ __forceinline__ void produce(const GroupedShape& p, const ExpertMatrix* matrices, uint32_t table,
                                                 Pipe pipe) {
    constexpr int kCopyBytes = kFp8 || Ring::kSlices == 2 ? 2 * kBlockBytes : kBlockBytes;
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
      // (Few tokens are copied whole, and by whoever needs none of their numbers.)
      constexpr bool kNeedsUnits = kUnits > 1 && (kRole == Role::kWeights || kRole == Role::kUppers);
      const Tokens tokens =
          kNeedsUnits || (kRole == Role::kActivations && !p.one_row) ? tokens_of(p, item) : Tokens{0, 1};
      const int units = kUnits > 1 ? tokens.units() : 1;
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
          ptx::mbarrier_expect(pipe.full_bar(), Ring::kWeightBytes + Ring::kSlices * units * (kUnit * 128));
          load_plane(matrix.upper, pipe.data());
        }
        if constexpr (kRole == Role::kLowers || (kRole == Role::kWeights && Ring::kLowers)) {
          load_plane(matrix.lower, pipe.data() + kBlocks * kCopyBytes);
        }
        if constexpr (kRole == Role::kActivations) {
#pragma unroll
          for (int slice = 0; slice < Ring::kSlices; ++slice) {
            const uint32_t dst = pipe.data() + Ring::kWeightBytes + slice * Ring::kTokenBytes;
            const int column = (k * Ring::kSlices + slice) * (kFp8 ? 128 : 64);
            if (units == kUnits) {
              ptx::tensor_load_2d(dst, &p.x, column, tokens.first, pipe.full_bar(), ptx::kEvictLast);
            } else {
              for (int unit = 0; unit < units; ++unit) {
                ptx::tensor_load_2d(dst + unit * (kUnit * 128), &p.x_unit, column, tokens.first + unit * kUnit,
                                    pipe.full_bar(), ptx::kEvictLast);
              }
            }
          }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) offset[b] += kCopyBytes;
        pipe.advance();
      }
    }
  }

  // 64 rows x kTokens of a warpgroup's sums: scales, the gate, one rounding, and whole lines by way of shared memory.
  template <bool kGated>
  static __device__ __forceinline__ void store(const GroupedShape& p, const ExpertMatrix& matrix,
                                               const float (&acc)[kTokens / 2], uint32_t staging, uint32_t scales,
                                               int row0, Tokens tokens, int warpgroup) {
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
    const int warp = ptx::warp_uniform(thread / 32);
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
      const int token0 = tokens.first + chunk * kChunk;
      if (token0 >= tokens.end) break;
      const uint32_t buffer = staging + chunk % kChunks * kChunkBytes;
#pragma unroll
      for (int j = 0; j < kChunk / 8; ++j) {
        const int base = (chunk * (kChunk / 8) + j) * 4;
        float v0 = acc[base] * scale0, v1 = acc[base + 1] * scale0;
        float v2 = acc[base + 2] * scale1, v3 = acc[base + 3] * scale1;
        if constexpr (kFp8) {
          const float2 pair = ptx::load_shared_8(scales + (chunk * kChunk + j * 8 + lane % 4 * 2) * 4);
          v0 *= pair.x;
          v1 *= pair.y;
          v2 *= pair.x;
          v3 *= pair.y;
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
        if (token0 + t < tokens.end && column < p.columns) {
          *reinterpret_cast<uint4*>(p.y + int64_t{token0 + t} * p.columns + column) =
              ptx::load_shared_16(buffer + Stage::template staged<kGated>(t, i % kLanes));
        }
      }
      // The next chunk but one comes here; who writes it has passed the next one's barrier, and all have read by then.
      if (kChunks == 1) ptx::named_barrier(1 + warpgroup, 128);
    }
    if (kChunks > 1) ptx::named_barrier(1 + warpgroup, 128);  // what is stored next begins with the first again
  }

  using Sums = float[Ring::kRowBlocks][kTokens / 2];
  template <int kWidth, typename Loaded>
  static __device__ __forceinline__ void multiply(const GroupedShape& p, Sums& acc, Pipe& pipe, int warpgroup,
                                                  Loaded loaded) {
    const int iterations = p.k_iterations * Ring::kStagesPerStep;
    if constexpr (kFp8) {
      MultiplyE4m3<kOperand, kTile, kWidth>::plain(acc, pipe, iterations, warpgroup, loaded);
    } else {
      MultiplyF16<kOperand, kTile, kWidth>::run(acc, pipe, iterations, warpgroup, p.one);
    }
  }

  // The narrowest of the widths that hold `units`.
  template <int kTry, typename Loaded>
  static __device__ __forceinline__ void multiply_units(const GroupedShape& p, Sums& acc, Pipe& pipe, int warpgroup,
                                                        int units, Loaded loaded) {
    if (kTry == kUnits || units == kTry) {
      multiply<kTry * kUnit>(p, acc, pipe, warpgroup, loaded);
    } else if constexpr (kTry < kUnits) {
      multiply_units<kTry + 1>(p, acc, pipe, warpgroup, units, loaded);
    }
  }

  static __device__ __forceinline__ void consume(const GroupedShape& p, const ExpertMatrix* matrices, const Places& at,
                                                 Pipe pipe) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int warpgroup = ptx::warp_uniform(static_cast<int>(threadIdx.x) / 128);
    const uint32_t staging = at.staging + warpgroup * (kChunks * kChunkBytes);
    const uint32_t scales = at.scales + warpgroup * (kTokens * 4);
    const uint32_t turns = at.bars + 2 * Ring::kStages * 8;
    const int items = ptx::warp_uniform(load_table(at.table, p.experts) * p.row_tiles);
    uint32_t turn_parity = warpgroup == 0 ? 1 : 0;  // the first may go at once
    int turn = 0;
    for (int index = static_cast<int>(blockIdx.x); index < items; index += static_cast<int>(gridDim.x), turn ^= 1) {
      if (kTurns && turn != warpgroup) {
        pipe.skip(p.k_iterations * Ring::kStagesPerStep);
        continue;
      }
      const uint32_t note = at.notes + static_cast<uint32_t>(threadIdx.x) / 32 * 16;
      Item item = item_at(p, at.table, index);
      Tokens tokens = tokens_of(p, item);
      if constexpr (kNotes)
        ptx::store_shared_16(note, make_uint4(item.expert, item.row_tile, tokens.first, tokens.end));
      if constexpr (kFp8) {
        for (int t = thread; t < kTokens && tokens.first + t < tokens.end; t += 128) {
          ptx::copy_async_4(scales + t * 4, p.token_scale + tokens.first + t);
        }
      }
      Sums acc;
      const int of_ring = kTurns ? 0 : warpgroup;
      if constexpr (kTurns) {
        ptx::mbarrier_wait(turns + warpgroup * 8, turn_parity);
        turn_parity ^= 1;
      }
      const auto loaded = [&] {
        if (kTurns && thread % 32 == 0) ptx::mbarrier_arrive(turns + (warpgroup ^ 1) * 8);
      };
      multiply_units<1>(p, acc, pipe, of_ring, kUnits > 1 ? ptx::warp_uniform(tokens.units()) : 1, loaded);
      if constexpr (kFp8) {
        ptx::copy_async_wait();
        ptx::named_barrier(1 + warpgroup, 128);
      }
      if constexpr (kNotes) {
        const uint4 noted = ptx::load_shared_16(note);
        item = {static_cast<int>(noted.x), static_cast<int>(noted.y), 0, 0};
        tokens = {static_cast<int>(noted.z), static_cast<int>(noted.w)};
      }
#pragma unroll
      for (int b = 0; b < Ring::kRowBlocks; ++b) {
        const int row0 = (item.row_tile * kBlocks + (kTurns ? b : warpgroup)) * kBlockRows;
        if (row0 >= p.n) continue;
        if (p.gated) {
          store<true>(p, matrices[item.expert], acc[b], staging, scales, row0, tokens, warpgroup);
        } else {
          store<false>(p, matrices[item.expert], acc[b], staging, scales, row0, tokens, warpgroup);
        }
      }
      __syncwarp();  // for the compiler: see warp_uniform()
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
        ptx::mbarrier_init(pipe.empty + s * 8, Ring::kConsumers * 4);
      }
      for (int w = 0; w < 2; ++w) ptx::mbarrier_init(at.bars + (2 * Ring::kStages + w) * 8, 4);
      ptx::mbarrier_init_fence();
    }
    // The routes, and soon the tokens, come from the kernels before. What follows is let in only when the routes are
    // there, so that a product that comes next may go by them, and read weights, while this one is still at work.
    if (!p.follows) ptx::dependency_wait();
    if (threadIdx.x < 32) make_table(p, at.table);
    __syncthreads();
    if (threadIdx.x >= kConsumers * 128) {
      if constexpr (!kLean) ptx::release_registers<producer_registers(kShape)>();
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
      if constexpr (!kLean) ptx::claim_registers<consumer_registers(kShape)>();
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
