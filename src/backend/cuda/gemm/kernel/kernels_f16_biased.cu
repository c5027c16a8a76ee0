#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_f16_biased() { return all_entries<Operand::kF16Biased, Mode::kF16>(); }

}  // namespace nfp::cuda
