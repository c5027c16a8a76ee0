// The compiled kernels, by operand and tile. Those of one operand are compiled in several files of about equal length
// (kernels.cu.in; the build says how many).
#pragma once

#include <cstddef>
#include <span>

#include "backend/cuda/gemm/plan/config.h"

namespace nfp::cuda {

enum class Operand : uint8_t { kF16Biased, kF16Free, kBF16Biased, kBF16Free, kE4M3, kE4M3Promoted, kW8A16, kW8ABF16 };
inline constexpr size_t kOperands = 7;  // of this GEMM: kW8ABF16 is experts' alone (experts/grouped.cuh)

constexpr bool has_bf16_tokens(Operand o) {
  return o == Operand::kBF16Biased || o == Operand::kBF16Free || o == Operand::kW8ABF16;
}
// 16-bit tokens by upper bytes.
constexpr bool reads_uppers_alone(Operand o) { return o == Operand::kW8A16 || o == Operand::kW8ABF16; }

struct KernelEntry {
  Operand operand;
  Tile tile;
  const void* function;
  int threads;
  int shared_bytes;
};

std::span<const KernelEntry> kernels(Operand operand);

}  // namespace nfp::cuda
