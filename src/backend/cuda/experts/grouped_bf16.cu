#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {

std::span<const GroupedEntry> grouped_bf16() {
  return grouped_entries<Operand::kBF16Biased, 8, 16, 32, 64, 128, 160, 256>();
}

}  // namespace nfp::cuda
