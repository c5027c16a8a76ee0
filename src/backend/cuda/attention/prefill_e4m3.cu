#include "backend/cuda/attention/prefill_e4m3.cuh"

namespace nfp::cuda {

AttentionKernel prefill_e4m3_kernel(int dim) {
  return dim == 64 ? describe_prefill_e4m3<64>() : describe_prefill_e4m3<128>();
}

}  // namespace nfp::cuda
