#include "backend/cuda/model_shape.h"

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
  return ok_status();
}

}  // namespace nfp::cuda
