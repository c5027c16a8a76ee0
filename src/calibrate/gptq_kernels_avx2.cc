#define NFP_VECTOR_BYTES 32
#define NFP_KERNELS_NAME "avx2"
#include "calibrate/gptq_kernels_inl.h"

namespace nfp::calibrate {
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = kTable;
}  // namespace nfp::calibrate
