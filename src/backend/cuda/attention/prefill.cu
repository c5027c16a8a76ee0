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
  switch (type) {
    case KvType::kE4m3:
      return choose<KvType::kE4m3>(dim);
    case KvType::kBf16:
      return choose<KvType::kBf16>(dim);
    default:
      return choose<KvType::kF16>(dim);
  }
}

}  // namespace nfp::cuda
