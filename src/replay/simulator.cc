#include "replay/simulator.h"

#include <algorithm>
#include <deque>
#include <limits>

#include "engine/engine.h"

namespace nfp {
namespace {

using Time = EngineClock::time_point;

Time time_at(double seconds) {
  return Time(std::chrono::duration_cast<EngineClock::duration>(std::chrono::duration<double>(seconds)));
}

// A machine that does nothing for as long as the model says.
class SimulatedRunner final : public StepRunner {
 public:
  SimulatedRunner(const StepModel& model, const SimulationOptions& options, uint64_t seed)
      : model_(model), options_(options), random_(seed) {}

  int32_t vocab() const override { return 16; }
  int32_t max_context() const override { return std::numeric_limits<int32_t>::max() / 2; }
  int32_t max_in_flight() const override { return 2; }
  Status start(const Sequence&) override { return ok_status(); }

  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    StepWork work;
    work.apart = plan.exact_singles;
    Step step;
    for (const ScheduledSequence& item : plan.items) {
      work.add(item.count, item.first);
      if (item.samples) step.output.sampled.emplace_back().token = 5;
    }
    const size_t level = model_.find_level(precision, is_exact(precision) ? 0.0 : plan.fp8_share);
    if (level >= model_.levels().size()) {
      return error(ErrorCode::kUnsupported, "the step-time table has no level for {} in a share of {:.2f}",
                   name_of(precision), plan.fp8_share);
    }
    double times = 1;
    if (options_.noise > 0) times += options_.noise * (2 * uniform() - 1);
    if (options_.uneven > 0) times += options_.uneven * uniform();
    step.done_s = std::max(now_s, free_s_) + model_.seconds(level, work) * times;
    if (!(step.done_s <= kMostReplaySeconds)) {
      return error(ErrorCode::kInvalidInput,
                   "the simulation has come to {:g} s, and may take {:g}: lower --slowdown and --table-scale, or play "
                   "fewer requests",
                   step.done_s, kMostReplaySeconds);
    }
    free_s_ = step.done_s;
    in_flight_.push_back(std::move(step));
    return next_++;
  }
  Result<StepOutput> collect(StepTicket) override {
    Step step = std::move(in_flight_.front());
    in_flight_.pop_front();
    now_s = std::max(now_s, step.done_s);
    return std::move(step.output);
  }

  double now_s = 0;

 private:
  struct Step {
    StepOutput output;
    double done_s = 0;
  };
  double uniform() {  // splitmix64
    uint64_t z = random_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
  }

  const StepModel& model_;
  const SimulationOptions& options_;
  uint64_t random_;
  double free_s_ = 0;
  std::deque<Step> in_flight_;
  StepTicket next_ = 0;
};

class Recorder final : public EngineObserver {
 public:
  explicit Recorder(ReplayOutcome& outcome) : outcome_(outcome) {}
  void on_step(const StepRecord& step) override {
    outcome_.steps += 1;
    outcome_.fp8_steps += is_exact(step.precision) ? 0 : 1;
    if (step.switched) outcome_.count_switches(std::string(kLevelChangeNames[static_cast<size_t>(step.change)]), 1);
    outcome_.tokens_by_share[step.fp8_share] += step.tokens - step.exact_tokens;
    if (step.exact_tokens > 0) outcome_.tokens_by_share[0] += step.exact_tokens;
  }
  void on_finished(const RequestRecord& record) override {
    ReplayedRequest& request = outcome_.requests[std::stoull(record.id)];
    request.done = record.finish == FinishReason::kLength;
    request.own_met = record.attained;
    request.ttft_s = record.ttft_s;
    request.e2e_s = record.e2e_s;
    request.longest_gap_s = record.longest_gap_s;
    request.output = record.usage.completion_tokens;
    if (request.output > 1) request.tpot_s = record.decode_s / (request.output - 1);
    request.fp16_tokens = record.usage.prompt.fp16 + record.usage.completion.fp16;
    request.fp16_output = record.usage.completion.fp16;
    request.fp8_tokens = record.usage.prompt.fp8 + record.usage.completion.fp8;
    ++finished;
  }
  size_t finished = 0;

 private:
  ReplayOutcome& outcome_;
};

struct Replica {
  std::unique_ptr<SimulatedRunner> runner;
  std::unique_ptr<Engine> engine;
  int64_t tokens = 0;                             // of requests in flight, for routing
  std::vector<std::pair<double, int64_t>> ended;  // when, and how many of these: a router learns of it no sooner
  uint64_t steps = 0;                             // at the last look, to notice an engine that does not get on
};

// One replica of the engine or several behind a router that sends each request where the fewest tokens are in flight.
class Fleet {
 public:
  Fleet(const StepModel& model, const SimulationOptions& options, const PolicyFactory& policy, EngineObserver* observer)
      : model_(model),
        options_(options),
        policy_(policy),
        observer_(observer),
        replicas_(static_cast<size_t>(options.replicas)) {}

  // The replica that has work and whose clock is the furthest behind; nullptr when there is no work.
  Replica* earliest();
  // Gives a request of the trace to a replica. One that is longer than the KV cache stays undone.
  Status submit(const TraceRequest& asked, size_t index);
  // One step of a replica.
  Status step(const Trace& trace, Replica* replica);
  uint64_t preemptions() const {
    uint64_t sum = 0;
    for (const Replica& replica : replicas_) sum += replica.engine ? replica.engine->stats().preemptions : 0;
    return sum;
  }

 private:
  EngineConfig config() const;
  // With its first request: one that gets none takes no memory for a KV cache.
  Status start(Replica& replica) const;

  const StepModel& model_;
  const SimulationOptions& options_;
  const PolicyFactory& policy_;
  EngineObserver* observer_;
  std::vector<Replica> replicas_;
};

EngineConfig Fleet::config() const {
  EngineConfig engine;
  engine.limits.max_sequences = options_.max_sequences;
  engine.limits.max_step_tokens = options_.step_tokens();
  engine.limits.max_queue = std::numeric_limits<int32_t>::max();
  engine.block_size = 16;
  engine.kv_blocks = static_cast<int32_t>(std::min<int64_t>(options_.kv_tokens / engine.block_size, 1 << 26));
  engine.prefix_caching = false;
  engine.fp8 = options_.fp8;
  engine.steps_in_flight = options_.steps_in_flight;
  engine.targets.whole_answer = options_.whole_answer;
  engine.fp8_levels.clear();
  for (const StepLevel& level : model_.levels()) {
    if (level.precision == options_.fp8) engine.fp8_levels.push_back(level.fp8_share);
  }
  std::sort(engine.fp8_levels.begin(), engine.fp8_levels.end());
  return engine;
}

Status Fleet::start(Replica& replica) const {
  const auto index = static_cast<uint64_t>(&replica - replicas_.data());
  replica.runner = std::make_unique<SimulatedRunner>(model_, options_, options_.seed * 1000003 + index);
  EngineConfig engine = config();
  engine.now = [runner = replica.runner.get()] { return time_at(runner->now_s); };
  NFP_ASSIGN_OR_RETURN(auto made, policy_());
  replica.engine = std::make_unique<Engine>(engine, replica.runner.get(), nullptr, std::move(made));
  replica.engine->set_observer(observer_);
  return ok_status();
}

Replica* Fleet::earliest() {
  Replica* earliest = nullptr;
  for (Replica& replica : replicas_) {
    if (!replica.engine || replica.engine->idle()) continue;
    if (earliest == nullptr || replica.runner->now_s < earliest->runner->now_s) earliest = &replica;
  }
  return earliest;
}

Status Fleet::submit(const TraceRequest& asked, size_t index) {
  for (Replica& replica : replicas_) {
    std::erase_if(replica.ended, [&](const auto& end) {
      if (end.first > asked.arrival_s) return false;
      replica.tokens -= end.second;
      return true;
    });
  }
  const auto least = std::min_element(replicas_.begin(), replicas_.end(),
                                      [](const Replica& a, const Replica& b) { return a.tokens < b.tokens; });
  if (!least->engine) NFP_RETURN_IF_ERROR(start(*least));
  if (least->engine->idle()) least->runner->now_s = std::max(least->runner->now_s, asked.arrival_s);
  Request request;
  request.id = std::to_string(index);
  request.prompt.assign(static_cast<size_t>(asked.input), 4);
  request.sampling.max_tokens = asked.output;
  request.sampling.seed = 0;
  request.sampling.ignore_eos = true;
  request.arrival = time_at(asked.arrival_s);
  request.priority = asked.priority;
  request.precision = asked.precision.value_or(PrecisionClass::kAuto);
  TraceRequest two = asked;
  two.output = 2;
  const auto target = [&](const std::optional<double>& fixed, double alone_s) {
    return fixed ? std::max(*fixed, options_.serve_least * alone_s) : options_.slo_factor * alone_s / options_.slowdown;
  };
  request.slo_ttft_s = target(options_.ttft_s, alone(model_, asked, options_.step_tokens()).ttft_s);
  request.slo_itl_s = target(options_.itl_s, alone(model_, two, options_.step_tokens()).tpot_s);
  Status status = least->engine->submit(std::move(request));
  if (status.ok()) {
    least->tokens += asked.input + asked.output;
  } else if (status.error().code != ErrorCode::kInvalidInput) {
    return status;
  }
  return ok_status();
}

Status Fleet::step(const Trace& trace, Replica* replica) {
  const std::vector<RequestOutput> outputs = replica->engine->step();
  const uint64_t steps = replica->engine->stats().steps;
  if (outputs.empty() && steps == replica->steps) {
    return error(ErrorCode::kResource, "a replica of {} KV tokens could not schedule any of its requests",
                 options_.kv_tokens);
  }
  replica->steps = steps;
  for (const RequestOutput& output : outputs) {
    if (!output.finish) continue;
    if (*output.finish == FinishReason::kError && output.error_code != ErrorCode::kResource) {  // kResource: shed
      return error(output.error_code, "simulated request {}: {}", output.id, output.error);
    }
    const TraceRequest& asked = trace.requests[std::stoull(output.id)];
    replica->ended.emplace_back(replica->runner->now_s, asked.input + asked.output);
  }
  return ok_status();
}

}  // namespace

AloneTimes alone(const StepModel& model, const TraceRequest& request, int32_t max_step_tokens) {
  AloneTimes times;
  const size_t level = model.exact_level();
  times.ttft_s = model.prompt_seconds(level, request.input, 0, max_step_tokens);
  times.e2e_s = times.ttft_s;
  if (request.output < 2) return times;
  // Keys grow by one a step, so the mean step is the one in the middle.
  StepWork work;
  work.add(1, request.input + (request.output - 1) / 2);
  times.tpot_s = model.seconds(level, work);
  times.e2e_s += times.tpot_s * (request.output - 1);
  return times;
}

Result<ReplayOutcome> simulate(const Trace& trace, const StepModel& model, const PolicyFactory& policy,
                               const SimulationOptions& options, const ReplayProgress& progress) {
  if (model.exact_level() >= model.levels().size()) {
    return error(ErrorCode::kInvalidInput, "the step-time table has no FP16 level");
  }
  ReplayOutcome outcome;
  outcome.requests.resize(trace.requests.size());
  Recorder recorder(outcome);
  Fleet fleet(model, options, policy, &recorder);
  size_t next = 0, reported = 0;
  while (true) {
    Replica* earliest = fleet.earliest();
    const bool more = next < trace.requests.size();
    if (earliest == nullptr && !more) break;
    if (more && (earliest == nullptr || trace.requests[next].arrival_s <= earliest->runner->now_s)) {
      outcome.requests[next].asked = trace.requests[next];
      NFP_RETURN_IF_ERROR(fleet.submit(trace.requests[next], next));
      ++next;
      continue;
    }
    NFP_RETURN_IF_ERROR(fleet.step(trace, earliest));
    outcome.seconds = std::max(outcome.seconds, earliest->runner->now_s);
    if (progress && recorder.finished >= reported + 100) {
      reported = recorder.finished;
      progress(reported, trace.requests.size());
    }
  }
  outcome.preemptions += fleet.preemptions();
  if (progress) progress(recorder.finished, trace.requests.size());
  return outcome;
}

}  // namespace nfp
