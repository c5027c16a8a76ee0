// Fills the ring: a thread for weights and one for tokens, or where a whole warpgroup is there one each for upper
// bytes, lower bytes and tokens.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/kernel/parts.cuh"
#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace nfp::cuda {

template <Operand kOperand, Tile kTile>
struct Producer {
  using Ring = nfp::cuda::Ring<kOperand, kTile>;
  using Pipe = typename Ring::Pipe;
  static constexpr auto kTokens = Ring::kTokens;
  static constexpr auto kCluster = Ring::kCluster;
  static constexpr auto kConsumers = Ring::kConsumers;
  static constexpr auto kFp8 = Ring::kFp8;
  static constexpr auto kLowers = Ring::kLowers;
  static constexpr auto kAlongTokens = Ring::kAlongTokens;
  static constexpr auto kLean = Ring::kLean;
  static constexpr auto kStages = Ring::kStages;
  static constexpr auto kWeightBytes = Ring::kWeightBytes;
  static constexpr auto kStageBytes = Ring::kStageBytes;
  static constexpr auto kBlocks = Ring::kBlocks;

  static constexpr auto kSlices = Ring::kSlices;
  static constexpr auto kStagesPerStep = Ring::kStagesPerStep;
  static constexpr int kCopyBytes = kFp8 || kSlices == 2 ? 2 * kBlockBytes : kBlockBytes;  // per row block and plane
  struct Sources {
    int64_t offset[kBlocks];  // in a plane
  };
  static __device__ __forceinline__ Sources sources(const KernelParams& p, int tile, int iteration, uint32_t rank) {
    const int first = Ring::first_row_block(tile_origin(p, tile).cluster_row, rank);
    Sources s;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int block = min(first + b, p.row_blocks - 1);  // past the end: any rows, never stored
      s.offset[b] =
          static_cast<int64_t>(block) * p.k_groups * kBlockBytes + static_cast<int64_t>(iteration) * kCopyBytes;
    }
    return s;
  }
  // One stage's blocks of a plane, to `dst` and the blocks after it.
  static __device__ __forceinline__ void load_plane(const uint8_t* plane, const Sources& s, uint32_t dst, uint32_t bar,
                                                    uint64_t policy, uint32_t rank, uint16_t mask) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if constexpr (kAlongTokens && kCluster > 1) {  // every block a part of each copy, for all
        constexpr int kPart = kCopyBytes / kCluster;
        const uint32_t part = rank * kPart;
        ptx::bulk_load_multicast(dst + b * kCopyBytes + part, plane + s.offset[b] + part, kPart, bar, mask, policy);
      } else {
        ptx::bulk_load(dst + b * kCopyBytes, plane + s.offset[b], kCopyBytes, bar, policy);
      }
    }
  }
  static __device__ __forceinline__ void step(Sources& s) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) s.offset[b] += kCopyBytes;
  }
  static __device__ __forceinline__ void load_tokens(const KernelParams& p, const Pipe& pipe, int token0, int iteration,
                                                     uint32_t rank) {
    constexpr int kElements = kFp8 ? 128 : 64;
    const uint32_t dst = pipe.data() + kWeightBytes;
    if constexpr (Ring::kLoaders == 1) {
#pragma unroll
      for (int half = 0; half < halves(kTile); ++half) {
        const int first = token0 + half * Ring::kLoadTokens;
        const CUtensorMap* const map = first >= p.last_token ? &p.x_tail : &p.x;
        if (first <= p.last_token) {
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice) {
            ptx::tensor_load_2d(dst + slice * Ring::kTokenBytes + half * Ring::kLoadTokens * 128, map,
                                (iteration * kSlices + slice) * kElements, first, pipe.full_bar(), ptx::kEvictLast);
          }
        }
      }
    } else {
      const bool tail = token0 >= p.last_token;
      const CUtensorMap* const map = tail ? &p.x_tail : &p.x;
      const int rows = tail ? p.tail_rows : box_tokens(kTile);
      ptx::tensor_load_2d_multicast(dst + rank * rows * 128, map, iteration * kElements,
                                    token0 + static_cast<int>(rank) * rows, pipe.full_bar(), peers(pipe),
                                    ptx::kEvictLast);
    }
  }

  // The blocks that share what one of them loads.
  static __device__ __forceinline__ uint16_t peers(const Pipe& pipe) {
    return static_cast<uint16_t>(((1 << kCluster) - 1) << pipe.group);
  }

  // Holds the first round of the ring back to what memory delivers. Nothing that is multiplied does so yet: all SMs
  // would ask for a ring full of weights at once, and the kernel before, for whose last results these tokens wait,
  // would find some microseconds of them queued in front of its own few loads.
  struct Pace {
    uint32_t start = cycles();
    int stage = 0;
    static __device__ __forceinline__ uint32_t cycles() {
      uint32_t now;
      asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
      return now;
    }
    __device__ __forceinline__ void wait(const KernelParams& p) {
      if (stage < kStages && stage >= p.burst) {
        const uint32_t due = static_cast<uint32_t>(stage - p.burst + 1) * p.pace;
        while (cycles() - start < due) __nanosleep(32);
      }
      ++stage;
    }
  };

  enum class Role { kWeights, kUppers, kLowers, kActivations };
  template <Role kRole>
  static __device__ __forceinline__ void produce_one(const KernelParams& p, Pipe pipe, int cluster, int clusters,
                                                     uint32_t rank) {
    constexpr bool kPaced = kRole != Role::kActivations && kTokens <= 128;
    const uint64_t policy = p.m_tiles == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
    // Weights never depend on the kernel before; activations do.
    if constexpr (kRole == Role::kActivations) ptx::dependency_wait();
    WorkList list(p, cluster, clusters);
    Work work;
    [[maybe_unused]] Pace pace;
    pipe.parity = 1;  // a fresh barrier counts as just emptied
    while (list.next(work)) {
      Sources from = sources(p, work.tile, work.k_begin * kStagesPerStep, rank);
      const int token = Ring::first_token(tile_origin(p, work.tile).token, rank);
      const int bytes = kWeightBytes + Ring::token_bytes(p, token);
#pragma unroll 1
      for (int k = work.k_begin * kStagesPerStep; k < work.k_end * kStagesPerStep; ++k) {
        ptx::mbarrier_wait(pipe.empty_bar(), pipe.parity);
        if constexpr (kPaced) pace.wait(p);
        if constexpr (kRole == Role::kWeights || kRole == Role::kUppers) {
          ptx::mbarrier_expect(pipe.full_bar(), bytes);
          load_plane(p.upper, from, pipe.data(), pipe.full_bar(), policy, rank, peers(pipe));
        }
        if constexpr (kRole == Role::kLowers || (kRole == Role::kWeights && kLowers)) {
          load_plane(p.lower, from, pipe.data() + kBlocks * kCopyBytes, pipe.full_bar(), policy, rank, peers(pipe));
        }
        if constexpr (kRole == Role::kActivations) load_tokens(p, pipe, token, k, rank);
        step(from);
        pipe.advance();
      }
    }
  }

  static __device__ __forceinline__ void produce(const KernelParams& p, const Pipe& pipe, int cluster, int clusters,
                                                 uint32_t rank) {
    const int warp = static_cast<int>(threadIdx.x) / 32 - kConsumers * 4;
    if constexpr (kLean) {
      if (warp == 0) {
        if (ptx::elect_one()) produce_one<Role::kWeights>(p, pipe, cluster, clusters, rank);
      } else {
        if (ptx::elect_one()) produce_one<Role::kActivations>(p, pipe, cluster, clusters, rank);
      }
    } else if (warp == 0) {
      if (ptx::elect_one()) produce_one<Role::kUppers>(p, pipe, cluster, clusters, rank);
    } else if (warp == 1) {
      if (kLowers && ptx::elect_one()) produce_one<Role::kLowers>(p, pipe, cluster, clusters, rank);
    } else if (warp == 2) {
      if (ptx::elect_one()) produce_one<Role::kActivations>(p, pipe, cluster, clusters, rank);
    }
    __syncwarp();
  }
};

}  // namespace nfp::cuda
