// Model -> nested checkpoint -> model again (docs/format.md, "On disk").
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/model_source.h"
#include "nested/upper_rule.h"

namespace nfp {

struct ConvertOptions {
  bool force = false;
  uint64_t shard_bytes = 5'000'000'000;
  ProgressCallback progress;
  // Gives the reader of a linear layer's matrix; empty = ModelSource::matrix. Calibration puts its own choice of uppers
  // here.
  std::function<Result<std::unique_ptr<MatrixReader>>(const std::string& name)> matrix;
  UpperRule uppers = UpperRule::kNearest;
  std::string calibration;  // JSON object to record in config.json beside the rule; empty = none
};

struct ConvertReport {
  int64_t nested = 0;              // matrices
  std::vector<std::string> dense;  // names of linear layers that stayed dense
  // Of these, those that would nest, and the matrix of the same group (q/k/v, gate/up) that does not: other engines
  // multiply a group as one matrix and refuse one that is part FP8.
  std::map<std::string, std::string> dense_with;
  uint64_t bytes = 0;  // written, tensors only
};

// Errors leave nothing behind at `destination`. kUnsupported: the source is a nested checkpoint already.
Result<ConvertReport> convert(const ModelSource& source, const std::string& destination, const ConvertOptions& options,
                              ThreadPool& threads);

// What convert() would refuse before it reads the weights; worth asking before calibrating.
Status check_convert(const ModelSource& source, const std::string& destination, const ConvertOptions& options);

struct RestoreReport {
  int64_t tensors = 0;
  uint64_t bytes = 0;
  // BF16 and FP32 matrices that FP16 did not hold exactly: the nearest BF16 or FP16 is written.
  std::vector<std::string> inexact;
};

// Writes the source's tensors in their original dtypes (FP32 and quantised sources: FP16).
Result<RestoreReport> restore(const ModelSource& source, const std::string& destination, const ConvertOptions& options,
                              ThreadPool& threads);

}  // namespace nfp
