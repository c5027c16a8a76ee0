// Model -> nested checkpoint -> model (docs/format.md, "On disk").
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/model_source.h"

namespace nfp {

struct ConvertOptions {
  bool force = false;                                       // replace DST
  uint64_t shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;  // at most, of a file (one tensor may be larger)
  ProgressCallback progress;
  // Lays other uppers over a matrix (src/calibrate); may be empty. Gets the tensor's name.
  std::function<Result<std::unique_ptr<MatrixReader>>(const std::string&, std::unique_ptr<MatrixReader>)> filter;
  std::string calibration;  // JSON object for config.json's nestedfp.calibration; empty = none
};

struct ConvertReport {
  int64_t nested = 0;        // matrices
  int64_t dense = 0;         // linear matrices that could not be nested
  int64_t rows_shifted = 0;  // rows with an exponent
  int64_t inexact = 0;       // BF16 weights that did not convert exactly
  uint64_t bytes = 0;        // written
};

// Writes `source` as a nested checkpoint into the directory `dst`, which appears when it is whole. Memory is bounded by
// the row exponents and a few chunks. Errors: source is nested already or quantised, dst exists, disk full, NaN.
Result<ConvertReport> convert(const ModelSource& source, const std::string& dst, const ConvertOptions& options,
                              ThreadPool& threads);

struct RestoreOptions {
  bool force = false;
  uint64_t shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;
  ProgressCallback progress;
};

struct RestoreReport {
  bool same_files = false;  // the original's files, in its sharding and with its headers; else newly laid out
  int64_t inexact = 0;      // BF16 weights that differ from the original's
  uint64_t bytes = 0;       // written
};

// Writes the plain checkpoint back: each tensor bit for bit as it was in FP16, or in BF16 where that had been exact.
// A GGUF file's tensors come as FP16 safetensors. Error: source is not a nested checkpoint.
Result<RestoreReport> restore(const ModelSource& source, const std::string& dst, const RestoreOptions& options,
                              ThreadPool& threads);

}  // namespace nfp
