#define NFP_VECTOR_BYTES 64
#define NFP_KERNELS_NAME "avx512"
#include "calibrate/gptq_kernels_inl.h"

namespace nfp::calibrate {
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = kTable;
}  // namespace nfp::calibrate
