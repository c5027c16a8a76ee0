#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {

std::span<const GroupedEntry> grouped_w8abf16() { return grouped_entries<Operand::kW8ABF16, 8, 16, 32, 64, 128>(); }

}  // namespace nfp::cuda
