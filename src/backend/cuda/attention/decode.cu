#include "backend/cuda/attention/decode.cuh"

namespace nfp::cuda {
namespace {

template <int kRows, bool kE4m3>
AttentionKernel choose(int dim) {
  if (dim == 64) return describe_decode<64, kRows, kE4m3>();
  if (dim == 128) return describe_decode<128, kRows, kE4m3>();
  return describe_decode<256, kRows, kE4m3>();
}

}  // namespace

AttentionKernel decode_kernel(int dim, int rows, bool e4m3) {
  if (e4m3) return rows == 16 ? choose<16, true>(dim) : choose<8, true>(dim);
  return rows == 16 ? choose<16, false>(dim) : choose<8, false>(dim);
}

}  // namespace nfp::cuda
