// What the functions of sampling.h take. Apart from them because nvcc does not compile result.h's fmt.
#pragma once

#include <cstdint>

#include "backend/sampling.h"

namespace nfp::cuda {

// [slots, vocab] on the device: twice the number of times a slot generated the token, plus one where it saw it at all
// (as in its prompt).
struct TokenCounts {
  uint32_t* counts = nullptr;
  int32_t slots = 0;
  int32_t vocab = 0;
};

// Logits [rows, vocab], ld elements from row to row. Read only. Fastest where rows are 16-byte aligned.
struct LogitsView {
  const float* data = nullptr;
  int64_t ld = 0;
  int32_t rows = 0;
  int32_t vocab = 0;  // at most kMaxVocab
};
inline constexpr int32_t kMaxVocab = 400000;  // a row lies in the shared memory of a cluster of eight blocks

struct SampleCall {
  LogitsView logits;
  uint32_t needs = 0;                // SamplingNeeds of all rows; what is not there is not looked at
  const SamplingRow* row = nullptr;  // device [rows]
  const LogitBias* bias = nullptr;   // device, with kBias
  const uint32_t* allowed =
      nullptr;  // device [*, allowed_words], with kMask: bit v % 32 of word v / 32, may v be drawn
  int32_t allowed_words = 0;
  TokenCounts history;          // with kPenalties; the sampled tokens are added once all rows have been read
  uint32_t* counter = nullptr;  // device [1], with kPenalties; zero before the first call, and left so
  SampledRow* out = nullptr;    // device [rows]
  TokenLogprob* top = nullptr;  // device [rows, top_stride], with kReport
  int32_t top_stride = kMaxTopLogprobs;
  bool dependent_launch = true;  // programmatic: the kernel may start while the one before it still runs
};

// The likeliest token of each row, of what a product found of its logits (row_largest.h).
struct LargestCall {
  const uint64_t* candidates = nullptr;  // device, RowLargest::bytes(rows, vocab), 16-byte aligned
  int32_t rows = 0;
  int32_t vocab = 0;
  SampledRow* out = nullptr;  // device [rows]
  bool dependent_launch = true;
};

// Log-probability and rank of given tokens, and the top_n likeliest of each row.
struct ScoreCall {
  LogitsView logits;
  const int32_t* target = nullptr;  // device [rows]
  int32_t top_n = 0;                // 0 .. kMaxTopLogprobs
  SampledRow* out = nullptr;        // device [rows]
  TokenLogprob* top = nullptr;      // device [rows, top_stride], if top_n > 0
  int32_t top_stride = kMaxTopLogprobs;
  bool dependent_launch = true;
};

}  // namespace nfp::cuda
