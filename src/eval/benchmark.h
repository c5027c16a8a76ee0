// Speed of a loaded model through the engine: prefill and decode by batch size and precision, with the bytes of weights
// a step reads and the time of each kind of operation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "runtime/loaded_model.h"

namespace nfp {

struct BenchmarkOptions {
  std::vector<int32_t> batches = {1, 8, 32};
  std::vector<Precision> precisions = {Precision::kFp16, Precision::kFp8};
  int32_t prompt = 512;    // tokens of a prompt in the prefill test
  int32_t context = 32;    // tokens of context when decoding starts
  int32_t generate = 128;  // tokens generated a sequence in the decode test
  int32_t repeats = 3;     // medians of this many, precisions interleaved
  int32_t max_step_tokens = 512;
  DType kv_dtype = DType::kF16;
  bool stages = true;  // also time each kind of operation, in runs of their own
  int32_t context_needed() const { return std::max(prompt + 1, context + generate); }  // tokens of a sequence at most
  std::function<double()> read_rate;  // where given: memory's, 10^9 bytes/s, asked before and after each run
};

struct BenchmarkRow {
  std::string test;  // "prefill" or "decode"
  Precision precision = Precision::kFp16;
  int32_t batch = 1;
  double tokens_per_s = 0;        // of all sequences together; median over repeats
  double step_ms = 0;             // median step
  double weight_gb_per_s = 0;     // bytes of weights that a step reads, over the median step
  double gflop_per_s = 0;         // arithmetic of a step's stages, over the median step; 0 without them
  double over_reading = 0;        // the step over reading its weights at read_rate, median over repeats; 0 without it
  double read_gb_per_s = 0;       // read_rate, median over repeats
  std::vector<StageTime> stages;  // of one step, on average
};

// Called before each row with what comes next.
using BenchmarkProgress = std::function<void(const std::string& what, int32_t done, int32_t total)>;

Result<std::vector<BenchmarkRow>> run_benchmark(LoadedModel& loaded, const BenchmarkOptions& options,
                                                const BenchmarkProgress& progress);

}  // namespace nfp
