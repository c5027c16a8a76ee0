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
constexpr RowCut cut_row(int32_t vocab) {
  RowCut cut;
  while (cut.blocks < kSampleBlocks && vocab > cut.blocks * kSampleThreads * 8) cut.blocks *= 2;
  const int warps = cut.blocks * kSampleWarps;
  cut.segment = (vocab + warps * kStretch - 1) / (warps * kStretch) * kStretch;
  return cut;
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

const void* history_function();  // (TokenCounts, slot, tokens, prompt count, output count)

}  // namespace nfp::cuda
