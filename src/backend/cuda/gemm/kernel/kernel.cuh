// D[m, n] = X[m, k] * W[n, k]^T from a nested weight, for sm_90a. The modes share everything but the inner loop:
//   FP16/BF16: both byte planes; the weight is rebuilt in registers and is wgmma's A operand from there.
//   W8A16:     the same from the upper plane alone.
//   E4M3:      the upper plane is wgmma's A operand where the copy engine put it.
// Weight rows are wgmma's M = 64 and tokens its N, so the accumulators hold D^T.
//
// Producer threads fill a ring of stages (produce.cuh); one to three consumer warpgroups multiply (multiply_f16.cuh,
// multiply_e4m3.cuh).
//
// All blocks walk the same list of work (WorkList): first shares of the tiles that are cut along k, then whole tiles.
// Parts of a cut tile meet in global memory or in a cluster and are added in order of k (parts.cuh), so results do not
// depend on who is last.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "backend/cuda/gemm/kernel/epilogue.cuh"
#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/kernel/kernels.h"
#include "backend/cuda/gemm/kernel/multiply_e4m3.cuh"
#include "backend/cuda/gemm/kernel/multiply_f16.cuh"
#include "backend/cuda/gemm/kernel/parts.cuh"
#include "backend/cuda/gemm/kernel/produce.cuh"
#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {

template <Operand kOperand, Tile kTile>
struct Kernel {
  using Ring = nfp::cuda::Ring<kOperand, kTile>;
  using Pipe = typename Ring::Pipe;
  static constexpr auto kTokens = Ring::kTokens;
  static constexpr auto kRowBlocks = Ring::kRowBlocks;
  static constexpr auto kCluster = Ring::kCluster;
  static constexpr auto kConsumers = Ring::kConsumers;
  static constexpr auto kFp8 = Ring::kFp8;
  static constexpr bool kBf16 = has_bf16_tokens(kOperand);
  static constexpr auto kLean = Ring::kLean;
  static constexpr auto kStages = Ring::kStages;
  static constexpr auto kStageBytes = Ring::kStageBytes;
  static constexpr auto kBlocks = Ring::kBlocks;
  // Where few tokens make loading all that counts, the warp that loads weights waits for nobody to begin.
  static constexpr bool kStartsEarly = kCluster == 1 && kTokens <= 128 && kTokens != 48;
  static constexpr int kStartBarrier = 15;  // named

  static __device__ __forceinline__ void consume(const KernelParams& p, Pipe pipe, uint32_t staging, uint32_t scales,
                                                 int cluster, int clusters, uint32_t rank) {
    const int warpgroup = ptx::warp_uniform(static_cast<int>(threadIdx.x) / 128);
    Epilogue<kTile, kFp8, kBf16> epilogue{p, staging + warpgroup * staging_bytes(kTile),
                                          scales + warpgroup * kTokens * 4, warpgroup};
    pipe.ring = ptx::warp_uniform(pipe.ring);
    WorkList list(p, cluster, clusters);
    Work work;
    while (list.next(work)) {
      float acc[kRowBlocks][kTokens / 2];
      // What the main loops count by: whatever an epilogue did before, see warp_uniform().
      const int iterations = ptx::warp_uniform((work.k_end - work.k_begin) * Ring::kStagesPerStep);
      pipe.stage = ptx::warp_uniform(pipe.stage);
      pipe.parity = ptx::warp_uniform(pipe.parity);
      const TileOrigin origin = tile_origin(p, work.tile);
      if constexpr (kFp8) {
        ptx::dependency_wait();  // the scales may come from the kernel before
        epilogue.prepare(Ring::first_token(origin.token, rank));
      }
      if constexpr (kOperand == Operand::kE4M3Promoted) {
        MultiplyE4m3<kOperand, kTile>::promoted(acc, pipe, work.k_begin, iterations, warpgroup);
      } else if constexpr (kFp8) {
        MultiplyE4m3<kOperand, kTile>::plain(acc, pipe, iterations, warpgroup);
      } else {
        MultiplyF16<kOperand, kTile>::run(acc, pipe, iterations, warpgroup, p.one);
      }
      ptx::dependency_wait();  // what follows touches memory that the kernel before may own
      const uint32_t chunk_mask = p.exchange > 1 ? exchange_parts<kOperand, kTile>(p, acc, pipe, rank) : ~0u;
      finish(p, acc[0], work, origin, chunk_mask, warpgroup * kRowBlocks, rank, epilogue, pipe.flag(warpgroup));
      if constexpr (kRowBlocks == 2) {
        finish(p, acc[1], work, origin, chunk_mask, warpgroup * kRowBlocks + 1, rank, epilogue, pipe.flag(warpgroup));
      }
      __syncwarp();  // for the compiler: see warp_uniform()
    }
    if (ptx::elect_one()) ptx::store_wait_read<0>();  // shared memory must outlive the copies from it
  }

  static __device__ __forceinline__ void finish(const KernelParams& p, float (&acc)[kTokens / 2], const Work& work,
                                                const TileOrigin& origin, uint32_t chunk_mask, int block, uint32_t rank,
                                                Epilogue<kTile, kFp8, kBf16>& epilogue, uint32_t flag) {
    if constexpr (can_join(kTile)) {
      if (work.k_end - work.k_begin != p.k_iterations && p.exchange == 1) {
        Parts<kOperand, kTile> parts{p, work, static_cast<int>(rank) * kBlocks + block, flag};
        chunk_mask = parts.join(acc);
      }
    }
    if (chunk_mask != 0) {
      const int row0 = (Ring::first_row_block(origin.cluster_row, rank) + block) * kBlockRows;
      epilogue.store(acc, row0, Ring::first_token(origin.token, rank), chunk_mask);
    }
  }

  // Rows of the last tile of tokens that nothing is loaded into. What they hold is multiplied, though nothing comes of
  // it, and zeros take less power. (Behind other tiles of the same block they hold old tokens.)
  static __device__ __forceinline__ void clear_tail(const KernelParams& p, const Pipe& pipe, int cluster, int clusters,
                                                    uint32_t rank) {
    WorkList list(p, cluster, clusters);
    Work work;
    if (!list.next(work)) return;
    const int rows = Ring::token_rows(p, Ring::first_token(tile_origin(p, work.tile).token, rank));
    constexpr int kThreads = kStartsEarly ? kConsumers * 128 : threads(kTile);
    const int pieces = (kTokens - rows) * 8;  // of 16 bytes
    if (pieces == 0) return;
    const auto clear = [&](uint32_t first) {
      for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads)
        ptx::store_shared_16(first + i * 16, make_uint4(0, 0, 0, 0));
    };
    for (int stage = 0; stage < kStages; ++stage) {
      const uint32_t first = pipe.ring + stage * kStageBytes + Ring::kWeightBytes + rows * 128;
      clear(first);
      if constexpr (Ring::kSlices == 2) clear(first + Ring::kTokenBytes);
    }
    ptx::fence_async_shared();
  }

  static __device__ __forceinline__ void run(const KernelParams& p, uint8_t* memory) {
    const uint32_t base = ptx::shared_address(memory);
    Pipe pipe;
    pipe.ring = base;
    const uint32_t staging = base + Ring::kRingBytes;
    const uint32_t scales = staging + kConsumers * staging_bytes(kTile);
    const uint32_t bars = scales + kConsumers * kTokens * 4;
    pipe.full = bars;
    pipe.empty = bars + kStages * 8;
    // A cluster's ranks: kCluster neighbours along n share X; with exchange, one such group for each part of k.
    const uint32_t full_rank = ptx::warp_uniform(ptx::cluster_rank());
    const uint32_t rank = full_rank % kCluster;
    pipe.group = full_rank - rank;
    const int cluster = static_cast<int>(blockIdx.x) / kCluster;
    const int clusters = static_cast<int>(gridDim.x) / kCluster;

    if constexpr (kStartsEarly) {
      if (threadIdx.x < kConsumers * 128) clear_tail(p, pipe, cluster, clusters, rank);
    } else {
      clear_tail(p, pipe, cluster, clusters, rank);
    }
    if (threadIdx.x == kConsumers * 128) {
      ptx::prefetch_tensor_map(p.m_tiles > 1 ? &p.x : &p.x_tail);
      for (int s = 0; s < kStages; ++s) {
        ptx::mbarrier_init(pipe.full + s * 8, 1);
        ptx::mbarrier_init(pipe.empty + s * 8, kConsumers * 4 * kCluster);
      }
      if (p.exchange > 1) {
        ptx::mbarrier_init(pipe.free_bar(), (p.exchange - 1) * kConsumers * 4);
        ptx::mbarrier_init(pipe.parts_bar(), 1);
      }
      ptx::mbarrier_init_fence();
    }
    if constexpr (kStartsEarly) {
      __syncwarp();
      if (threadIdx.x / 32 == kConsumers * 4) {
        ptx::named_barrier_arrive(kStartBarrier, threads(kTile));
      } else {
        ptx::named_barrier(kStartBarrier, threads(kTile));
      }
    } else if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    if (p.exchange > 1) ptx::cluster_arrive_relaxed();  // exchange_parts() waits
    ptx::launch_dependents();
    if (ptx::warp_uniform(static_cast<int>(threadIdx.x) / 32) >= kConsumers * 4) {
      if constexpr (!kLean && kConsumers > 1) ptx::release_registers<producer_registers(kTile)>();
      Producer<kOperand, kTile>::produce(p, pipe, cluster, clusters, rank);
      if (p.exchange > 1) ptx::cluster_wait();
    } else {
      if constexpr (!kLean && kConsumers > 1) ptx::claim_registers<consumer_registers(kTile)>();
      consume(p, pipe, staging, scales, cluster, clusters, rank);
    }
    // A block must not leave while another may still write into its shared memory or arrive at its barriers. (In
    // exchange_parts() it waits for both.)
    if constexpr (kCluster > 1) ptx::cluster_sync();
  }
};

// (nvcc's host stubs cannot name a class template argument.)
template <Operand kOperand, int kTokens, int kRowBlocks, int kCluster, int kBlocksPerSm, int kWarpgroups, bool kAlong>
__global__ __launch_bounds__(threads(Tile{kTokens, kRowBlocks, kCluster, kBlocksPerSm, kWarpgroups, kAlong}),
                             lean(Tile{kTokens, kRowBlocks, kCluster, kBlocksPerSm, kWarpgroups, kAlong})
                                 ? 2
                                 : 1) void nested_gemm(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Kernel<kOperand, Tile{kTokens, kRowBlocks, kCluster, kBlocksPerSm, kWarpgroups, kAlong}>::run(p, memory);
}
template <Operand kOperand, Tile t>
constexpr auto kFunction =
    &nested_gemm<kOperand, t.tokens, t.row_blocks, t.cluster, t.blocks_per_sm, t.warpgroups, t.along_tokens>;

// Of the tiles that exist in a mode, every kFiles-th from kFile on: widths, which is what compile time depends on, are
// spread evenly over the files.
template <Mode kMode, Join kJoin, int kFile, int kFiles>
constexpr bool in_file(size_t index) {
  int before = 0;
  for (size_t i = 0; i < index; ++i) before += exists(kTiles[i], kMode, kJoin) ? 1 : 0;
  return exists(kTiles[index], kMode, kJoin) && before % kFiles == kFile;
}

template <Operand kOperand, Mode kMode, Join kJoin, int kFile, int kFiles, size_t... kIndex>
auto make_entries(std::index_sequence<kIndex...>) {
  std::array<KernelEntry, (0 + ... + (in_file<kMode, kJoin, kFile, kFiles>(kIndex) ? 1 : 0))> out{};
  size_t used = 0;
  const auto add = [&]<size_t i>() {
    constexpr Tile t = kTiles[i];
    if constexpr (in_file<kMode, kJoin, kFile, kFiles>(i)) {
      out[used++] = {kOperand, t, reinterpret_cast<const void*>(kFunction<kOperand, t>), threads(t),
                     Ring<kOperand, t>::kSharedBytes};
    }
  };
  (add.template operator()<kIndex>(), ...);
  return out;
}

template <Operand kOperand, Mode kMode, Join kJoin, int kFile, int kFiles>
std::span<const KernelEntry> entries_of_file() {
  static const auto entries =
      make_entries<kOperand, kMode, kJoin, kFile, kFiles>(std::make_index_sequence<kTiles.size()>());
  return entries;
}

}  // namespace nfp::cuda
