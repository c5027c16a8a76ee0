#include "backend/cuda/gemm/kernel/kernel.cuh"

namespace nfp::cuda {

std::span<const KernelEntry> kernels_e4m3_promoted() {
  return all_entries<Operand::kE4M3Promoted, Mode::kE4M3Promoted>();
}

}  // namespace nfp::cuda
