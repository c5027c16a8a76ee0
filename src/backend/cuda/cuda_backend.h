// The CUDA backend: Hopper GPUs (compute capability 9.0). Activations are FP16, the KV cache is FP16; FP8 steps
// keep FP16 activations (Precision::kFp8) or round them to E4M3 with a scale a token (kFp8W8A8, the faster one beyond
// 64 tokens).
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "base/result.h"

namespace nfp {

struct CudaOptions {
  int threads = 0;                // of the host, for loading; 0 = all that this process may use
  bool deterministic = false;     // a sequence's results do not depend on the others in its step (slower)
  std::string gemm_choices = {};  // a file of `nestedfp tune`, whose kernels come before the built-in ones; "" = none
  double hang_s = 120;            // a step that takes longer is never waited for again: Backend::wait fails
};

// Errors say what is missing: no GPU, another architecture, a driver that is too old.
Result<std::unique_ptr<Backend>> make_cuda_backend(const CudaOptions& options);

}  // namespace nfp
