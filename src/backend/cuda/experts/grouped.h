// The experts' products by wgmma: one grouped GEMM over all experts (grouped.cuh).
#pragma once

#include "backend/cuda/experts/experts_calls.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

// Of an expert on the average, from where E4M3 activations pay for their rounding.
inline constexpr int64_t kRoundedRows = 32;

// Whether a call that run_expert_linear has checked can be a grouped product: every matrix nested, all of them read in
// the same way, FP16 ones with the biased join, and whole pieces of 16 bytes to store.
bool can_group(const ExpertLinearCall& call);
Status run_grouped(const ExpertLinearCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
