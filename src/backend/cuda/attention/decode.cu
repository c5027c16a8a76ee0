#include "backend/cuda/attention/decode.cuh"

namespace nfp::cuda {
namespace {

template <int kRows, KvType kKv>
AttentionKernel choose(int dim) {
  if (dim == 64) return describe_decode<64, kRows, kKv>();
  if (dim == 128) return describe_decode<128, kRows, kKv>();
  return describe_decode<256, kRows, kKv>();
}
template <KvType kKv>
AttentionKernel choose(int dim, int rows) {
  return rows == 16 ? choose<16, kKv>(dim) : choose<8, kKv>(dim);
}

}  // namespace

AttentionKernel decode_kernel(int dim, int rows, KvType type) {
  return with_kv_type(type, [&]<KvType kKv>() { return choose<kKv>(dim, rows); });
}

}  // namespace nfp::cuda
