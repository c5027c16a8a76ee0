#include "backend/cuda/sampling/sampling.h"

#include <algorithm>

#include "backend/cuda/launch.h"
#include "backend/cuda/row_largest.h"
#include "backend/cuda/sampling/sampling_kernels.h"

namespace nfp::cuda {
namespace {

Status bad(std::string_view what, std::string_view field, std::string_view rule) {
  return error(ErrorCode::kUsage, "{}: {} {}", what, field, rule);
}

Status check(std::string_view what, const LogitsView& logits) {
  if (logits.rows <= 0 || logits.rows > INT32_MAX / kSampleBlocks) return bad(what, "rows", "must be 1 to 2^28");
  if (logits.vocab <= 0 || logits.vocab > kMaxVocab)
    return error(ErrorCode::kUnsupported, "{}: a vocabulary of {}; 1 to {} are possible", what, logits.vocab,
                 kMaxVocab);
  if (logits.data == nullptr || logits.ld < logits.vocab)
    return bad(what, "logits", "are null, or ld smaller than vocab");
  return ok_status();
}

bool aligned(const LogitsView& logits) {
  return reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && logits.ld % 4 == 0;
}

}  // namespace

bool needs_largest_only(uint32_t needs) {
  return (needs & (SamplingNeeds::kDraw | SamplingNeeds::kPenalties | SamplingNeeds::kBias | SamplingNeeds::kMask |
                   SamplingNeeds::kReport)) == 0;
}

Status run_largest(const LargestCall& c, CUstream_st* stream) {
  if (c.rows <= 0 || c.vocab <= 0) return bad("largest", "rows and vocab", "must be 1 and more");
  if (c.candidates == nullptr || reinterpret_cast<uintptr_t>(c.candidates) % 16 != 0 || c.out == nullptr)
    return bad("largest", "candidates or out", "is null or misaligned");
  LargestCall call = c;
  void* arguments[] = {&call};
  const auto grid = static_cast<int>((c.rows + RowLargest::kRows - 1) / RowLargest::kRows);
  return launch("largest", largest_function(), {grid, 1, kLargestThreads, 0, c.dependent_launch}, arguments, stream);
}

Status run_sample(const SampleCall& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check("sample", c.logits));
  if (c.row == nullptr || c.out == nullptr) return bad("sample", "row or out", "is null");
  if ((c.needs & SamplingNeeds::kBias) != 0 && c.bias == nullptr) return bad("sample", "bias", "is null");
  if ((c.needs & SamplingNeeds::kMask) != 0 && (c.allowed == nullptr || c.allowed_words < 0))
    return bad("sample", "allowed", "is null");
  if ((c.needs & SamplingNeeds::kPenalties) != 0 &&
      (c.history.counts == nullptr || c.history.vocab != c.logits.vocab || c.counter == nullptr))
    return bad("sample", "history and counter", "must be there, with the logits' vocabulary");
  if ((c.needs & SamplingNeeds::kReport) != 0 && c.top == nullptr) return bad("sample", "top", "is null");
  const bool greedy = needs_largest_only(c.needs);
  SampleParams p{c, greedy ? cut_greedy_row(c.logits.vocab, c.logits.rows) : cut_row(c.logits.vocab)};
  if ((c.needs & SamplingNeeds::kBias) == 0) p.call.bias = nullptr;
  if ((c.needs & SamplingNeeds::kMask) == 0) p.call.allowed = nullptr;
  if ((c.needs & SamplingNeeds::kPenalties) == 0) p.call.history.counts = nullptr;
  const LaunchShape shape{c.logits.rows * p.cut.blocks, p.cut.blocks, kSampleThreads,
                          greedy ? 0 : sample_shared_bytes(p.cut), c.dependent_launch};
  void* arguments[] = {&p};
  return launch("sample", sample_function(aligned(c.logits), greedy), shape, arguments, stream);
}

Status run_score(const ScoreCall& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check("score", c.logits));
  if (c.target == nullptr || c.out == nullptr) return bad("score", "target or out", "is null");
  if (c.top_n < 0 || c.top_n > kMaxTopLogprobs) return bad("score", "top_n", "must be 0 to 128");
  if (c.top_n > 0 && (c.top == nullptr || c.top_stride < c.top_n)) return bad("score", "top", "is null, or too narrow");
  ScoreParams p{c, cut_row(c.logits.vocab)};
  const LaunchShape shape{c.logits.rows * p.cut.blocks, p.cut.blocks, kSampleThreads, sample_shared_bytes(p.cut),
                          c.dependent_launch};
  void* arguments[] = {&p};
  return launch("score", score_function(aligned(c.logits)), shape, arguments, stream);
}

Status reset_history(const TokenCounts& history, int32_t slot, std::span<const int32_t> prompt,
                     std::span<const int32_t> output, int32_t* staging, CUstream_st* stream) {
  TokenCounts counts = history;
  if (slot < 0 || slot >= history.slots) return bad("history", "slot", "is not one of them");
  for (const auto& tokens : {prompt, output}) {
    for (const int32_t token : tokens) {
      if (token < 0 || token >= history.vocab) {
        return error(ErrorCode::kInvalidInput, "token {} is outside the vocabulary of {}", token, history.vocab);
      }
    }
  }
  cudaError_t status = cudaMemsetAsync(counts.counts + static_cast<size_t>(slot) * static_cast<size_t>(history.vocab),
                                       0, static_cast<size_t>(history.vocab) * sizeof(uint32_t), stream);
  if (status == cudaSuccess && !prompt.empty())
    status = cudaMemcpyAsync(staging, prompt.data(), prompt.size_bytes(), cudaMemcpyHostToDevice, stream);
  if (status == cudaSuccess && !output.empty())
    status =
        cudaMemcpyAsync(staging + prompt.size(), output.data(), output.size_bytes(), cudaMemcpyHostToDevice, stream);
  if (status != cudaSuccess) return error(ErrorCode::kResource, "history: uploading: {}", cudaGetErrorString(status));
  if (prompt.empty() && output.empty()) return ok_status();
  const auto all = static_cast<int>(prompt.size() + output.size());
  auto prompt_count = static_cast<int32_t>(prompt.size());
  auto count = static_cast<int32_t>(all);
  void* arguments[] = {&counts, &slot, &staging, &prompt_count, &count};
  return launch("history", history_function(), {.grid = std::min((all + 255) / 256, 64), .block = 256}, arguments,
                stream);
}

}  // namespace nfp::cuda
