// Many requests at once: all are submitted to an idle engine, which computes as many together as it has places for.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eval/bench_engine.h"

namespace nfp {

struct ThroughputOptions {
  std::vector<std::vector<BenchRequest>> loads;  // each is submitted at once
  std::vector<Precision> precisions = {Precision::kFp16, Precision::kFp8};
  int32_t repeats = 1;
};

struct ThroughputRow {
  Precision precision = Precision::kFp16;  // as computed
  int32_t requests = 0;
  int32_t max_sequences = 0;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  // Medians over repeats. Seconds from the first submit to the last token, prefill included.
  double seconds = 0;
  double output_tokens_per_s = 0;
  double total_tokens_per_s = 0;
  std::vector<double> seconds_repeats;
  std::optional<double> joules;  // of all GPUs that this process sees, idle power included; the median too
  // Of the last repeat. TTFT counts the time in the queue.
  double ttft_mean_ms = 0, ttft_p99_ms = 0;
  double itl_mean_ms = 0, itl_p99_ms = 0;
  int64_t steps = 0;
  int64_t preempted = 0;
  double kv_use = 0;  // the most at any time, share of the blocks
  HostTimes host;
};

using ThroughputCallback = std::function<void(const ThroughputRow&)>;

Result<std::vector<ThroughputRow>> measure_throughput(BenchEngine& engine, const ThroughputOptions& options,
                                                      const ThroughputCallback& on_row);

// Lengths of the first `count` requests of a trace that fit a context of `ctx` tokens. The trace is CSV text with a
// header that names ContextTokens and GeneratedTokens (the Azure LLM inference traces; Patel et al., Splitwise, ISCA
// 2024); `where` names it in errors.
Result<std::vector<BenchRequest>> parse_trace(std::string_view text, std::string_view where, int32_t count,
                                              int32_t ctx);

nlohmann::ordered_json to_json(const ThroughputRow& row);
std::string to_text(const ThroughputRow& row);

}  // namespace nfp
