// Plays a trace against the engine itself (its scheduler, block manager and policies) with a model that costs nothing
// and a clock that moves by predicted step times. What is simulated is only how long a step takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "policy/policy.h"
#include "policy/step_model.h"
#include "replay/trace.h"

namespace nfp {

// What became of one request of a trace, simulated or real. Seconds.
struct ReplayedRequest {
  TraceRequest asked;
  bool done = false;  // false: refused or failed
  double ttft_s = 0;  // arrival to first token
  double e2e_s = 0;   // arrival to last token
  double tpot_s = 0;  // mean time between tokens; 0 for one token
  double longest_gap_s = 0;
  int32_t output = 0;                       // tokens that came
  int64_t fp16_tokens = 0, fp8_tokens = 0;  // prompt and answer
  int64_t fp16_output = 0;                  // of the answer alone
  int64_t cached = 0;                       // of a server's prompt, those that its prefix cache had
  std::optional<bool> own_met;              // whether the engine found its targets for this request met
};

struct ReplayOutcome {
  std::vector<ReplayedRequest> requests;  // as in the trace
  double seconds = 0;                     // first arrival to last token
  uint64_t steps = 0;
  uint64_t fp8_steps = 0;
  uint64_t switches = 0;
  std::map<std::string, uint64_t> switch_reasons;  // the same by reason (kLevelChangeNames)
  uint64_t preemptions = 0;
  std::optional<double> joules;  // that the GPUs of a server on this machine used
  // Tokens computed (prompts too) by the share of the weights that their step computed in FP8; 0 = FP16. Empty where a
  // server does not tell.
  std::map<double, int64_t> tokens_by_share;

  void count_switches(const std::string& reason, uint64_t count) {
    if (count == 0) return;
    switches += count;
    switch_reasons[reason] += count;
  }
};

struct SimulationOptions {
  int32_t replicas = 1;
  int32_t max_sequences = 256;
  int32_t max_step_tokens = 2048;
  int64_t kv_tokens = 1 << 20;  // of each replica
  int32_t steps_in_flight = 1;
  Precision fp8 = Precision::kFp8W8A8;
  double slo_factor = 5;  // targets, in times of the request alone in FP16
  // How many times as long as on the machine that `slo_factor` is measured on the model's steps take.
  double slowdown = 1;
  // Targets as `serve` has them instead: these, seconds, and where `serve_least` is above 0 at least so many times what
  // the request takes alone.
  std::optional<double> ttft_s, itl_s;
  double serve_least = 0;
  bool whole_answer = false;  // as LatencyTargets has it
  // Step times differ by up to this share from the table's, so that a policy that predicts from the table is not told
  // the truth; the same seed gives the same run.
  double noise = 0;
  // And up to this share longer, never shorter: a table of the fastest of some rounds, on a machine that has other
  // work.
  double uneven = 0;
  uint64_t seed = 1;

  // Of a step, at most, as the engine has it: each running sequence has a token in one.
  int32_t step_tokens() const { return std::max(max_step_tokens, max_sequences); }
};

using PolicyFactory = std::function<Result<std::unique_ptr<PrecisionPolicy>>()>;
using ReplayProgress = std::function<void(size_t finished, size_t total)>;

Result<ReplayOutcome> simulate(const Trace& trace, const StepModel& model, const PolicyFactory& policy,
                               const SimulationOptions& options, const ReplayProgress& progress = {});

// The same request alone on the machine, in FP16.
struct AloneTimes {
  double ttft_s = 0;
  double e2e_s = 0;
  double tpot_s = 0;
};
AloneTimes alone(const StepModel& model, const TraceRequest& request, int32_t max_step_tokens);

}  // namespace nfp
