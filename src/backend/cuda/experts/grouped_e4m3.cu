#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {

std::span<const GroupedEntry> grouped_e4m3() { return grouped_entries<Operand::kE4M3, 32, 64, 128>(); }

}  // namespace nfp::cuda
