// What a replay says: latency, which requests were served as wanted, how much of it in FP16.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "replay/simulator.h"

namespace nfp {

struct Percentiles {
  double mean = 0, p50 = 0, p90 = 0, p99 = 0, worst = 0;
};
Percentiles percentiles(std::vector<double> values);

// Limits of single requests, seconds; absent = any. The terms of `vllm bench serve --goodput` and of AIPerf.
struct GoodputLimits {
  std::optional<double> ttft_s, tpot_s, e2e_s;
  bool any() const { return ttft_s || tpot_s || e2e_s; }
};
// "ttft:500", "tpot:50", "e2el:2000": milliseconds.
Result<GoodputLimits> parse_goodput(const std::vector<std::string>& texts);

// Those of a row's requests that say the same of themselves: one priority, or what precision they allow.
struct ReplayGroup {
  int64_t requests = 0;
  int64_t failed = 0;
  std::optional<double> tight, loose;  // as in ReplaySummary
  Percentiles ttft, tpot;              // seconds
};

struct ReplaySummary {
  std::string policy;
  double rate = 0;  // requests a second that came
  int64_t requests = 0;
  int64_t failed = 0;
  // Shares of all requests. A request attains a factor when its time to first token and its mean time between tokens
  // are each at most so many times those of the request alone in FP16.
  std::optional<double> tight, loose;          // 5 and 10 times
  std::optional<double> e2e_tight, e2e_loose;  // the same of end-to-end time
  std::optional<double> own;                   // met the engine's targets for them, as it says
  double cached = 0;                           // share of the prompts' tokens that a server's prefix cache had
  std::optional<double> goodput;               // requests a second within the limits
  double fp16_share = 0;                       // of all tokens, prompts too; NaN where a server does not tell
  double fp16_answers = 0;                     // of the answers' tokens alone; likewise
  std::optional<double> fp8_weights;           // share of the weights in FP8, in the mean over tokens
  std::optional<double> kl_ratio;              // KL divergence from FP16 over that of FP8 in every step, see KlCurve
  Percentiles ttft, tpot, e2e, gap;            // seconds; gap: each request's longest
  double output_rate = 0;                      // tokens a second
  std::optional<double> joules;                // of the server's GPUs, idle power included
  std::optional<double> joules_per_token;      // of the answers
  double seconds = 0;
  uint64_t steps = 0, fp8_steps = 0, switches = 0, preemptions = 0;
  std::map<std::string, uint64_t> switch_reasons;  // kLevelChangeNames
  // Empty where all requests are of one kind.
  std::map<int32_t, ReplayGroup> by_priority;
  std::map<std::string, ReplayGroup> by_precision;  // auto, exact, fast
};

// What FP8 in a share of the weights costs: KL divergence from FP16, nats a token, as `evaluate` or `perplexity`
// measured it, straight lines between. A trace's is the mean over its tokens, each by the share of its step: what FP8
// keys and values do to later FP16 steps is left out.
using KlCurve = std::map<double, double>;
// "0.5:0.0023": share and nats. Error where the share 1 is missing.
Result<KlCurve> parse_kl(const std::vector<std::string>& texts);
double kl_at(const KlCurve& curve, double share);

// `model` (null where there is none) says what a request takes alone, in steps of at most max_step_tokens.
ReplaySummary summarize(const ReplayOutcome& outcome, const std::string& policy, const StepModel* model,
                        int32_t max_step_tokens, const GoodputLimits& limits, const KlCurve& kl = {});

struct ReplayReport {
  std::string command;  // as typed
  std::string trace;
  std::string machine;  // the table's model and device, or the URL
  std::vector<ReplaySummary> rows;
  struct Limit {
    std::string policy;
    double rate = 0;  // requests a second; 0: it holds at none
  };
  std::optional<double> attainment;  // of which `limits` are the highest rates
  std::vector<Limit> limits;
  std::vector<ReplayOutcome> outcomes;  // of rows, for CSV and plots
};

std::string to_text(const ReplayReport& report);
std::string to_json(const ReplayReport& report);
std::string to_csv(const ReplayReport& report);   // a line for each request of each row
std::string to_html(const ReplayReport& report);  // self-contained

}  // namespace nfp
