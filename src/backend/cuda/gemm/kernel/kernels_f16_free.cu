#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_f16_free() { return all_entries<Operand::kF16Free, Mode::kF16, Join::kFree>(); }

}  // namespace nfp::cuda
