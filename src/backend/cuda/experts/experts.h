// Mixture-of-experts layers on the device: which experts a row has, their products, and the sum of them.
//
// How many rows an expert has is on the device only, so that a captured graph replays with any routes. Products are one
// grouped GEMM (grouped.h) where all matrices are read alike. Where one is not nested, cannot take the biased join, or
// is exact among others that are not, they are mma.sync on weights rebuilt in registers: a thread block belongs to an
// expert and 64 rows of its matrix, and reads its planes once for up to 64 tokens.
//
// A row's result does not depend on the other rows. Functions only enqueue. kUsage for what does not fit.
#pragma once

#include "backend/cuda/experts/experts_calls.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

Status run_route(const RouteArgs& call, CUstream_st* stream);
// Whether it leaves x by assignment in call.gathered, 16-byte aligned.
bool route_gathers(const RouteArgs& call);
// What run_route does of routes that are given.
Status run_assign(const AssignArgs& call, CUstream_st* stream);
Status run_expert_linear(const ExpertLinearCall& call, CUstream_st* stream);
Status run_combine(const CombineExpertsArgs& call, CUstream_st* stream);

}  // namespace nfp::cuda
