// Fills the ring: one thread, or where a whole warpgroup is there one each for upper bytes, lower bytes and tokens.
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

  static constexpr int kCopyBytes = kFp8 ? 2 * kBlockBytes : kBlockBytes;  // per row block and plane
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
          ptx::tensor_load_2d(dst + half * Ring::kLoadTokens * 128, map, iteration * kElements, first, pipe.full_bar(),
                              ptx::kEvictLast);
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

  enum class Role { kUppers, kLowers, kActivations };
  template <Role kRole>
  static __device__ __forceinline__ void produce_one(const KernelParams& p, Pipe pipe, int cluster, int clusters,
                                                     uint32_t rank) {
    const uint64_t policy = p.m_tiles == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
    // Weights never depend on the kernel before; activations do.
    if constexpr (kRole == Role::kActivations) ptx::dependency_wait();
    WorkList list(p, cluster, clusters);
    Work work;
    pipe.parity = 1;  // a fresh barrier counts as just emptied
    while (list.next(work)) {
      Sources from = sources(p, work.tile, work.k_begin, rank);
      const int token = Ring::first_token(tile_origin(p, work.tile).token, rank);
      const int bytes = kWeightBytes + Ring::token_rows(p, token) * 128;
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        ptx::mbarrier_wait(pipe.empty_bar(), pipe.parity);
        if constexpr (kRole == Role::kUppers) {
          ptx::mbarrier_expect(pipe.full_bar(), bytes);
          load_plane(p.upper, from, pipe.data(), pipe.full_bar(), policy, rank, peers(pipe));
        } else if constexpr (kRole == Role::kLowers) {
          load_plane(p.lower, from, pipe.data() + kBlocks * kCopyBytes, pipe.full_bar(), policy, rank, peers(pipe));
        } else {
          load_tokens(p, pipe, token, k, rank);
        }
        step(from);
        pipe.advance();
      }
    }
  }

  // The three roles in one thread: fills the ring with weights, waits for the kernel before, then goes stage by stage.
  static __device__ __forceinline__ void produce_all(const KernelParams& p, Pipe pipe, int cluster, int clusters,
                                                     uint32_t rank) {
    const uint64_t policy = p.m_tiles == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
    const auto load_weights = [&](Sources& from, const Pipe& at, int token) {
      ptx::mbarrier_expect(at.full_bar(), kWeightBytes + Ring::token_rows(p, token) * 128);
      load_plane(p.upper, from, at.data(), at.full_bar(), policy, rank, peers(at));
      if constexpr (kLowers)
        load_plane(p.lower, from, at.data() + kBlocks * kCopyBytes, at.full_bar(), policy, rank, peers(at));
      step(from);
    };
    int early = 0;
    {
      WorkList ahead(p, cluster, clusters);
      Pipe fill = pipe;
      Work work;
      while (early < kStages && ahead.next(work)) {
        Sources from = sources(p, work.tile, work.k_begin, rank);
        const int token = Ring::first_token(tile_origin(p, work.tile).token, rank);
#pragma unroll 1
        for (int k = work.k_begin; k < work.k_end && early < kStages; ++k, ++early) {
          load_weights(from, fill, token);
          fill.advance();
        }
      }
    }
    ptx::dependency_wait();
    WorkList list(p, cluster, clusters);
    Work work;
    pipe.parity = 1;
    while (list.next(work)) {
      const int token = Ring::first_token(tile_origin(p, work.tile).token, rank);
      const int skipped = min(early, work.k_end - work.k_begin);
      early -= skipped;
      Sources from = sources(p, work.tile, work.k_begin + skipped, rank);
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        if (k >= work.k_begin + skipped) {
          ptx::mbarrier_wait(pipe.empty_bar(), pipe.parity);
          load_weights(from, pipe, token);
        }
        load_tokens(p, pipe, token, k, rank);
        pipe.advance();
      }
    }
  }

  static __device__ __forceinline__ void produce(const KernelParams& p, const Pipe& pipe, int cluster, int clusters,
                                                 uint32_t rank) {
    const int warp = static_cast<int>(threadIdx.x) / 32 - kConsumers * 4;
    if constexpr (kLean) {
      if (ptx::elect_one()) produce_all(p, pipe, cluster, clusters, rank);
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
