#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_e4m3() { return all_entries<Operand::kE4M3, Mode::kE4M3>(); }

}  // namespace nfp::cuda
