#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_w8a16() { return all_entries<Operand::kW8A16, Mode::kW8A16>(); }

}  // namespace nfp::cuda
