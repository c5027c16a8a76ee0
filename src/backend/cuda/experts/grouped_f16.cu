#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {

std::span<const GroupedEntry> grouped_f16() {
  return grouped_entries<Operand::kF16Biased, 8, 16, 32, 64, 128, 160, 256>();
}

}  // namespace nfp::cuda
