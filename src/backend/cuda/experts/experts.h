// Mixture-of-experts layers on the device: which experts a row has, their products, and the sum of them.
//
// How many rows an expert has is on the device only, so that a captured graph replays with any routes: a thread block
// belongs to an expert and 64 rows of its matrix, and multiplies as many tokens as there are. Products are mma.sync on
// weights rebuilt in registers, for the few tokens an expert of a decode step has; each reads its planes once for up to
// 64 tokens. Activations stay 16 bits: FP8 steps read upper bytes only (W8A16).
//
// A row's result does not depend on the other rows. Functions only enqueue. kUsage for what does not fit.
#pragma once

#include "backend/cuda/experts/experts_calls.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

Status run_route(const RouteArgs& call, CUstream_st* stream);
// What run_route does of routes that are given.
Status run_assign(const AssignArgs& call, CUstream_st* stream);
Status run_expert_linear(const ExpertLinearCall& call, CUstream_st* stream);
Status run_combine(const CombineExpertsArgs& call, CUstream_st* stream);

}  // namespace nfp::cuda
