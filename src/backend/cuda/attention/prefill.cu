#include "backend/cuda/attention/prefill.cuh"

namespace nfp::cuda {

AttentionKernel prefill_kernel(int dim) {
  switch (dim) {
    case 64:
      return describe_prefill<64>();
    case 128:
      return describe_prefill<128>();
    default:
      return describe_prefill<256>();
  }
}

}  // namespace nfp::cuda
