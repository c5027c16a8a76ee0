// Times candidate kernels for shapes by themselves on the current device: what `nestedfp tune --shape` runs. (For a
// model see tune/tune_steps.h.)
#pragma once

#include <functional>
#include <span>
#include <string>

#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/gemm/tune/check.h"
#include "backend/cuda/gemm/tune/tune_plan.h"

namespace nfp::cuda {

struct TuneOptions {
  std::span<const Mode> modes;
  std::span<const int> tokens = kTokenBuckets;
  // Numbers of tokens at which it is checked what an engine would choose by then (check.h). Where that is slow the
  // fastest is added.
  std::span<const int> checked;
  size_t most_candidates = 16;  // per cell, as likeliest() has them
  // After each cell, with a line like "n 4096, k 14336, m 16, f16: 128x16 c1 b1 split4, 30.2 us". May be empty.
  std::function<void(const std::string& line)> progress;
};

// Operands are random; weights rotate over more than the L2 holds. E4M3 products of up to kChainTokens tokens are timed
// as a decode layer runs them, after the norm and quantisation that they wait for. Needs about 1.5 GB of device memory
// besides 4 * n * k bytes.
inline constexpr int kChainTokens = 64;
Result<Tuned> tune(const Gemm& gemm, std::span<const GemmShape> shapes, const TuneOptions& options);

}  // namespace nfp::cuda
