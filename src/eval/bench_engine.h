// One engine, many runs: what the modes of `nestedfp bench` measure with.
//
// Requests of uniformly random tokens, greedy, that go on to their last token whatever they sample; no prefix is
// cached; the engine is stepped as a server's thread steps it. An engine serves many runs because on a device making
// its runner takes (and clears) all memory that is free.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <functional>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/result.h"
#include "runtime/loaded_model.h"

namespace nfp {

struct BenchRequest {
  int32_t input = 1;   // tokens of the prompt
  int32_t output = 1;  // tokens sampled
};

// What a step is computed in.
struct BenchLevel {
  Precision precision = Precision::kFp16;
  double fp8_share = 1.0;    // of the weights, in a precision that is not exact
  bool alternating = false;  // with FP16: every other step is that
};

struct BenchRun {
  double seconds = 0;  // first submit to last token
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  int64_t preempted = 0;
  std::vector<StepRecord> steps;
  std::vector<double> ttft_s;  // of each request
  std::vector<double> itl_s;   // between each two tokens of a request
};

class BenchEngine final : private EngineObserver {
 public:
  // As the server does it: without `graphs` each operation is enqueued anew and each step waited for, to time
  // operations. Of `config`, the queue, prefix caching and FP8 levels do not matter. Refuses a context that the model
  // does not have.
  static Result<std::unique_ptr<BenchEngine>> create(LoadedModel& loaded, EngineConfig config);

  // Submits all requests, then steps until they are done.
  Result<BenchRun> run(std::span<const BenchRequest> requests, const BenchLevel& level, uint32_t seed);
  // So many sequences are decoded once or twice in each number that decode steps are captured for, where they are.
  Status warm_up(int32_t sequences, const BenchLevel& level);

  // The parts of run(), for modes that do something between steps.
  void set_level(const BenchLevel& level);
  Status submit(const BenchRequest& request);
  Status step();
  void cancel_all();
  bool idle() const { return serving_.engine->idle(); }
  const std::vector<StepRecord>& steps() const { return run_.steps; }  // since begin()
  void begin(uint32_t seed);                                           // forgets what was recorded

  // Told of each step as it is recorded; may be empty.
  std::function<void(const StepRecord&)> on_recorded;

  // What a step asked for in this precision is computed in.
  Precision computed(Precision asked) const { return serving_.runner->computed(asked); }
  LoadedModel& loaded() { return loaded_; }
  const EngineConfig& config() const { return serving_.engine->config(); }

 private:
  explicit BenchEngine(LoadedModel& loaded) : loaded_(loaded) {}
  void on_step(const StepRecord& step) override;
  void on_token_gap(double seconds) override { run_.itl_s.push_back(seconds); }
  void on_first_token(double seconds, int32_t) override { run_.ttft_s.push_back(seconds); }

  LoadedModel& loaded_;
  ServingEngine serving_;
  std::mt19937 random_;
  uint64_t next_id_ = 0;
  uint64_t first_id_ = 0;  // since begin()
  BenchRun run_;
};

// 0 of nothing.
double median(std::vector<double> values);
double mean(std::span<const double> values);
double percentile(std::vector<double> values, double share);  // the nearest rank

// Where the host's time goes in a step: medians, microseconds.
struct HostTimes {
  double submit_us = 0;
  double wait_us = 0;
  double output_us = 0;
  // Steps whose result was there before the host came for it: the device may have had nothing to do then.
  double late_share = 0;
};
HostTimes host_times(std::span<const StepRecord> steps);
nlohmann::ordered_json to_json(const HostTimes& host);

// Steps that decode this many sequences and nothing else, in these.
std::vector<StepRecord> decode_steps(std::span<const StepRecord> steps, int32_t sequences);
// How many steps the first of so many sequences decodes in before all of them do: those that compute the other prompts,
// in what room it and others leave there.
int32_t steps_before_all_decode(int32_t sequences, int32_t prompt, int32_t step_tokens);
// Seconds of steps.
std::vector<double> step_seconds(std::span<const StepRecord> steps);

}  // namespace nfp
