// Which tile a grouped product takes (grouped.cuh). Plain C++.
#pragma once

#include <cstdint>
#include <span>

#include "backend/cuda/gemm/plan/config.h"
#include "base/result.h"

namespace nfp::cuda {

struct GroupedProblem {
  Mode mode = Mode::kF16;  // kF16, kW8A16, kE4M3
  int64_t rows = 0;        // tokens, of which each has `top` of the experts
  int32_t experts = 0;
  int32_t top = 0;
  int64_t n = 0;  // of every expert's matrix
  int64_t k = 0;
};

// Of the tiles of so many tokens the one expected to be fastest, as if tokens chose their experts at random: where
// reading takes the time one that most experts' tokens fit into, since the next tile of an expert reads its weights
// again (if from the L2); where arithmetic does, one of which little stays empty.
int grouped_tile(const GroupedProblem& problem, std::span<const int> tiles);

// Of the tiles the one of `asked` tokens; 0 = what grouped_tile says. kUsage where there is none of so many.
Result<int> choose_grouped_tile(const GroupedProblem& problem, int asked, std::span<const int> tiles);

}  // namespace nfp::cuda
