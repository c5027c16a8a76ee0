// The compiled kernels, by operand and tile. One .cu file per group of instances, so that they compile side by side.
#pragma once

#include <span>

#include "backend/cuda/gemm/plan/config.h"

namespace nfp::cuda {

enum class Operand : uint8_t { kF16Biased, kF16Free, kBF16Biased, kBF16Free, kE4M3, kE4M3Promoted, kW8A16 };

struct KernelEntry {
  Operand operand;
  Tile tile;
  const void* function;
  int threads;
};

std::span<const KernelEntry> kernels_f16_biased();
std::span<const KernelEntry> kernels_f16_free();
std::span<const KernelEntry> kernels_bf16_biased();
std::span<const KernelEntry> kernels_bf16_free();
std::span<const KernelEntry> kernels_e4m3();
std::span<const KernelEntry> kernels_e4m3_promoted();
std::span<const KernelEntry> kernels_w8a16();

}  // namespace nfp::cuda
