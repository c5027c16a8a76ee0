#include "backend/cuda/attention/prefill.cuh"

namespace nfp::cuda {

AttentionKernel prefill_e4m3_kernel(int dim) {
  return dim == 64 ? describe_prefill<64, true>() : describe_prefill<128, true>();
}

}  // namespace nfp::cuda
