// The small kernels of a step: embedding, RoPE with the KV append, gathering rows, adding a residual, soft caps,
// what goes to and from the host, marks that kernels leave for it.
// Activations are FP16 where nothing else is said, and dense ([rows, features], 16-byte aligned); arithmetic is FP32
// with one rounding of each output.
//
// Each function enqueues one kernel: no allocation, no synchronisation. kUsage for shapes and pointers that do not fit.
#pragma once

#include "backend/cuda/step/step_calls.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

Status run_embed(const EmbedCall& call, CUstream_st* stream);
Status run_rope(const RopeCall& call, CUstream_st* stream);
Status run_gather(const GatherCall& call, CUstream_st* stream);
Status run_soft_cap(const SoftCapCall& call, CUstream_st* stream);
Status run_add(const AddCall& call, CUstream_st* stream);
Status run_copy(const CopyCall& call, CUstream_st* stream);
Status run_take_mark(const TakeMarkCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
