#include "backend/cuda/attention/decode.cuh"

namespace nfp::cuda {

AttentionKernel decode_kernel(int dim, int rows) {
  const bool wide = rows == 16;
  switch (dim) {
    case 64:
      return wide ? describe_decode<64, 16>() : describe_decode<64, 8>();
    case 128:
      return wide ? describe_decode<128, 16>() : describe_decode<128, 8>();
    default:
      return wide ? describe_decode<256, 16>() : describe_decode<256, 8>();
  }
}

}  // namespace nfp::cuda
