// Which GPU kernel runs each product of a model's layers, by the time of whole steps: what `nestedfp tune MODEL` does.
//
// A product alone tells little of a decode step, where its blocks begin while the kernel before is still at work and
// ask for weights beside it: choices that made steps quicker were 1 to 4 % slower alone, and the other way round
// (docs/kernels.md, "Products in a decode step"). So a few of the model's layers, with random weights, are captured as
// a step for each candidate of each product, and the captured steps take turns.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/tune/check.h"
#include "base/result.h"
#include "model/config.h"

namespace nfp {

// A product's kernels in steps that are alike but for them.
struct TriedKernels {
  cuda::Mode mode;
  int tokens;
  int64_t n, k;
  int32_t layers;                     // of the step, each with one such product
  std::vector<cuda::Config> configs;  // the choice first
  std::vector<double> seconds;        // of a whole step with each, the median of its turns
};

struct TuneStepsOptions {
  std::vector<cuda::Mode> modes;  // kF16, kE4M3 or kW8A16: FP16, `fp8-w8a8` and `fp8` steps
  // Tokens of a step, each one of cuda::kTokenBuckets: up to kMostDecoded sequences of one token, else one prompt.
  std::vector<int> tokens;
  // Any numbers of tokens, at which it is checked what an engine would choose by then (tune/check.h); times are a
  // step's, and what makes it shorter by more than noise is added.
  std::vector<int> checked;
  size_t candidates = 12;  // of each product, likeliest first
  int32_t context = 256;   // tokens, of sequences that decode
  // Told of each step's number of tokens and mode when it is done, as a line of text. May be empty.
  std::function<void(const std::string& line)> progress;
  // Told of each product's first turns, in which all of its candidates were. May be empty.
  std::function<void(const TriedKernels& tried)> tried;
};

inline constexpr int kMostDecoded = 256;

// Configuration of a model as tune_steps() takes it.
Result<ModelConfig> read_tuned_config(const std::string& model);

// kUsage: no step of the model has such a mode, or so many tokens. tune_steps() asks it too.
Status check_tuned_steps(const std::string& model, const ModelConfig& config, const TuneStepsOptions& options);

// `config`: the path of a config.json, of a folder with one, or a model that ModelSource::open() takes. Its weights are
// not read. The table has a choice for every product, mode and number of tokens that was tuned, today's where nothing
// was quicker by more than noise. kUnsupported where there is no Hopper GPU.
Result<cuda::Tuned> tune_steps(const std::string& config, const TuneStepsOptions& options);

}  // namespace nfp
