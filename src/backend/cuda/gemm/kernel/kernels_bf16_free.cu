#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_bf16_free() { return all_entries<Operand::kBF16Free, Mode::kBF16>(); }

}  // namespace nfp::cuda
