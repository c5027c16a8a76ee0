#include "calibrate/gptq_kernels.h"

namespace nfp::calibrate {

extern const Kernels kBaselineKernels;
#ifdef NFP_CALIBRATE_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

const Kernels& kernels_of(InstructionSet set) {
#ifdef NFP_CALIBRATE_X86
  if (set >= InstructionSet::kAvx512) return kAvx512Kernels;
  if (set == InstructionSet::kAvx2) return kAvx2Kernels;
#endif
  (void)set;
  return kBaselineKernels;
}

const Kernels& kernels() {
  // A name that is unknown or not of this machine has been refused where the backend was made.
  static const auto chosen = choose_instruction_set("");
  return kernels_of(chosen.ok() ? *chosen : InstructionSet::kScalar);
}

}  // namespace nfp::calibrate
