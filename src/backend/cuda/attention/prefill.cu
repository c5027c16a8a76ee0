#include "backend/cuda/attention/prefill.cuh"

namespace nfp::cuda {
namespace {

template <KvType kKv>
AttentionKernel choose(int dim) {
  if (dim == 64) return describe_prefill<64, kKv>();
  if (dim == 128) return describe_prefill<128, kKv>();
  return describe_prefill<256, kKv>();
}

}  // namespace

AttentionKernel prefill_kernel(int dim, KvType type) {
  return with_kv_type(type, [&]<KvType kKv>() { return choose<kKv>(dim); });
}

}  // namespace nfp::cuda
