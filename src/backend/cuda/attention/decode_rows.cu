#include "backend/cuda/attention/decode_rows.cuh"

namespace nfp::cuda {
namespace {

template <int kRows, KvType kKv>
AttentionKernel choose(int dim, bool rotates) {
  if (dim == 64) return describe_decode_rows<64, kRows, kKv>(rotates);
  if (dim == 128) return describe_decode_rows<128, kRows, kKv>(rotates);
  if constexpr (kRows == 16) {  // one warp has not the registers for 16 rows of 256
    return {};
  } else {
    return describe_decode_rows<256, kRows, kKv>(rotates);
  }
}
template <KvType kKv>
AttentionKernel choose(int dim, int rows, bool rotates) {
  return rows == 16 ? choose<16, kKv>(dim, rotates) : choose<8, kKv>(dim, rotates);
}

}  // namespace

AttentionKernel decode_rows_kernel(int dim, int rows, KvType type, bool rotates) {
  return with_kv_type(type, [&]<KvType kKv>() { return choose<kKv>(dim, rows, rotates); });
}

}  // namespace nfp::cuda
