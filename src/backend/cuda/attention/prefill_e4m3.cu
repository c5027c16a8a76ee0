#include "backend/cuda/attention/prefill.cuh"

namespace nfp::cuda {

AttentionKernel prefill_e4m3_kernel(int dim) {
  switch (dim) {
    case 64:
      return describe_prefill<64, true>();
    case 128:
      return describe_prefill<128, true>();
    default:
      return describe_prefill<256, true>();
  }
}

}  // namespace nfp::cuda
