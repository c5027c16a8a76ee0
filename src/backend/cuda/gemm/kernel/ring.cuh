// How a block shares its registers among producers and consumers, and the ring of stages in shared memory between them.
//
// A stage of shared memory:
//   FP16: [row block][4096 B upper] then [row block][4096 B lower], then X [tokens][128 B], 64 k
//   E4M3: [row block][2 x 4096 B upper],                           then X [tokens][128 B], 128 k
//   W8A16: [row block][2 x 4096 B upper],                          then X [2][tokens][128 B], 128 k (few tokens)
//          [row block][4096 B upper],                              then X [tokens][128 B], 64 k
// Barriers: full[s] counts the copies' bytes, empty[s] the consumer warps of every block in the cluster.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/kernel/kernels.h"
#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/ptx/barrier.cuh"

namespace nfp::cuda {

// Registers are shared out by quarters of an SM, so a ninth warp at one block per SM would cap everyone at 168: there
// the producer is a whole warpgroup, and hands its registers over. Claiming more than was released would wait for ever.
constexpr int entry_registers(int consumers) { return 65536 / ((consumers + 1) * 128) / 8 * 8; }
// (A single consumer has 256 from the start.)
constexpr int consumer_registers(const Tile& t) { return t.warpgroups == 3 ? 160 : halves(t) == 2 ? 240 : 232; }
constexpr int producer_registers(const Tile& t) { return t.warpgroups == 3 ? 32 : halves(t) == 2 ? 24 : 40; }
// Lean kernels (config.h) need no such exchange.
constexpr int threads(const Tile& t) { return t.warpgroups * 128 + (lean(t) ? 64 : 128); }

template <Operand kOperand, Tile kTile>
struct Ring {
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kRowBlocks = kTile.row_blocks;
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kConsumers = kTile.warpgroups;
  static constexpr bool kFp8 = kOperand == Operand::kE4M3 || kOperand == Operand::kE4M3Promoted;
  static constexpr bool kLean = lean(kTile);
  static constexpr bool kUppersAlone = reads_uppers_alone(kOperand);
  static constexpr bool kLowers = !kFp8 && !kUppersAlone;
  static constexpr bool kAlongTokens = kTile.along_tokens;
  static constexpr int kSlices = kUppersAlone && kTokens <= 64 ? 2 : 1;        // of 64 k of FP16 tokens in a stage
  static constexpr int kStagesPerStep = kUppersAlone && kSlices == 1 ? 2 : 1;  // of the schedule
  static constexpr int kWeightBytes = kTile.rows() * (kStagesPerStep == 2 ? 64 : 128);
  static constexpr int kTokenBytes = kTokens * 128;  // of a slice
  static constexpr int kStageBytes = kWeightBytes + kSlices * kTokenBytes;
  static constexpr int kLoaders = loaders(kTile);         // blocks that share the tokens that they load,
  static constexpr int kLoadTokens = load_tokens(kTile);  // so many at once
  static constexpr int kMostStages = 24;
  static constexpr int kFit = (most_shared_bytes(kTile) - fixed_bytes(kTile)) / kStageBytes;
  static constexpr int kStages = !kUppersAlone ? stages(kTile) : kFit < kMostStages ? kFit : kMostStages;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = fixed_bytes(kTile) + kRingBytes;
  static constexpr int kBlocks = kConsumers * kRowBlocks;  // of 64 rows in this thread block
  static_assert((kSharedBytes + 1024) * kTile.blocks_per_sm <= 228 * 1024);
  static_assert(kStages >= 3 && kStages * 16 + 16 + kConsumers * 4 <= 512);
  static_assert(kConsumers == 1 || kConsumers * consumer_registers(kTile) + producer_registers(kTile) <=
                                       (kConsumers + 1) * entry_registers(kConsumers));

  // Of the tile that a cluster works at, this block's: `row` and `token` are in units of clusters.
  static __device__ __forceinline__ int first_row_block(int row, uint32_t rank) {
    return (kAlongTokens ? row : row * kCluster + static_cast<int>(rank)) * kBlocks;
  }
  static __device__ __forceinline__ int first_token(int token, uint32_t rank) {
    return (kAlongTokens ? token * kCluster + static_cast<int>(rank) : token) * kTokens;
  }

  // Rows of tokens that arrive in this block for the tile that begins at `token`. (Of a cluster along tokens the last
  // blocks may have none.)
  static __device__ __forceinline__ int token_rows(const KernelParams& p, int token) {
    int rows = 0;
#pragma unroll
    for (int half = 0; half < halves(kTile); ++half) {
      const int first = token + half * kLoadTokens;
      rows += first < p.last_token ? kLoadTokens : first == p.last_token ? p.tail_rows * kLoaders : 0;
    }
    return rows;
  }

  static __device__ __forceinline__ int token_bytes(const KernelParams& p, int token) {
    return token_rows(p, token) * (kSlices * 128);
  }

  struct Pipe {
    uint32_t ring, full, empty;
    uint32_t group;  // first rank of the blocks that share X
    int stage = 0;
    uint32_t parity = 0;
    __device__ uint32_t full_bar() const { return full + stage * 8; }
    __device__ uint32_t empty_bar() const { return empty + stage * 8; }
    // Of exchange_parts(): that the others' rings are free, and that their parts have arrived.
    __device__ uint32_t free_bar() const { return empty + kStages * 8; }
    __device__ uint32_t parts_bar() const { return empty + kStages * 8 + 8; }
    // Of Parts.
    __device__ uint32_t flag(int warpgroup) const { return empty + kStages * 8 + 16 + warpgroup * 4; }
    __device__ uint32_t data() const { return ring + stage * kStageBytes; }
    __device__ void advance() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    __device__ void skip(int many) {  // as many times advance()
      const int at = stage + many;
      stage = at % kStages;
      parity ^= static_cast<uint32_t>(at / kStages) & 1;
    }
  };

  // Every warp answers for its own reads; wgmma.wait_group.sync, which comes before, has gathered its lanes.
  static __device__ __forceinline__ void release(const Pipe& pipe, int stage, int thread) {
    const uint32_t bar = pipe.empty + stage * 8;
    const int lane = thread % 32;
    if constexpr (kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(bar);
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_remote(bar, pipe.group + lane);
    }
  }
};

}  // namespace nfp::cuda
