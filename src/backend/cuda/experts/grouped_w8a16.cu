#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {

std::span<const GroupedEntry> grouped_w8a16() { return grouped_entries<Operand::kW8A16, 8, 16, 32, 64, 128>(); }

}  // namespace nfp::cuda
