// Perplexity of a text, and how far a model's distributions are from a saved base's (KL divergence).
//
// The convention is that of llama.cpp's perplexity tool, so that figures can be compared: the text's tokens are cut
// into chunks of `ctx`; each chunk is run by itself; only its second half is scored (token i + 1 given those before,
// for i = ctx/2 .. ctx-2). The error is that of the mean of the negative log-likelihoods.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "base/thread_pool.h"
#include "eval/sequence_runner.h"
#include "nested/precision.h"

namespace nfp {

struct PerplexityOptions {
  int32_t ctx = 512;
  int64_t chunks = 0;          // 0 = all
  std::optional<int32_t> bos;  // put in place of every chunk's first token, where the model's tokenizer adds one
  Precision precision = Precision::kFp16;
  int32_t max_feed = 512;  // tokens a step
  DType kv_dtype = DType::kF16;
  LinearObserver* observer = nullptr;  // of every linear layer's inputs; null = none
  std::string save_base;               // write every scored distribution here
  std::string kld_base;                // compare with the distributions saved here
};

struct KldResult {
  double mean = 0;  // of KL(base || this), nats
  double mean_error = 0;
  double median = 0;
  double p99 = 0;  // 99th percentile
  double largest = 0;
  double same_top = 0;  // share of positions whose likeliest token is the base's
  double same_top_error = 0;
  double base_perplexity = 0;
};

struct PerplexityResult {
  double perplexity = 0;
  double error = 0;  // one standard error
  int64_t chunks = 0;
  int64_t scored = 0;  // tokens
  double seconds = 0;
  std::optional<KldResult> kld;
};

// Called after every chunk with the result so far.
using PerplexityProgress = std::function<void(const PerplexityResult&, int64_t chunks_in_all)>;

// Reads no weights, so that what is wrong can be told before they are loaded and calibrated. Errors: fewer tokens than
// one chunk; a base file of another model, text or ctx; no room for the one that is to be saved.
Status check_perplexity(int32_t vocab, std::span<const int32_t> tokens, const PerplexityOptions& options);

// Errors: those of check_perplexity(); a disk that has become full.
Result<PerplexityResult> perplexity(Model& model, std::span<const int32_t> tokens, const PerplexityOptions& options,
                                    ThreadPool& threads, const PerplexityProgress& progress);

}  // namespace nfp
