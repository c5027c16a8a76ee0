// D[m, n] = X[m, k] * W[n, k]^T from a nested weight, for sm_90a. Two modes share everything but the inner loop:
//   FP16/BF16: both byte planes; the weight is rebuilt in registers and is wgmma's A operand from there.
//   E4M3:      the upper plane is wgmma's A operand where the copy engine put it.
// Weight rows are wgmma's M = 64 and tokens its N, so the accumulators hold D^T.
//
// Producer threads fill a ring of stages; two or three consumer warpgroups multiply. A stage of shared memory:
//   FP16: [row block][4096 B upper] then [row block][4096 B lower], then X [tokens][128 B], 64 k
//   E4M3: [row block][2 x 4096 B upper],                           then X [tokens][128 B], 128 k
// Barriers: full[s] counts the copies' bytes, empty[s] the consumer warps of every block in the cluster.
//
// All blocks walk the same list of work (WorkList): first shares of the tiles that are cut along k, then whole tiles.
// Parts of a cut tile go to global memory, and the block that finishes last adds them in order of k, so results do not
// depend on who is last.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "backend/cuda/gemm/config.h"
#include "backend/cuda/gemm/epilogue.cuh"
#include "backend/cuda/gemm/join.cuh"
#include "backend/cuda/gemm/kernel_params.h"
#include "backend/cuda/gemm/kernels.h"
#include "backend/cuda/gemm/rebuild.cuh"
#include "backend/cuda/gemm/work.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nfp::cuda {

// Registers are shared out by quarters of an SM, so a ninth warp at one block per SM would cap everyone at 168: there
// the producer is a whole warpgroup, and hands its registers over. Claiming more than was released would wait for ever.
constexpr int entry_registers(int consumers) { return 65536 / ((consumers + 1) * 128) / 8 * 8; }
// (A single consumer has 256 from the start.)
constexpr int consumer_registers(int consumers) { return consumers == 3 ? 160 : 232; }
constexpr int producer_registers(int consumers) { return consumers == 3 ? 32 : 40; }
static_assert(2 * consumer_registers(2) + producer_registers(2) <= 3 * entry_registers(2));
static_assert(3 * consumer_registers(3) + producer_registers(3) <= 4 * entry_registers(3));
// Lean kernels (config.h) need no such exchange.
constexpr int threads(const Tile& t) { return t.warpgroups * 128 + (lean(t) ? 32 : 128); }
// E4M3 products summed in the tensor core before they are added to FP32 registers (docs/kernels.md has the error per
// interval). With two row blocks per warpgroup registers force every stage (128).
inline constexpr int kPromotionStages = 4;

template <Operand kOperand, Tile kTile>
struct Kernel {
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kRowBlocks = kTile.row_blocks;
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kConsumers = kTile.warpgroups;
  static constexpr bool kFp8 = kOperand == Operand::kE4M3 || kOperand == Operand::kE4M3Promoted;
  static constexpr bool kLean = lean(kTile);
  static constexpr int kStages = stages(kTile);
  static constexpr int kWeightBytes = kTile.rows() * 128;
  static constexpr int kStageBytes = stage_bytes(kTile);
  static constexpr int kBlocks = kConsumers * kRowBlocks;  // of 64 rows in this thread block
  using Mma = ptx::Wgmma<kTokens>;
  static_assert(kStages >= 3);

  struct Pipe {
    uint32_t ring, full, empty;
    uint32_t group;  // first rank of the blocks that share X
    int stage = 0;
    uint32_t parity = 0;
    __device__ uint32_t full_bar() const { return full + stage * 8; }
    __device__ uint32_t empty_bar() const { return empty + stage * 8; }
    __device__ uint32_t data() const { return ring + stage * kStageBytes; }
    __device__ void advance() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  // ---- producers: one thread, or where a whole warpgroup is there one each for upper bytes, lower bytes and tokens
  // ----
  static constexpr int kCopyBytes = kFp8 ? 2 * kBlockBytes : kBlockBytes;  // per row block and plane
  struct Sources {
    int64_t offset[kBlocks];  // in a plane
  };
  static __device__ __forceinline__ Sources sources(const KernelParams& p, int tile, int iteration, uint32_t rank) {
    const int first = (tile_origin(p, tile).cluster_row * kCluster + static_cast<int>(rank)) * kBlocks;
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
                                                    uint64_t policy) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      ptx::bulk_load(dst + b * kCopyBytes, plane + s.offset[b], kCopyBytes, bar, policy);
  }
  static __device__ __forceinline__ void step(Sources& s) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) s.offset[b] += kCopyBytes;
  }
  static __device__ __forceinline__ void load_tokens(const KernelParams& p, const Pipe& pipe, int token0, int iteration,
                                                     uint32_t rank) {
    constexpr int kElements = kFp8 ? 128 : 64;
    const uint32_t dst = pipe.data() + kWeightBytes;
    if constexpr (kCluster == 1) {
      ptx::tensor_load_2d(dst, &p.x, iteration * kElements, token0, pipe.full_bar(), ptx::kEvictLast);
    } else {
      constexpr int kShare = kTokens / kCluster;
      ptx::tensor_load_2d_multicast(dst + rank * kShare * 128, &p.x, iteration * kElements,
                                    token0 + static_cast<int>(rank) * kShare, pipe.full_bar(),
                                    static_cast<uint16_t>(((1 << kCluster) - 1) << pipe.group), ptx::kEvictLast);
    }
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
      const int token = tile_origin(p, work.tile).token * kTokens;
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        ptx::mbarrier_wait(pipe.empty_bar(), pipe.parity);
        if constexpr (kRole == Role::kUppers) {
          ptx::mbarrier_expect(pipe.full_bar(), kStageBytes);
          load_plane(p.upper, from, pipe.data(), pipe.full_bar(), policy);
        } else if constexpr (kRole == Role::kLowers) {
          load_plane(p.lower, from, pipe.data() + kBlocks * kCopyBytes, pipe.full_bar(), policy);
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
    const auto load_weights = [&](Sources& from, const Pipe& at) {
      ptx::mbarrier_expect(at.full_bar(), kStageBytes);
      load_plane(p.upper, from, at.data(), at.full_bar(), policy);
      if constexpr (!kFp8) load_plane(p.lower, from, at.data() + kBlocks * kCopyBytes, at.full_bar(), policy);
      step(from);
    };
    int early = 0;
    {
      WorkList ahead(p, cluster, clusters);
      Pipe fill = pipe;
      Work work;
      while (early < kStages && ahead.next(work)) {
        Sources from = sources(p, work.tile, work.k_begin, rank);
#pragma unroll 1
        for (int k = work.k_begin; k < work.k_end && early < kStages; ++k, ++early) {
          load_weights(from, fill);
          fill.advance();
        }
      }
    }
    ptx::dependency_wait();
    WorkList list(p, cluster, clusters);
    Work work;
    pipe.parity = 1;
    while (list.next(work)) {
      const int token = tile_origin(p, work.tile).token * kTokens;
      const int skipped = min(early, work.k_end - work.k_begin);
      early -= skipped;
      Sources from = sources(p, work.tile, work.k_begin + skipped, rank);
#pragma unroll 1
      for (int k = work.k_begin; k < work.k_end; ++k) {
        if (k >= work.k_begin + skipped) {
          ptx::mbarrier_wait(pipe.empty_bar(), pipe.parity);
          load_weights(from, pipe);
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
      if (!kFp8 && ptx::elect_one()) produce_one<Role::kLowers>(p, pipe, cluster, clusters, rank);
    } else if (warp == 2) {
      if (ptx::elect_one()) produce_one<Role::kActivations>(p, pipe, cluster, clusters, rank);
    }
    __syncwarp();
  }

  // ---- consumers: a warpgroup each ----
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

  // Weights of 64 rows by 64 k as A operands: [k16 step][register].
  using Fragment = uint32_t[4][4];
  struct RawWeights {  // of rows `row` and row + 8
    uint4 upper[2], lower[2];
  };
  static __device__ __forceinline__ RawWeights load_weights(uint32_t upper) {
    const uint32_t lower = upper + kBlocks * kBlockBytes;
    // Row row + 8 has the same swizzle, 512 bytes on.
    return {{ptx::load_shared_16(upper), ptx::load_shared_16(upper + 512)},
            {ptx::load_shared_16(lower), ptx::load_shared_16(lower + 512)}};
  }
  static __device__ __forceinline__ void rebuild_all(const RawWeights& raw, uint32_t one, Fragment& a) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t us[4] = {raw.upper[row].x, raw.upper[row].y, raw.upper[row].z, raw.upper[row].w};
      const uint32_t ls[4] = {raw.lower[row].x, raw.lower[row].y, raw.lower[row].z, raw.lower[row].w};
#pragma unroll
      for (int step = 0; step < 4; ++step) rebuild<kOperand>(us[step], ls[step], one, a[step][row], a[step][2 + row]);
    }
  }
  static __device__ __forceinline__ void issue_f16(float (&acc)[kTokens / 2], const Fragment& a, uint32_t tokens_low) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t tokens = ptx::descriptor_128b_from_low(tokens_low + step * 2);
      if constexpr (kOperand == Operand::kBF16Biased || kOperand == Operand::kBF16Free) {
        Mma::rs_bf16(acc, a[step], tokens, 1);
      } else {
        Mma::rs_f16(acc, a[step], tokens, 1);
      }
    }
  }

  // Warpgroups take turns to hand the tensor cores a stage's products, and rebuild weights while the others' run: with
  // their products mixed, all would wait, and then all would rebuild. Barriers kFirstTurn + warpgroup.
  static constexpr int kFirstTurn = 4;
  static constexpr bool kTurns = kConsumers > 1;
  // Sums, two fragments, a stage as it was loaded, and some 45 more; and a ring deep enough to keep one stage longer.
  static constexpr bool kWholeStages =
      kRowBlocks == 1 && !kLean && kTokens < 256 && kTokens / 2 + 2 * 16 + 16 + 45 <= consumer_registers(kConsumers);

  // One row block: a whole stage's weights are rebuilt while the stage before is multiplied; two fragments take turns.
  static __device__ __forceinline__ void multiply_f16_stages(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe,
                                                             int iterations, int warpgroup, uint32_t one) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4;
    const uint32_t weights = pipe.ring + row * kBlockK + (((lane % 4) ^ ((row / 2) % 4)) * 16) +
                             static_cast<uint32_t>(warpgroup * kRowBlocks * kBlockBytes);
    const uint32_t tokens = ptx::descriptor_low(pipe.ring + kWeightBytes);
    Fragment even, odd;
#pragma unroll
    for (int j = 0; j < kTokens / 2; ++j) acc[0][j] = 0.0f;
    const auto issue = [&](const Fragment& a, int stage) {
      if constexpr (kTurns) {
        ptx::named_barrier(kFirstTurn + warpgroup, 256);
      }
      ptx::wgmma_fence();
      issue_f16(acc[0], a, tokens + stage * (kStageBytes / 16));
      ptx::wgmma_commit();
      if constexpr (kTurns) {
        ptx::named_barrier_arrive(kFirstTurn + (warpgroup + 1) % kConsumers, 256);
      }
    };
    ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
    rebuild_all(load_weights(weights + pipe.stage * kStageBytes), one, even);
    int previous = 0;
    for (int i = 0; i < iterations / 2; ++i) {
      const int first = pipe.stage;
      issue(even, first);
      pipe.advance();
      ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
      RawWeights raw = load_weights(weights + pipe.stage * kStageBytes);
      ptx::wgmma_wait<1>();  // the stage before is done, and `odd` is free
      if (i > 0) release(pipe, previous, thread);
      rebuild_all(raw, one, odd);
      issue(odd, pipe.stage);
      previous = pipe.stage;
      // Where there is no next stage, this one is loaded again for nothing: a branch would serialise the products.
      Pipe next = pipe;
      next.advance();
      const bool more = 2 * i + 2 < iterations;
      ptx::mbarrier_wait(more ? next.full_bar() : pipe.full_bar(), more ? next.parity : pipe.parity);
      raw = load_weights(weights + (more ? next.stage : pipe.stage) * kStageBytes);
      pipe = next;
      ptx::wgmma_wait<1>();
      release(pipe, first, thread);
      rebuild_all(raw, one, even);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(acc[0]);
    if (iterations > 1) release(pipe, previous, thread);
    if (iterations % 2 != 0) {
      issue(even, pipe.stage);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(acc[0]);
      release(pipe, pipe.stage, thread);
      pipe.advance();
    }
  }

  // Half a stage at a time, for kernels without the registers for two stages' weights, or with two row blocks.
  static __device__ __forceinline__ void multiply_f16_halves(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe,
                                                             int iterations, int warpgroup, uint32_t one) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4;
    // Row row + 8 has the same swizzle, 512 bytes on.
    const uint32_t offset =
        row * kBlockK + (((lane % 4) ^ ((row / 2) % 4)) * 16) + warpgroup * kRowBlocks * kBlockBytes;
    uint32_t fragment[2][2][4];
    int accumulate = 0;
    int previous = 0;
    for (int i = 0; i < iterations; ++i) {
      ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
      const uint32_t tokens = pipe.data() + kWeightBytes;
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        const uint32_t upper = pipe.data() + offset + b * kBlockBytes;
        const uint32_t lower = upper + kBlocks * kBlockBytes;
        const uint4 u0 = ptx::load_shared_16(upper), u1 = ptx::load_shared_16(upper + 512);
        const uint4 l0 = ptx::load_shared_16(lower), l1 = ptx::load_shared_16(lower + 512);
        const uint32_t us[2][4] = {{u0.x, u0.y, u0.z, u0.w}, {u1.x, u1.y, u1.z, u1.w}};
        const uint32_t ls[2][4] = {{l0.x, l0.y, l0.z, l0.w}, {l1.x, l1.y, l1.z, l1.w}};
        // Two k16 steps at a time: rebuilt while the two before are multiplied.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            uint32_t(&a)[4] = fragment[half][s];
            rebuild<kOperand>(us[0][2 * half + s], ls[0][2 * half + s], one, a[0], a[2]);
            rebuild<kOperand>(us[1][2 * half + s], ls[1][2 * half + s], one, a[1], a[3]);
          }
          ptx::wgmma_fence();
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint64_t b_operand = ptx::descriptor_128b(tokens + (2 * half + s) * 32);
            const int keep = s == 1 || half == 1 ? 1 : accumulate;
            if constexpr (kOperand == Operand::kBF16Biased || kOperand == Operand::kBF16Free) {
              Mma::rs_bf16(acc[b], fragment[half][s], b_operand, keep);
            } else {
              Mma::rs_f16(acc[b], fragment[half][s], b_operand, keep);
            }
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();  // the pair before this one is done, and its fragment registers are free
          if (b == 0 && half == 0 && i > 0) release(pipe, previous, thread);
        }
      }
      accumulate = 1;
      previous = pipe.stage;
      pipe.advance();
    }
    ptx::wgmma_wait<0>();
    release(pipe, previous, thread);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) ptx::pin_registers(acc[b]);
  }

  static __device__ __forceinline__ void issue_e4m3(float (&acc)[kTokens / 2], uint32_t weights, uint32_t tokens,
                                                    int accumulate) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Mma::ss_e4m3(acc, ptx::descriptor_64b(weights + step / 2 * kBlockBytes + step % 2 * 32),
                   ptx::descriptor_128b(tokens + step * 32), step == 0 ? accumulate : 1);
    }
  }

  static __device__ __forceinline__ void multiply_e4m3(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe,
                                                       int iterations, int warpgroup) {
    const int thread = threadIdx.x % 128;
    int previous = 0;
    for (int i = 0; i < iterations; ++i) {
      ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        issue_e4m3(acc[b], pipe.data() + (warpgroup * kRowBlocks + b) * 2 * kBlockBytes, pipe.data() + kWeightBytes,
                   i > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (i > 0) release(pipe, previous, thread);
      previous = pipe.stage;
      pipe.advance();
    }
    ptx::wgmma_wait<0>();
    release(pipe, previous, thread);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) ptx::pin_registers(acc[b]);
  }

  // The tensor core's sum is added to FP32 registers at multiples of the interval counted from k = 0, wherever a share
  // begins.
  static __device__ __forceinline__ void multiply_e4m3_promoted(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe,
                                                                int first_iteration, int iterations, int warpgroup) {
    const int thread = threadIdx.x % 128;
    float sum[kTokens / 2];
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kTokens / 2; ++j) acc[b][j] = 0.0f;
    }
    int i = 0;
    while (i < iterations) {
      const int count =
          kRowBlocks == 1 ? min(iterations - i, kPromotionStages - (first_iteration + i) % kPromotionStages) : 1;
      i += count;
      const int first_stage = pipe.stage;
      if constexpr (kRowBlocks == 1) {
        int held = first_stage;
        for (int c = 0; c < count; ++c) {
          ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
          ptx::wgmma_fence();
          issue_e4m3(sum, pipe.data() + warpgroup * 2 * kBlockBytes, pipe.data() + kWeightBytes, c > 0);
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          if (c > 0) release(pipe, held, thread);
          held = pipe.stage;
          pipe.advance();
        }
        ptx::wgmma_wait<0>();
        ptx::pin_registers(sum);
        release(pipe, held, thread);
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) acc[0][j] += sum[j];
      } else {
        ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          ptx::wgmma_fence();
          issue_e4m3(sum, pipe.data() + (warpgroup * kRowBlocks + b) * 2 * kBlockBytes, pipe.data() + kWeightBytes, 0);
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          ptx::pin_registers(sum);
          if (b + 1 == kRowBlocks) release(pipe, first_stage, thread);
#pragma unroll
          for (int j = 0; j < kTokens / 2; ++j) acc[b][j] += sum[j];
        }
        pipe.advance();
      }
    }
  }

  static __device__ __forceinline__ void consume(const KernelParams& p, Pipe pipe, uint32_t staging, uint32_t scales,
                                                 uint32_t flags, int cluster, int clusters, uint32_t rank) {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    Epilogue<kTile, kFp8> epilogue{p, staging + warpgroup * staging_bytes(kTile), scales + warpgroup * kTokens * 4,
                                   warpgroup};
    if constexpr (!kFp8 && kWholeStages && kTurns) {  // the first turn is the first warpgroup's
      if (warpgroup == kConsumers - 1) ptx::named_barrier_arrive(kFirstTurn, 256);
    }
    WorkList list(p, cluster, clusters);
    Work work;
    while (list.next(work)) {
      float acc[kRowBlocks][kTokens / 2];
      const int iterations = work.k_end - work.k_begin;
      const TileOrigin origin = tile_origin(p, work.tile);
      if constexpr (kFp8) {
        ptx::dependency_wait();  // the scales may come from the kernel before
        epilogue.prepare(origin.token * kTokens);
      }
      if constexpr (kOperand == Operand::kE4M3Promoted) {
        multiply_e4m3_promoted(acc, pipe, work.k_begin, iterations, warpgroup);
      } else if constexpr (kFp8) {
        multiply_e4m3(acc, pipe, iterations, warpgroup);
      } else {
        if constexpr (kWholeStages) {
          multiply_f16_stages(acc, pipe, iterations, warpgroup, p.one);
        } else {
          multiply_f16_halves(acc, pipe, iterations, warpgroup, p.one);
        }
      }
      ptx::dependency_wait();  // what follows touches memory that the kernel before may own
      const uint32_t chunk_mask = p.exchange > 1 ? exchange_parts(p, acc, pipe, rank) : ~0u;
      finish(p, acc[0], work, origin, chunk_mask, warpgroup * kRowBlocks, rank, epilogue, flags + warpgroup * 4,
             warpgroup);
      if constexpr (kRowBlocks == 2) {
        finish(p, acc[1], work, origin, chunk_mask, warpgroup * kRowBlocks + 1, rank, epilogue, flags + warpgroup * 4,
               warpgroup);
      }
    }
    if (ptx::elect_one()) ptx::store_wait_read<0>();  // shared memory must outlive the copies from it
  }

  // The blocks of a cluster that hold parts of one tile give each other the sums of the tokens that the other stores,
  // and add what they receive in order of k. Returns the chunks that this block stores. The ring is free: this tile was
  // the block's only work.
  static __device__ __forceinline__ uint32_t exchange_parts(const KernelParams& p,
                                                            float (&acc)[kRowBlocks][kTokens / 2], const Pipe& pipe,
                                                            uint32_t rank) {
    constexpr int kChunks = chunks(kTile);
    constexpr int kChunkBlocks = staging_tokens(kTile) / 8;
    const int splits = p.exchange;
    const int me = static_cast<int>(pipe.group) / kCluster;
    const int most = (kChunks + splits - 1) / splits;
    const uint32_t mine = pipe.ring + threadIdx.x * 16;
    // [row block][part][chunk of the owner][8 tokens][thread] of 16 bytes
    constexpr int kRow = kConsumers * 128 * 16;
    const auto place = [&](int b, int part, int chunk) {
      return static_cast<uint32_t>((b * splits + part) * most + chunk) * (kChunkBlocks * kRow);
    };
    ptx::cluster_sync();  // everybody's ring is free
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int owner = chunk * splits / kChunks;
      if (owner == me) continue;
      const uint32_t remote = ptx::map_to_rank(mine, static_cast<uint32_t>(owner) * kCluster + rank);
      const int index = chunk - (owner * kChunks + splits - 1) / splits;
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < kChunkBlocks; ++j) {
          const float* v = &acc[b][(chunk * kChunkBlocks + j) * 4];
          ptx::store_cluster_16(remote + place(b, me, index) + j * kRow, v[0], v[1], v[2], v[3]);
        }
      }
    }
    ptx::cluster_sync();  // everything has arrived
    uint32_t mask = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * splits / kChunks != me) continue;
      mask |= 1u << chunk;
      const int index = chunk - (me * kChunks + splits - 1) / splits;
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < kChunkBlocks; ++j) {
          float* own = &acc[b][(chunk * kChunkBlocks + j) * 4];
          float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
          for (int part = 0; part < splits; ++part) {
            float4 v = make_float4(own[0], own[1], own[2], own[3]);
            if (part != me) {
              const uint4 bits = ptx::load_shared_16(mine + place(b, part, index) + j * kRow);
              v = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                              __uint_as_float(bits.w));
            }
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
          }
          own[0] = sum.x;
          own[1] = sum.y;
          own[2] = sum.z;
          own[3] = sum.w;
        }
      }
    }
    return mask;
  }

  static __device__ __forceinline__ void finish(const KernelParams& p, float (&acc)[kTokens / 2], const Work& work,
                                                const TileOrigin& origin, uint32_t chunk_mask, int block, uint32_t rank,
                                                Epilogue<kTile, kFp8>& epilogue, uint32_t flag, int warpgroup) {
    bool complete = true;
    if (work.k_end - work.k_begin != p.k_iterations && p.exchange == 1) {
      constexpr int kSlotBlocks = kCluster * kBlocks;
      const int slot_block = static_cast<int>(rank) * kBlocks + block;
      complete = join_parts(p, acc, work, slot_block, kSlotBlocks, p.counters + work.tile * kSlotBlocks + slot_block,
                            flag, warpgroup);
    }
    if (complete) {
      const int row0 = ((origin.cluster_row * kCluster + static_cast<int>(rank)) * kBlocks + block) * kBlockRows;
      epilogue.store(acc, row0, origin.token * kTokens, chunk_mask);
    }
  }

  static __device__ __forceinline__ void run(const KernelParams& p, uint8_t* memory) {
    const uint32_t base = ptx::shared_address(memory);
    Pipe pipe;
    pipe.ring = base;
    const uint32_t staging = base + kStages * kStageBytes;
    const uint32_t scales = staging + kConsumers * staging_bytes(kTile);
    const uint32_t bars = scales + kConsumers * kTokens * 4;
    pipe.full = bars;
    pipe.empty = bars + kStages * 8;
    const uint32_t flags = bars + kStages * 16;
    // A cluster's ranks: kCluster neighbours along n share X; with exchange, one such group for each part of k.
    const uint32_t full_rank = ptx::cluster_rank();
    const uint32_t rank = full_rank % kCluster;
    pipe.group = full_rank - rank;
    const int cluster = static_cast<int>(blockIdx.x) / kCluster;
    const int clusters = static_cast<int>(gridDim.x) / kCluster;

    if (threadIdx.x == kConsumers * 128) {
      ptx::prefetch_tensor_map(&p.x);
      for (int s = 0; s < kStages; ++s) {
        ptx::mbarrier_init(pipe.full + s * 8, 1);
        ptx::mbarrier_init(pipe.empty + s * 8, kConsumers * 4 * kCluster);
      }
      ptx::mbarrier_init_fence();
    }
    if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      ptx::cluster_sync();
    }
    ptx::launch_dependents();
    if (threadIdx.x >= kConsumers * 128) {
      if constexpr (!kLean && kConsumers > 1) ptx::release_registers<producer_registers(kConsumers)>();
      produce(p, pipe, cluster, clusters, rank);
      if (p.exchange > 1) {
        ptx::cluster_sync();
        ptx::cluster_sync();
      }
    } else {
      if constexpr (!kLean && kConsumers > 1) ptx::claim_registers<consumer_registers(kConsumers)>();
      consume(p, pipe, staging, scales, flags, cluster, clusters, rank);
    }
    // A block must not leave while another may still write into its shared memory or arrive at its barriers.
    // (With exchange the second meeting was the last use of another block's memory.)
    if constexpr (kCluster > 1) {
      if (p.exchange == 1) ptx::cluster_sync();
    }
  }
};

// (nvcc's host stubs cannot name a class template argument.)
template <Operand kOperand, int kTokens, int kRowBlocks, int kCluster, int kBlocksPerSm, int kWarpgroups>
__global__ __launch_bounds__(threads(Tile{kTokens, kRowBlocks, kCluster, kBlocksPerSm, kWarpgroups}),
                             lean(Tile{kTokens, kRowBlocks, kCluster, kBlocksPerSm, kWarpgroups})
                                 ? 2
                                 : 1) void nested_gemm(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Kernel<kOperand, Tile{kTokens, kRowBlocks, kCluster, kBlocksPerSm, kWarpgroups}>::run(p, memory);
}
template <Operand kOperand, Tile t>
constexpr auto kFunction = &nested_gemm<kOperand, t.tokens, t.row_blocks, t.cluster, t.blocks_per_sm, t.warpgroups>;

template <Operand kOperand, Mode kMode, size_t... kIndex>
auto make_entries(std::index_sequence<kIndex...>) {
  std::array<KernelEntry, (0 + ... + (exists(kTiles[kIndex], kMode) ? 1 : 0))> out{};
  size_t used = 0;
  const auto add = [&]<size_t i>() {
    constexpr Tile t = kTiles[i];
    if constexpr (exists(t, kMode)) {
      out[used++] = {kOperand, t, reinterpret_cast<const void*>(kFunction<kOperand, t>), threads(t)};
    }
  };
  (add.template operator()<kIndex>(), ...);
  return out;
}

// Every tile of kTiles that exists in the mode.
template <Operand kOperand, Mode kMode>
std::span<const KernelEntry> all_entries() {
  static const auto entries = make_entries<kOperand, kMode>(std::make_index_sequence<kTiles.size()>());
  return entries;
}

}  // namespace nfp::cuda
