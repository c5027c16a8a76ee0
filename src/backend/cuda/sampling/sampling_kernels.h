// Between sampling.cc (checks, launch) and the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/sampling/sampling_calls.h"

namespace nfp::cuda {

inline constexpr int kSampleThreads = 512;
inline constexpr int kSampleWarps = kSampleThreads / 32;
inline constexpr int kSampleBlocks = 8;  // of a cluster, at most: what every device takes; at least two (st.async)
inline constexpr int kStretch = 128;     // ids that a warp reads at once

// How a row is cut: warp w of block b has `segment` ids from (b * kSampleWarps + w) * segment on.
struct RowCut {
  int blocks = 2;
  int segment = kStretch;
};
constexpr RowCut cut_into(int32_t vocab, int blocks) {
  const int stretches = blocks * kSampleWarps * kStretch;
  return {blocks, (vocab + stretches - 1) / stretches * kStretch};
}
// Sums depend on the cut, so it must not depend on how many rows there are. Up to four blocks make few rows quick. More
// would leave room for fewer rows at once (a GPU has room for 79 clusters of 3, 62 of 4, 39 of 6 and 30 of 8 blocks of
// which two fit an SM), so they are for rows of which no two blocks would fit one.
constexpr RowCut cut_row(int32_t vocab) {
  constexpr int32_t kFew = 8 * kSampleThreads, kMost = 44 * kSampleThreads;  // ids of a block
  int blocks = 2;
  while (blocks < kSampleBlocks && vocab > blocks * (blocks < 4 ? kFew : kMost)) ++blocks;
  return cut_into(vocab, blocks);
}
// The largest logit is the same however a row is cut.
constexpr RowCut cut_greedy_row(int32_t vocab, int32_t rows) {
  constexpr int32_t kBlocks = 160;  // of all rows: one for each SM, and some
  int blocks = 2;
  while (blocks < kSampleBlocks && vocab > blocks * 8 * kSampleThreads && rows * blocks * 2 <= kBlocks) blocks *= 2;
  return cut_into(vocab, blocks);
}

struct SampleParams {
  SampleCall call;
  RowCut cut;
};
struct ScoreParams {
  ScoreCall call;
  RowCut cut;
};

// aligned: rows of logits are 16-byte aligned. greedy: nothing but the largest logit is asked for.
const void* sample_function(bool aligned, bool greedy);
const void* score_function(bool aligned);
size_t sample_shared_bytes(const RowCut& cut);  // of a block; greedy needs none

inline constexpr int kLargestThreads = 1024;
const void* largest_function();  // (LargestCall)

const void* history_function();  // (TokenCounts, slot, tokens, prompt count, output count)

}  // namespace nfp::cuda
