#define NFP_VECTOR_BYTES 16
#define NFP_KERNELS_NAME "baseline"
#include "calibrate/gptq_kernels_inl.h"

namespace nfp::calibrate {
extern const Kernels kBaselineKernels;
const Kernels kBaselineKernels = kTable;
}  // namespace nfp::calibrate
