#include "backend/cpu/kernel_table.h"

namespace nfp::cpu {

const KernelTable& kernels_of(InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAmx:
      return amx_kernels();
    case InstructionSet::kAvx512Fp16:
      return avx512_fp16_kernels();
    case InstructionSet::kAvx512Bf16:
      return avx512_bf16_kernels();
    case InstructionSet::kAvx512Gfni:
      return avx512_gfni_kernels();
    case InstructionSet::kAvx512:
      return avx512_kernels();
    case InstructionSet::kAvx2:
      return avx2_kernels();
#endif
    default:
      return scalar_kernels();
  }
}

}  // namespace nfp::cpu
