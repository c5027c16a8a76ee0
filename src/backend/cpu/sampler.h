// Choosing a token from one row of logits, and scoring given ones.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernel_table.h"
#include "backend/cpu/token_history.h"

namespace nfp::cpu {

// One thread's working space, for rows of `vocab` logits.
struct SampleScratch {
  std::vector<float> logits;          // a row after bias, mask and penalties
  std::vector<Candidate> candidates;  // in order of id
  std::vector<Candidate> ordered;     // the same, likeliest first (as far as was needed)
  void reserve(int32_t vocab);
};

// Row `row` of args; the history is read, not written (`append` follows when all rows are done).
void sample_row(const KernelTable& kernels, const SampleArgs& args, int32_t row, SampleScratch& scratch);
void score_row(const KernelTable& kernels, const ScoreArgs& args, int32_t row, SampleScratch& scratch);

}  // namespace nfp::cpu
