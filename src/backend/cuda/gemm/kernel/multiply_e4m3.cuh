// E4M3 mode's main loops: both operands come from where the copy engine put them.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nfp::cuda {

// E4M3 products summed in the tensor core before they are added to FP32 registers (docs/kernels.md has the error per
// interval). With two row blocks per warpgroup registers force every stage (128).
inline constexpr int kPromotionStages = 4;

// kWidth: how many of a stage's tokens are multiplied. Sums of the others are left as they are.
template <Operand kOperand, Tile kTile, int kWidth = kTile.tokens>
struct MultiplyE4m3 {
  using Ring = nfp::cuda::Ring<kOperand, kTile>;
  using Pipe = typename Ring::Pipe;
  static constexpr auto kTokens = Ring::kTokens;
  static constexpr auto kRowBlocks = Ring::kRowBlocks;
  static constexpr auto kWeightBytes = Ring::kWeightBytes;
  using Mma = ptx::Wgmma<kWidth>;
  using Sums = float[kWidth / 2];

  // Descriptors' low words of the ring's first stage.
  struct Operands {
    uint32_t weights, tokens;
    __device__ __forceinline__ Operands(const Pipe& pipe, int warpgroup)
        : weights(ptx::descriptor_low(pipe.ring + warpgroup * kRowBlocks * 2 * kBlockBytes)),
          tokens(ptx::descriptor_low(pipe.ring + kWeightBytes)) {}
  };
  static __device__ __forceinline__ void issue(float (&acc)[kTokens / 2], const Operands& first, int stage, int block,
                                               int accumulate) {
    const uint32_t at = static_cast<uint32_t>(stage) * (Ring::kStageBytes / 16);
    const uint32_t weights = first.weights + at + block * (2 * kBlockBytes / 16), tokens = first.tokens + at;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Mma::ss_e4m3(reinterpret_cast<Sums&>(acc),
                   ptx::descriptor_64b_from_low(weights + step / 2 * (kBlockBytes / 16) + step % 2 * 2),
                   ptx::descriptor_128b_from_low(tokens + step * 2), step == 0 ? accumulate : 1);
    }
  }

  // `loaded` is called when the last stage is there, and its products are under way.
  template <typename Loaded>
  static __device__ __forceinline__ void plain(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe, int iterations,
                                               int warpgroup, Loaded loaded) {
    const int thread = threadIdx.x % 128;
    const Operands first(pipe, warpgroup);
    int previous = 0;
    for (int i = 0; i < iterations; ++i) {
      ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) {
        issue(acc[b], first, pipe.stage, b, i > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (i > 0) Ring::release(pipe, previous, thread);
      previous = pipe.stage;
      pipe.advance();
    }
    loaded();
    ptx::wgmma_wait<0>();
    Ring::release(pipe, previous, thread);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) ptx::pin_registers(reinterpret_cast<Sums&>(acc[b]));
  }
  static __device__ __forceinline__ void plain(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe, int iterations,
                                               int warpgroup) {
    plain(acc, pipe, iterations, warpgroup, [] {});
  }

  // The tensor core's sum is added to FP32 registers at multiples of the interval counted from k = 0, wherever a share
  // begins.
  static __device__ __forceinline__ void promoted(float (&acc)[kRowBlocks][kTokens / 2], Pipe& pipe,
                                                  int first_iteration, int iterations, int warpgroup) {
    const int thread = threadIdx.x % 128;
    const Operands first(pipe, warpgroup);
    float sum[kTokens / 2] = {};
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
        ptx::pin_registers(sum);  // or ptxas moves them between products of the smallest tiles, one at a time
        for (int c = 0; c < count; ++c) {
          ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
          ptx::wgmma_fence();
          issue(sum, first, pipe.stage, 0, c > 0);
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          if (c > 0) Ring::release(pipe, held, thread);
          held = pipe.stage;
          pipe.advance();
        }
        ptx::wgmma_wait<0>();
        ptx::pin_registers(sum);
        Ring::release(pipe, held, thread);
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) acc[0][j] += sum[j];
      } else {
        ptx::mbarrier_wait(pipe.full_bar(), pipe.parity);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
          ptx::wgmma_fence();
          issue(sum, first, pipe.stage, b, 0);
          ptx::wgmma_commit();
          ptx::wgmma_wait<0>();
          ptx::pin_registers(sum);
          if (b + 1 == kRowBlocks) Ring::release(pipe, first_stage, thread);
#pragma unroll
          for (int j = 0; j < kTokens / 2; ++j) acc[b][j] += sum[j];
        }
        pipe.advance();
      }
    }
  }
};

}  // namespace nfp::cuda
