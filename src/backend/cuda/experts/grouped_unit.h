// Between the choice of tiles (grouped_plan.cc) and the kernels (grouped.cuh), which nvcc compiles.
#pragma once

namespace nfp::cuda {

// A wide tile multiplies whole units of tokens, as many as it has tokens for.
constexpr int grouped_unit(int tile_tokens) { return tile_tokens >= 128 ? 32 : tile_tokens >= 64 ? 16 : tile_tokens; }

}  // namespace nfp::cuda
