// Which sizes of a model the kernels of a step take. Nothing here needs CUDA.
#pragma once

#include "backend/backend.h"
#include "base/result.h"

namespace nfp::cuda {

// An error with the size and what to do: 16 bytes of FP16 are fetched and stored at a time, of rows of the residual
// stream and of what rotates of a head; and attention has its own bounds (attention/attention.h).
Status check_model_shape(const StepReserve& most);

}  // namespace nfp::cuda
