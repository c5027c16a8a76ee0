#include "backend/cuda/model_shape.h"

#include "backend/cuda/attention/attention.h"

namespace nfp::cuda {

Status check_model_shape(const StepReserve& most) {
  if (most.hidden % 8 != 0) {
    return error(ErrorCode::kUnsupported,
                 "the model's hidden size is {}, and the GPU backend takes multiples of 8; use --device cpu",
                 most.hidden);
  }
  if (most.rotary_dim % 8 != 0) {
    return error(ErrorCode::kUnsupported,
                 "heads rotate {} of their {} features, and the GPU backend rotates multiples of 8; use --device cpu",
                 most.rotary_dim, most.head_dim);
  }
  if (most.head_dim % 16 != 0 || most.head_dim > kMaxAttentionHeadDim) {
    return error(ErrorCode::kUnsupported,
                 "heads have {} features, and the GPU backend takes multiples of 16, {} at most; use --device cpu",
                 most.head_dim, kMaxAttentionHeadDim);
  }
  if (most.heads > kMaxAttentionGroup * most.kv_heads) {
    return error(ErrorCode::kUnsupported,
                 "{} query heads share {} KV heads, and the GPU backend takes {} for each at most; use --device cpu",
                 most.heads, most.kv_heads, kMaxAttentionGroup);
  }
  if (int64_t{most.sequences} * most.kv_heads > kMaxAttentionRows) {
    return error(ErrorCode::kUsage,
                 "{} sequences at once have {} KV heads each, and the GPU backend takes {} of them together; ask for "
                 "{} sequences at most (--max-num-seqs)",
                 most.sequences, most.kv_heads, kMaxAttentionRows, kMaxAttentionRows / most.kv_heads);
  }
  return ok_status();
}

}  // namespace nfp::cuda
