// FP16 and BF16 modes' main loop: weights are rebuilt from two bytes in registers, from where wgmma takes them.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/pairs.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nfp::cuda {

// Four weights (k = 2c, 2c+1, 2c+8, 2c+9 of one row) as two pairs of FP16. See layout.h and docs/format.md.
// kWide: by sums in place of products with 1, which the many tokens' products leave the integer pipe time for.
template <Operand kOperand, bool kWide>
__device__ __forceinline__ void rebuild(uint32_t upper, uint32_t lower, uint32_t one, uint32_t& first,
                                        uint32_t& second) {
  constexpr bool kBf16 = has_bf16_tokens(kOperand);
  if constexpr (reads_uppers_alone(kOperand)) {
    // The code's value, 256 times the weight (KernelParams::weight_scale).
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(first), "=r"(second)
        : "r"(upper));
    if constexpr (kBf16) {
      first = to_bf16_pair(first);
      second = to_bf16_pair(second);
    }
    return;
  }
  constexpr bool kBiased = kOperand == Operand::kF16Biased || kOperand == Operand::kBF16Biased;
  const uint32_t t = kBiased ? upper : upper - ((lower >> 7) & 0x01010101u);
  const uint32_t high = ((t >> 1) & 0x3f3f3f3fu) | (t & 0x80808080u);
  first = __byte_perm(lower, high, 0x5140);
  second = __byte_perm(lower, high, 0x7362);
  if constexpr (kBiased) {
    if constexpr (kWide) {
      first -= 0x00400040u;
      second -= 0x00400040u;
    } else {
      // A product with 1 that the compiler cannot know keeps these off the integer pipe, which the rest fills.
      first = first * one - 0x00400040u;
      second = second * one - 0x00400040u;
    }
  }
  if constexpr (kBf16) {
    first = to_bf16_pair(first);
    second = to_bf16_pair(second);
  }
}

// kWidth: how many of a stage's tokens are multiplied. Sums of the others are left as they are.
template <Operand kOperand, Tile kTile, int kWidth = kTile.tokens>
struct MultiplyF16 {
  using Ring = nfp::cuda::Ring<kOperand, kTile>;
  using Pipe = typename Ring::Pipe;
  static constexpr auto kTokens = Ring::kTokens;
  static constexpr auto kRowBlocks = Ring::kRowBlocks;
  static constexpr auto kConsumers = Ring::kConsumers;
  static constexpr auto kLean = Ring::kLean;
  static constexpr auto kWeightBytes = Ring::kWeightBytes;
  static constexpr auto kStageBytes = Ring::kStageBytes;
  static constexpr auto kBlocks = Ring::kBlocks;
  static constexpr auto kHalfTokens = kWidth / halves(kTile);  // what one instruction multiplies
  using Mma = ptx::Wgmma<kHalfTokens>;
  using Sums = float[kWidth / 2];
  static constexpr bool kWide = kTokens >= 192;

  // Weights of 64 rows by 64 k as A operands: [k16 step][register].
  using Fragment = uint32_t[4][4];
  struct RawWeights {  // of rows `row` and row + 8
    uint4 upper[2], lower[2];
  };
  static __device__ __forceinline__ RawWeights load_weights(uint32_t upper) {
    const uint32_t lower = upper + kBlocks * kBlockBytes;
    // Row row + 8 has the same swizzle, 512 bytes on.
    RawWeights raw{{ptx::load_shared_16(upper), ptx::load_shared_16(upper + 512)}, {}};
    if constexpr (Ring::kLowers) {
      raw.lower[0] = ptx::load_shared_16(lower);
      raw.lower[1] = ptx::load_shared_16(lower + 512);
    }
    return raw;
  }
  static __device__ __forceinline__ void rebuild_all(const RawWeights& raw, uint32_t one, Fragment& a) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t us[4] = {raw.upper[row].x, raw.upper[row].y, raw.upper[row].z, raw.upper[row].w};
      const uint32_t ls[4] = {raw.lower[row].x, raw.lower[row].y, raw.lower[row].z, raw.lower[row].w};
#pragma unroll
      for (int step = 0; step < 4; ++step)
        rebuild<kOperand, kWide>(us[step], ls[step], one, a[step][row], a[step][2 + row]);
    }
  }
  static __device__ __forceinline__ void multiply(float (&acc)[kTokens / 2], const uint32_t (&a)[4],
                                                  uint32_t tokens_low, int accumulate) {
#pragma unroll
    for (int half = 0; half < halves(kTile); ++half) {
      auto& sums = *reinterpret_cast<float(*)[kHalfTokens / 2]>(&acc[half * (kHalfTokens / 2)]);
      const uint64_t tokens = ptx::descriptor_128b_from_low(tokens_low + half * kHalfTokens * (128 / 16));
      if constexpr (has_bf16_tokens(kOperand)) {
        Mma::rs_bf16(sums, a, tokens, accumulate);
      } else {
        Mma::rs_f16(sums, a, tokens, accumulate);
      }
    }
  }
  static __device__ __forceinline__ void issue_f16(float (&acc)[kTokens / 2], const Fragment& a, uint32_t tokens_low) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      multiply(acc, a[step], tokens_low + step * 2, 1);
    }
  }

  // Where this thread's bytes of the warpgroup's first block lie in a stage.
  static __device__ __forceinline__ uint32_t weights_offset(int warpgroup) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4;
    return row * kBlockK + (((lane % 4) ^ ((row / 2) % 4)) * 16) + warpgroup * kRowBlocks * Ring::kSlices * kBlockBytes;
  }

  // Sums, two fragments, a stage as it was loaded, and some 45 more; and a ring deep enough to keep one stage longer.
  // In lean kernels only without lower bytes: there a stage is so small that the steps between its halves would count.
  static constexpr bool kWholeStages = kRowBlocks == 1 && (!kLean || (!Ring::kLowers && kTokens <= 32)) &&
                                       kTokens < 256 && Ring::kStages > 4 &&
                                       kTokens / 2 + 2 * 16 + 16 + 45 <= consumer_registers(kTile);

  // After how many of a stage's four products the next stage's bytes are loaded. A warp stands still until the tensor
  // cores take its last product, so what it loads after all four comes late. But loads before that need the next stage
  // before this one is multiplied, which most tiles pay more for (docs/kernel-experiments.md).
  static constexpr bool kLoadsEarly = Ring::kLowers && (kConsumers == 1 || (kConsumers == 2 && kTokens == 144));
  static constexpr int kLoadAfter = kLoadsEarly ? 2 : 4;

  // One row block: a whole stage's weights are rebuilt while the stage before is multiplied; two fragments take turns.
  static __device__ __forceinline__ void whole_stages(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe, int iterations,
                                                      int warpgroup, uint32_t one) {
    const int thread = threadIdx.x % 128;
    const uint32_t weights = pipe.ring + weights_offset(warpgroup);
    const uint32_t tokens = ptx::descriptor_low(pipe.ring + kWeightBytes);
    Fragment even, odd;
    RawWeights raw;
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) acc[0][j] = 0.0f;
    const auto arrived = [&](const Pipe& at) {
      ptx::mbarrier_wait(at.full_bar(), at.parity);
      return weights + at.stage * kStageBytes;
    };
    // Multiplies a stage, and loads the bytes of another, `next`.
    const auto issue = [&](const Fragment& a, int stage, const Pipe& next) {
      uint32_t from = 0;
      if constexpr (kLoadsEarly) from = arrived(next);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step == kLoadAfter) raw = load_weights(from);
        multiply(acc[0], a[step], tokens + stage * (kStageBytes / 16) + step * 2, 1);
      }
      ptx::wgmma_commit();
      if constexpr (!kLoadsEarly) raw = load_weights(arrived(next));
    };
    raw = load_weights(arrived(pipe));
    rebuild_all(raw, one, even);
    int previous = 0;
    for (int i = 0; i < iterations / 2; ++i) {
      const int first = pipe.stage;
      pipe.advance();
      issue(even, first, pipe);
      ptx::wgmma_wait<1>();  // the stage before is done, and `odd` is free
      if (i > 0) Ring::release(pipe, previous, thread);
      rebuild_all(raw, one, odd);
      previous = pipe.stage;
      // Where there is no next stage, this one is loaded again for nothing: a branch would serialise the products.
      Pipe next = pipe;
      next.advance();
      const bool more = 2 * i + 2 < iterations;
      Pipe loaded = pipe;
      loaded.stage = more ? next.stage : pipe.stage;
      loaded.parity = more ? next.parity : pipe.parity;
      issue(odd, previous, loaded);
      pipe = next;
      ptx::wgmma_wait<1>();
      Ring::release(pipe, first, thread);
      rebuild_all(raw, one, even);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(reinterpret_cast<Sums&>(acc[0]));
    if (iterations > 1) Ring::release(pipe, previous, thread);
    if (iterations % 2 != 0) {
      ptx::wgmma_fence();
      issue_f16(acc[0], even, tokens + pipe.stage * (kStageBytes / 16));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin_registers(reinterpret_cast<Sums&>(acc[0]));
      Ring::release(pipe, pipe.stage, thread);
      pipe.advance();
    }
  }

  // (Computed, not kept: the widest tiles have no register for it.)
  static __device__ __forceinline__ int before(const Pipe& pipe) {
    return (pipe.stage == 0 ? Ring::kStages : pipe.stage) - 1;
  }

  // The same for stages of two slices: one is rebuilt while the other is multiplied.
  static __device__ __forceinline__ void two_slices(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe, int iterations,
                                                    int warpgroup, uint32_t one) {
    const int thread = threadIdx.x % 128;
    const uint32_t weights = pipe.ring + weights_offset(warpgroup);
    Fragment even, odd;
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) acc[0][j] = 0.0f;
    const auto issue = [&](const Fragment& a, int slice) {
      ptx::wgmma_fence();
      issue_f16(acc[0], a, ptx::descriptor_low(pipe.data() + kWeightBytes) + slice * (Ring::kTokenBytes / 16));
      ptx::wgmma_commit();
    };
    ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
    rebuild_all(load_weights(weights + pipe.stage * kStageBytes), one, even);
    for (int i = 0; i < iterations; ++i) {
      issue(even, 0);
      RawWeights raw = load_weights(weights + pipe.stage * kStageBytes + kBlockBytes);
      ptx::wgmma_wait<1>();  // the stage before is done, and `odd` is free
      if (i > 0) Ring::release(pipe, before(pipe), thread);
      rebuild_all(raw, one, odd);
      issue(odd, 1);
      // Where there is no next stage, this one is loaded again for nothing, as above.
      Pipe next = pipe;
      next.advance();
      const bool more = i + 1 < iterations;
      ptx::mbarrier_wait(more ? next.full_bar() : pipe.full_bar(), more ? next.parity : pipe.parity);
      raw = load_weights(weights + (more ? next.stage : pipe.stage) * kStageBytes);
      pipe = next;
      ptx::wgmma_wait<1>();
      rebuild_all(raw, one, even);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(reinterpret_cast<Sums&>(acc[0]));
    Ring::release(pipe, before(pipe), thread);
  }

  // Half a stage at a time, for kernels without the registers for two stages' weights, or with two row blocks.
  static __device__ __forceinline__ void half_stages(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe, int iterations,
                                                     int warpgroup, uint32_t one) {
    const int thread = threadIdx.x % 128;
    const uint32_t offset = weights_offset(warpgroup);
    const uint32_t first_tokens = ptx::descriptor_low(pipe.ring + kWeightBytes);
    uint32_t fragment[2][2][4];
    int accumulate = 0;
    for (int i = 0; i < iterations; ++i) {
      ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
#pragma unroll
      for (int piece = 0; piece < kRowBlocks * Ring::kSlices; ++piece) {  // (one of the two is 1)
        const int b = piece % kRowBlocks, slice = piece / kRowBlocks;
        const uint32_t tokens = first_tokens + pipe.stage * (kStageBytes / 16) + slice * (Ring::kTokenBytes / 16);
        const RawWeights raw = load_weights(pipe.data() + offset + piece * kBlockBytes);
        const uint4 u0 = raw.upper[0], u1 = raw.upper[1], l0 = raw.lower[0], l1 = raw.lower[1];
        const uint32_t us[2][4] = {{u0.x, u0.y, u0.z, u0.w}, {u1.x, u1.y, u1.z, u1.w}};
        const uint32_t ls[2][4] = {{l0.x, l0.y, l0.z, l0.w}, {l1.x, l1.y, l1.z, l1.w}};
        // Two k16 steps at a time: rebuilt while the two before are multiplied.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            uint32_t(&a)[4] = fragment[half][s];
            rebuild<kOperand, kWide>(us[0][2 * half + s], ls[0][2 * half + s], one, a[0], a[2]);
            rebuild<kOperand, kWide>(us[1][2 * half + s], ls[1][2 * half + s], one, a[1], a[3]);
          }
          ptx::wgmma_fence();
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            multiply(acc[b], fragment[half][s], tokens + (2 * half + s) * 2,
                     s == 1 || half == 1 || slice == 1 ? 1 : accumulate);
          }
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();  // the pair before this one is done, and its fragment registers are free
          if (piece == 0 && half == 0 && i > 0) Ring::release(pipe, before(pipe), thread);
        }
      }
      accumulate = 1;
      pipe.advance();
    }
    ptx::wgmma_wait<0>();
    Ring::release(pipe, before(pipe), thread);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) ptx::pin_registers(reinterpret_cast<Sums&>(acc[b]));
  }

  static __device__ __forceinline__ void run(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe, int iterations,
                                             int warpgroup, uint32_t one) {
    if constexpr (kWholeStages && Ring::kSlices == 2) {
      two_slices(acc, pipe, iterations, warpgroup, one);
    } else if constexpr (kWholeStages) {
      whole_stages(acc, pipe, iterations, warpgroup, one);
    } else {
      half_stages(acc, pipe, iterations, warpgroup, one);
    }
  }
};

}  // namespace nfp::cuda
