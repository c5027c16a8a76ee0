#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_bf16_biased() { return all_entries<Operand::kBF16Biased, Mode::kBF16>(); }

}  // namespace nfp::cuda
