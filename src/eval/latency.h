// One batch at a time: time to first token, and time of a decode step.
//
// Measured as the harness that other engines are compared with measures them: all requests of a batch are submitted at
// once to an idle engine; the time to first token of one request is that of a run that ends with it, and the decode
// step is the median time between the results of two steps, over steps that decode the whole batch and nothing else.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "eval/bench_engine.h"

namespace nfp {

struct LatencyOptions {
  std::vector<int32_t> batches = {1, 8, 32};
  std::vector<int32_t> inputs = {128};  // tokens of a prompt; each with each batch
  int32_t output = 128;                 // tokens sampled a sequence; 1 = only the first token is measured
  std::vector<Precision> precisions = {Precision::kFp16, Precision::kFp8};
  int32_t repeats = 3;
};

// Decoding with drafts (EngineConfig::speculative_tokens), from the last repeat.
struct DraftTimes {
  int64_t steps = 0;      // that drafted,
  double step_ms = 0;     // their median,
  double drafts = 0;      // a sequence and step, in the mean,
  double acceptance = 0;  // and the share of these that were right
  double token_ms = 0;    // decoding, steps without drafts too: a step's mean time over the mean of a sequence's tokens
};

struct LatencyRow {
  Precision precision = Precision::kFp16;  // as computed
  int32_t batch = 1;
  int32_t input = 0;
  int32_t output = 0;
  // Medians over repeats.
  double ttft_ms = 0;       // mean over the batch
  double ttft_last_ms = 0;  // of the request that waits longest
  double step_ms = 0;       // the median decode step, of those without drafts; 0 where there is none
  double step_p99_ms = 0;
  double seconds = 0;  // the whole run
  std::vector<double> step_ms_repeats;
  HostTimes host;  // of the last repeat's decode steps
  DraftTimes drafts;
};

using LatencyCallback = std::function<void(const LatencyRow&)>;  // as each is there

Result<std::vector<LatencyRow>> measure_latency(BenchEngine& engine, const LatencyOptions& options,
                                                const LatencyCallback& on_row);

nlohmann::ordered_json to_json(const LatencyRow& row);
std::string to_text(const LatencyRow& row);

}  // namespace nfp
