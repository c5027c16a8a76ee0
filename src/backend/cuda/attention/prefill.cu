#include "backend/cuda/attention/prefill.cuh"

namespace nfp::cuda {

AttentionKernel prefill_kernel(int dim) {
  switch (dim) {
    case 64:
      return describe_prefill<64, false>();
    case 128:
      return describe_prefill<128, false>();
    default:
      return describe_prefill<256, false>();
  }
}

}  // namespace nfp::cuda
