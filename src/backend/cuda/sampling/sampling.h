// Sampling and scoring of rows of FP32 logits, with the meaning of the CPU's sampler (backend/cpu/sampler.cc): the same
// seed and draw choose the same token.
//
// A cluster of thread blocks has a row in its shared memory and never sorts it. Its warps tell each other their largest
// logit and, for top-p, what their tokens weigh, once. Tokens race (race.cuh), and top-p asks what those likelier than
// the winner weigh. For top-k the warps' largest logits give a bound which few tokens of most rows reach, and one block
// sorts those; where they are too many or not enough, a histogram (histogram.cuh) and a search over thresholds narrow
// what top-k may cut at until it fits into that block's list (search.cuh).
//
// The CPU's token may differ where rounding decides. Arrivals are compared in FP64, so that is seldom; but weights are
// FP32 exponentials (FP64 in the list), summed in FP64 in another order, so a token at top-p's or min-p's limit may be
// kept by one and cut by the other. The test allows 1e-6 of the total. Results are the same from run to run and do not
// depend on the other rows.
#pragma once

#include <span>

#include "backend/cuda/sampling/sampling_calls.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

// Each enqueues one kernel. No allocation, no synchronisation. kUsage for shapes and pointers that do not fit.
Status run_sample(const SampleCall& call, CUstream_st* stream);
// As run_sample() of the logits, where rows need nothing but their largest.
bool needs_largest_only(uint32_t needs);  // SamplingNeeds
Status run_largest(const LargestCall& call, CUstream_st* stream);
Status run_score(const ScoreCall& call, CUstream_st* stream);

// The slot's history becomes these tokens (host memory, which has been read on return). staging: device memory for all
// of them, free again when the stream has come by.
Status reset_history(const TokenCounts& history, int32_t slot, std::span<const int32_t> prompt,
                     std::span<const int32_t> output, int32_t* staging, CUstream_st* stream);

}  // namespace nfp::cuda
