#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "text/detokenizer.h"
#include "text/stop_filter.h"

namespace nfp {
namespace {

double seconds_between(EngineClock::time_point from, EngineClock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

double seconds_of(EngineClock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// Exponential mean over about 20 events: fast enough for a policy to see a surge, slow enough to ignore one slow step.
void update_recent(double& mean, double value) { mean = mean == 0 ? value : mean + 0.05 * (value - mean); }

// Each token once, in order of token; what one is given several times adds up.
void merge_bias(std::vector<std::pair<int32_t, float>>& bias) {
  std::stable_sort(bias.begin(), bias.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  size_t kept = 0;
  for (size_t i = 0; i < bias.size(); ++i) {
    if (kept > 0 && bias[kept - 1].first == bias[i].first) {
      bias[kept - 1].second += bias[i].second;
    } else {
      bias[kept++] = bias[i];
    }
  }
  bias.resize(kept);
}

// Where every token was forbidden the logits are nobody's fault.
bool is_finite(const OutputToken& token) { return token.finite || !token.has_choice; }

// Items that are not computed in this step after all. Those of sequences that go on keep their blocks and are planned
// again.
template <typename Predicate>
void leave_out(StepPlan& plan, const Predicate& predicate) {
  std::erase_if(plan.items, [&](const ScheduledSequence& item) {
    if (!predicate(item)) return false;
    plan.tokens -= item.count;
    if (item.first < item.sequence->prompt_size() || item.count > 1) plan.prefill_tokens -= item.count;
    return true;
  });
}

bool all_decode(const StepPlan& plan) {
  return std::all_of(plan.items.begin(), plan.items.end(),
                     [](const ScheduledSequence& item) { return item.count == 1 && item.samples; });
}

// Whether drafts of its next tokens can be verified together: not where what the next is sampled from depends on the
// one before in another way. A step gives a token more than it drafts.
bool may_draft(const Sequence& sequence) {
  const Request& request = sequence.request;
  const bool room = sequence.size() + 1 < sequence.limit;
  return room && !has_penalties(request.sampling) && !sequence.awaits_token() && !sequence.no_drafts;
}

uint64_t random_seed() {
  thread_local std::mt19937_64 source(std::random_device{}());
  return source();
}

}  // namespace

struct Engine::Entry {
  Sequence* sequence = nullptr;
  Usage usage;
  int32_t prompt_counted = 0;  // prompt tokens already in usage.prompt
  std::vector<OutputToken> prompt_logprobs;
  PooledStates pooled;
  std::optional<StreamingDetokenizer> detokenizer;
  std::optional<StopFilter> stop_filter;
  int32_t max_tokens = 0;
  int32_t preemptions = 0;
  bool shed = false;
  double longest_gap_s = 0;
  EngineClock::time_point arrival;
  std::optional<EngineClock::time_point> scheduled, first_token, last_token;
};

Engine::Engine(EngineConfig config, StepRunner* runner, std::shared_ptr<const Tokenizer> tokenizer,
               std::unique_ptr<PrecisionPolicy> policy)
    : config_(std::move(config)),
      runner_(runner),
      tokenizer_(std::move(tokenizer)),
      policy_(std::move(policy)),
      blocks_(config_.kv_blocks, config_.block_size, config_.prefix_caching),
      scheduler_(config_.limits, &blocks_),
      draft_length_(config_.speculative_tokens, config_.speculative_always) {
  for (int32_t slot = config_.limits.max_sequences - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  config_.steps_in_flight = std::clamp(config_.steps_in_flight, 1, runner_->max_in_flight());
}

Engine::~Engine() = default;

RequestBounds Engine::bounds() const {
  const int64_t cache = int64_t{config_.kv_blocks} * config_.block_size;
  return {.vocab = runner_->vocab(),
          .max_context = static_cast<int32_t>(std::min<int64_t>(runner_->max_context(), cache)),
          .hidden = runner_->hidden(),
          .end_ids = config_.end_ids};
}

bool Engine::idle() const { return entries_.empty() && ended_.empty() && in_flight_.empty(); }

void Engine::set_policy(std::unique_ptr<PrecisionPolicy> policy) { policy_ = std::move(policy); }

Status Engine::submit(Request request) {
  if (device_failure_) return *device_failure_;
  if (idle()) busy_since_ = now();
  if (const auto bad = validate(request.prompt, request.sampling, bounds(), request.pooling, request.prompt_only)) {
    return Error{ErrorCode::kInvalidInput, bad->message};
  }
  if (request.pooling != Pooling::kNone && request.constraint) {
    return error(ErrorCode::kInvalidInput, "a pooled request has no text for a grammar");
  }
  if (!tokenizer_ && !request.sampling.stop.empty()) {
    return error(ErrorCode::kUnsupported, "stop strings need a tokenizer, and this model was loaded without one");
  }
  if (entries_.contains(request.id)) {
    return error(ErrorCode::kInvalidInput, "request id '{}' is already in flight; choose another", request.id);
  }

  auto sequence = std::make_unique<Sequence>();
  sequence->serial = next_serial_++;
  sequence->tokens = request.prompt;
  sequence->seed = request.sampling.seed.value_or(random_seed());
  // Behind a grammar's end nothing restricts the text any more: it would be none of the answer that was asked for.
  if (!request.sampling.ignore_eos || request.constraint) sequence->end_ids = config_.end_ids;
  const std::vector<int32_t>& stops = request.sampling.stop_token_ids;
  sequence->end_ids.insert(sequence->end_ids.end(), stops.begin(), stops.end());
  if (request.sampling.logit_bias.size() + sequence->end_ids.size() > kMaxRowBias) {
    return error(ErrorCode::kInvalidInput, "logit_bias has {} entries and there are {} stop ids; together at most {}",
                 request.sampling.logit_bias.size(), sequence->end_ids.size(), kMaxRowBias);
  }
  sequence->request = std::move(request);
  merge_bias(sequence->request.sampling.logit_bias);
  const int32_t room = bounds().max_context - sequence->prompt_size();
  const SamplingParams& asked = sequence->request.sampling;
  const int32_t usual = std::min(room, std::max(asked.default_max_tokens, asked.min_tokens));
  const int32_t max_tokens = sequence->pooled()              ? 0
                             : sequence->request.prompt_only ? 1
                                                             : asked.max_tokens.value_or(usual);
  sequence->limit = sequence->prompt_size() + max_tokens;

  auto entry = std::make_unique<Entry>();
  const Request& kept = sequence->request;
  entry->sequence = sequence.get();
  entry->usage.prompt_tokens = sequence->prompt_size();
  entry->max_tokens = max_tokens;
  entry->arrival = kept.arrival.value_or(now());
  sequence->arrival_s = seconds_of(entry->arrival);
  set_targets(*sequence);
  if (tokenizer_) {
    entry->detokenizer.emplace(tokenizer_, DetokenizerOptions{.skip_special = kept.skip_special_tokens});
    entry->stop_filter.emplace(kept.sampling.stop, kept.sampling.include_stop);
  }
  const std::string id = kept.id;
  const Sequence* const key = sequence.get();
  const auto waits = without_token_.insert(entry->arrival);
  const auto forget = [&] {
    without_token_.erase(waits);
    by_sequence_.erase(key);
    entries_.erase(id);
  };
  try {
    by_sequence_[key] = entry.get();
    entries_[id] = std::move(entry);
    if (scheduler_.enqueue(sequence)) return ok_status();
  } catch (const std::exception&) {
    forget();
    throw;
  }
  forget();
  return error(ErrorCode::kResource, "the queue is full ({} requests wait); try again later", scheduler_.waiting());
}

bool Engine::cancel(const std::string& id) {
  const auto place = entries_.find(id);
  if (place == entries_.end()) return false;
  RequestOutput output;
  output.id = id;
  end(*place->second, FinishReason::kCancelled, output);
  ended_.push_back(std::move(output));
  remove(id);
  return true;
}

double Engine::share_level(double share) const {
  const auto& levels = config_.fp8_levels;
  const auto level = std::lower_bound(levels.begin(), levels.end(), share);
  return level != levels.end() ? *level : levels.empty() ? 1.0 : levels.back();
}

void Engine::leave_out_unready(StepPlan& plan) {
  TokenConstraint* awaited = nullptr;
  leave_out(plan, [&](const ScheduledSequence& item) {
    TokenConstraint* constraint = item.sequence->request.constraint.get();
    if (!item.samples || constraint == nullptr || constraint->ready(std::chrono::microseconds(0))) return false;
    awaited = constraint;
    return true;
  });
  // Nothing else to do: wait here, but not for long, as requests and cancellations may come.
  if (plan.items.empty() && in_flight_.empty() && awaited != nullptr) {
    busy_since_ = now();  // so far nobody was held up
    awaited->ready(std::chrono::milliseconds(2));
  }
}

Precision Engine::choose_precision(StepPlan& plan, LevelChange& change) {
  StepLoad load;
  load.step_tokens = plan.tokens;
  load.prefill_tokens = plan.prefill_tokens;
  load.running = static_cast<int32_t>(plan.items.size());
  load.waiting = scheduler_.waiting();
  load.kv_use = static_cast<double>(blocks_.in_use()) / std::max(1, blocks_.total());
  load.recent_tpot_s = recent_tpot_s_;
  load.recent_ttft_s = recent_ttft_s_;
  load.step_index = totals_.steps + in_flight_.size();
  const Precision wanted = policy_->choose(load);
  if (!is_exact(wanted)) plan.fp8_share = share_level(policy_->fp8_share(load));

  const auto is_class = [](PrecisionClass kind) {
    return [kind](const ScheduledSequence& item) { return item.sequence->request.precision == kind; };
  };
  if (is_exact(wanted)) {
    const bool all_fast = std::all_of(plan.items.begin(), plan.items.end(), is_class(PrecisionClass::kFast));
    if (!all_fast || policy_->fixed()) return wanted;
    change = LevelChange::kRequests;
    plan.fp8_share = share_level(1.0);
    return config_.fp8;
  }
  // Single tokens that are computed apart are exact anyway.
  const auto apart = [&](const ScheduledSequence& item) { return plan.exact_singles && item.count == 1; };
  const auto exact = std::count_if(plan.items.begin(), plan.items.end(), [&](const ScheduledSequence& item) {
    return item.sequence->wants_exact() && !apart(item);
  });
  if (exact == 0) return wanted;
  change = LevelChange::kRequests;
  if (exact == static_cast<std::ptrdiff_t>(plan.items.size())) return Precision::kFp16;
  // Both kinds are there: each gets every other step.
  const bool exact_now = std::exchange(exact_turn_, !exact_turn_);
  leave_out(plan,
            [&](const ScheduledSequence& item) { return item.sequence->wants_exact() != exact_now && !apart(item); });
  return exact_now ? Precision::kFp16 : wanted;
}

Precision Engine::part_singles(StepPlan& plan, Precision precision) {
  const auto single = [](const ScheduledSequence& item) { return item.count == 1; };
  plan.exact_singles = plan.exact_singles && !is_exact(precision);
  if (!plan.exact_singles) return precision;
  const auto first_chunk = std::stable_partition(plan.items.begin(), plan.items.end(), single);
  if (first_chunk == plan.items.begin()) plan.exact_singles = false;
  if (first_chunk != plan.items.end()) return precision;
  plan.exact_singles = false;
  return Precision::kFp16;
}

int32_t Engine::draft_length(const std::vector<ScheduledSequence>& items) const {
  const auto drafting = std::count_if(items.begin(), items.end(), [](const ScheduledSequence& item) {
    return item.sequence != nullptr && may_draft(*item.sequence);
  });
  if (drafting == 0) return 0;
  const auto sequences = static_cast<int32_t>(items.size());
  return draft_length_.choose(sequences, static_cast<int32_t>(drafting), runner_->max_drafts(sequences));
}

bool Engine::will_draft() const {
  if (!last_level_ || !is_exact(last_level_->precision)) return false;
  const StepPlan& plan = in_flight_.back().plan;
  return !others_wait(plan) && all_decode(plan) && draft_length(plan.items) > 0;
}

void Engine::add_drafts(Step& step) {
  std::vector<ScheduledSequence>& items = step.plan.items;
  if (!draft_length_.on() || !in_flight_.empty() || !is_exact(step.precision) || others_wait(step.plan)) return;
  if (!all_decode(step.plan)) return;
  const int32_t drafts = draft_length(items);
  for (ScheduledSequence& item : items) {
    Sequence& sequence = *item.sequence;
    if (!may_draft(sequence)) continue;
    item.drafts = std::min(sequence.limit - sequence.size() - 1, drafts);
    while (item.drafts > 0 && !scheduler_.reserve(sequence, item.first + 1 + item.drafts)) --item.drafts;
  }
}

void Engine::count_drafts(const Step& step, const StepOutput& result, StepRecord& record) {
  int32_t tried = 0;
  size_t sample = 0;
  for (const ScheduledSequence& item : step.plan.items) {
    if (!item.samples) continue;
    const auto right = static_cast<int32_t>(result.accepted[sample++].size());
    record.drafted += item.drafts;
    totals_.drafts += item.drafts > 0 ? 1 : 0;
    record.accepted += right;
    tried += right + (right < item.drafts ? 1 : 0);
  }
  record.tokens += record.accepted;
  totals_.tokens_by_precision[static_cast<size_t>(step.precision)] += static_cast<uint64_t>(record.accepted);
  totals_.drafted_tokens += static_cast<uint64_t>(record.drafted);
  totals_.accepted_tokens += static_cast<uint64_t>(record.accepted);
  draft_length_.drafted(record.sequences, step.plan.drafts(), tried, record.accepted, record.seconds);
}

void Engine::free_slot(Sequence& sequence) {
  if (sequence.history_slot >= 0) free_slots_.push_back(std::exchange(sequence.history_slot, -1));
}

Status Engine::start_sequences(StepPlan& plan, std::vector<RequestOutput>& outputs) {
  const auto now = this->now();
  for (Sequence* sequence : plan.preempted) {
    free_slot(*sequence);
    ++by_sequence_.at(sequence)->preemptions;
  }
  for (Sequence* sequence : plan.admitted) {
    Entry& entry = *by_sequence_.at(sequence);
    if (!entry.scheduled) {
      entry.scheduled = now;
      entry.usage.cached_tokens = sequence->cached;
    }
    if (!entry.first_token) {  // what its prompt was before a preemption counts no more
      entry.usage.prompt.fp16 = sequence->reused_fp16;
      entry.usage.prompt.fp8 = sequence->reused - sequence->reused_fp16;
      entry.prompt_counted = sequence->reused;
    }
    sequence->history_slot = free_slots_.back();
    free_slots_.pop_back();
    Status started = runner_->start(*sequence);
    if (started.ok()) continue;
    if (started.error().code == ErrorCode::kDevice) return started;
    leave_out(plan, [&](const ScheduledSequence& item) { return item.sequence == sequence; });
    end_with(std::string(sequence->request.id), started.error(), outputs);
  }
  return ok_status();
}

std::vector<RequestOutput> Engine::step() {
  std::vector<RequestOutput> outputs = std::exchange(ended_, {});
  while (static_cast<int32_t>(in_flight_.size()) < config_.steps_in_flight && submit_step(outputs)) {
  }
  if (!in_flight_.empty()) collect_step(outputs);
  return outputs;
}

void Engine::set_targets(Sequence& sequence) const {
  const Request& request = sequence.request;
  const LatencyTargets& targets = config_.targets;
  sequence.ttft_target_s = request.slo_ttft_s.value_or(targets.ttft_s);
  sequence.itl_target_s = request.slo_itl_s.value_or(targets.itl_s);
  const StepModel* model = policy_->model();
  if (model == nullptr || model->exact_level() >= model->levels().size()) return;
  const size_t exact = model->exact_level();
  const int32_t prompt = sequence.prompt_size();
  StepWork next;  // the token after the prompt
  next.add(1, prompt);
  const double prompt_s = model->prompt_seconds(exact, prompt, 0, scheduler_.limits().max_step_tokens);
  if (!request.slo_ttft_s) sequence.ttft_target_s = std::max(sequence.ttft_target_s, targets.least_ttft * prompt_s);
  if (!request.slo_itl_s) {
    sequence.itl_target_s = std::max(sequence.itl_target_s, targets.least_itl * model->seconds(exact, next));
  }
}

StepPlan Engine::plan_step(StepRecord& record, std::vector<RequestOutput>& outputs) {
  StepState state;
  // When what is in flight will be done.
  auto start = now();
  for (const Step& step : in_flight_) {
    start = std::max(start, step.record.start) +
            std::chrono::duration_cast<EngineClock::duration>(std::chrono::duration<double>(step.record.predicted_s));
  }
  state.now_s = seconds_of(start);
  const std::span<SequenceState> states = scheduler_.states();
  for (size_t i = 0; i < states.size(); ++i) {
    SequenceState& at = states[i];
    if (at.emitted == 0) {
      record.oldest_wait_s = std::max(record.oldest_wait_s, state.now_s - at.arrival_s);
      continue;
    }
    const Entry& entry = *by_sequence_.at(scheduler_.sequences()[i]);
    at.last_s = entry.last_token ? seconds_of(*entry.last_token) : state.now_s;
    if (config_.targets.whole_answer) {
      at.due_s += at.emitted * at.itl_s;
    } else {
      const double first = entry.first_token ? seconds_of(*entry.first_token) : state.now_s;
      at.due_s = first + at.emitted * at.itl_s;
    }
  }
  state.sequences = states;
  state.steps_ahead = config_.steps_in_flight - 1;
  state.max_step_tokens = scheduler_.limits().max_step_tokens;
  state.max_sequences = scheduler_.limits().max_sequences;
  state.free_tokens = int64_t{blocks_.available()} * blocks_.block_size();
  const StepDecision decision = policy_->decide(state);
  record.lost = static_cast<int32_t>(decision.lost.size());
  record.change = decision.change;
  struct Shed {
    std::string id;
    bool hopeless;
  };
  std::vector<Shed> shed;
  size_t next_hopeless = 0;  // they are in the same order
  for (const size_t i : decision.shed) {
    const bool hopeless = next_hopeless < decision.hopeless.size() && decision.hopeless[next_hopeless] == i;
    next_hopeless += hopeless ? 1 : 0;
    shed.push_back({scheduler_.sequences()[i]->request.id, hopeless});
  }
  const size_t all = states.size();
  StepPlan plan = scheduler_.schedule(decision);
  plan.exact_singles = decision.exact_singles;
  for (const auto& [id, hopeless] : shed) {
    Entry& entry = *entries_.at(id);
    entry.shed = true;
    const double target_ms = 1e3 * entry.sequence->ttft_target_s;
    const size_t others = all - shed.size();
    end_with(id,
             hopeless
                 ? error(ErrorCode::kResource,
                         "the first token cannot come within {:.0f} ms: the prompt takes longer than that", target_ms)
                 : error(ErrorCode::kResource,
                         "the first token cannot come within {:.0f} ms, as {} requests are being answered; try again "
                         "later",
                         target_ms, others),
             outputs);
    outputs.back().shed = true;
    outputs.back().retry_after_s = hopeless ? 0 : decision.busy_s;
  }
  return plan;
}

bool Engine::submit_step(std::vector<RequestOutput>& outputs) {
  if (draft_length_.on() && !in_flight_.empty() && (in_flight_.back().plan.drafts() > 0 || will_draft())) return false;
  const auto start = now();
  Step step;
  step.plan = policy_->plans() ? plan_step(step.record, outputs) : scheduler_.schedule();
  StepPlan& plan = step.plan;
  const auto preempted = static_cast<int32_t>(plan.preempted.size());
  const Status started = start_sequences(plan, outputs);
  leave_out_unready(plan);
  if (plan.items.empty() && started.ok()) return false;
  if (!policy_->plans()) {
    step.record.change = LevelChange::kRule;
    if (!without_token_.empty()) {
      step.record.oldest_wait_s = std::max(0.0, seconds_between(*without_token_.begin(), start));
    }
  }
  step.precision = part_singles(plan, runner_->computed(choose_precision(plan, step.record.change)));
  if (started.ok()) add_drafts(step);
  const Result<StepTicket> ticket =
      started.ok() ? runner_->submit(plan, step.precision) : Result<StepTicket>(started.error());
  if (!ticket.ok()) {
    const bool again = plan.drafts() > 0 && ticket.error().code != ErrorCode::kDevice;
    again ? forgo_drafts(plan, outputs) : fail(plan, ticket.error(), outputs);
    return false;
  }
  step.ticket = *ticket;
  scheduler_.submitted(plan);
  StepRecord& record = step.record;
  record.start = start;
  record.precision = step.precision;
  record.tokens = plan.tokens;
  record.prefill_tokens = plan.prefill_tokens;
  record.sequences = static_cast<int32_t>(plan.items.size());
  record.waiting = scheduler_.waiting();
  record.preempted = preempted;
  record.fp8_share = is_exact(step.precision) ? 0.0 : plan.fp8_share;
  const StepLevel level = {step.precision, record.fp8_share};
  record.switched = last_level_ && *last_level_ != level;
  if (record.switched && record.change == LevelChange::kNone) record.change = LevelChange::kRequests;  // no longer
  if (!record.switched) record.change = LevelChange::kNone;
  last_level_ = level;
  step.work.apart = plan.exact_singles;
  for (const ScheduledSequence& item : plan.items) {
    step.work.add(item.count, item.first);
    if (!is_exact(step.precision) && is_exact(step.of(item))) record.exact_tokens += 1;
  }
  if (policy_->model() != nullptr && plan.drafts() == 0) {
    const size_t known = policy_->model()->find_level(step.precision, record.fp8_share);
    if (known < policy_->model()->levels().size()) record.predicted_s = policy_->model()->seconds(known, step.work);
  }
  record.submit_s = seconds_between(start, now());
  in_flight_.push_back(std::move(step));
  return true;
}

void Engine::end_with(const std::string& id, const Error& error, std::vector<RequestOutput>& outputs) {
  RequestOutput& output = outputs.emplace_back();
  output.id = id;
  output.error = error.message;
  output.error_code = error.code;
  end(*entries_.at(id), FinishReason::kError, output);
  remove(id);
}

void Engine::fail(const StepPlan& plan, const Error& error, std::vector<RequestOutput>& outputs) {
  std::vector<std::string> ids;
  for (const ScheduledSequence& item : plan.items) {
    if (item.sequence != nullptr) ids.push_back(item.sequence->request.id);
  }
  if (error.code == ErrorCode::kDevice) {
    device_failure_ = error;
    ids.clear();
    for (const auto& [id, entry] : entries_) ids.push_back(id);
  }
  for (const std::string& id : ids) end_with(id, error, outputs);
}

void Engine::forgo_drafts(StepPlan& plan, std::vector<RequestOutput>& outputs) {
  for (ScheduledSequence& item : plan.items) {
    if (item.sequence == nullptr) continue;
    Sequence& sequence = *item.sequence;
    sequence.no_drafts = true;
    scheduler_.trim(sequence);
    const Status started = runner_->start(sequence);
    if (started.ok()) continue;
    if (started.error().code == ErrorCode::kDevice) return fail(plan, started.error(), outputs);
    item.sequence = nullptr;
    end_with(std::string(sequence.request.id), started.error(), outputs);
  }
}

void Engine::collect_step(std::vector<RequestOutput>& outputs) {
  // Stays in the list meanwhile: a request that ends takes its sequence out of all items.
  Step& step = in_flight_.front();
  const auto waits = now();
  const double between = seconds_between(busy_since_, waits);
  Result<StepOutput> result = runner_->collect(step.ticket);
  const auto arrived = now();
  busy_since_ = arrived;
  if (!result.ok() && step.plan.drafts() > 0 && result.error().code != ErrorCode::kDevice) {
    scheduler_.take_back(step.plan);
    forgo_drafts(step.plan, outputs);
    in_flight_.pop_front();
    return;
  }
  if (!result.ok()) {
    fail(step.plan, result.error(), outputs);
    in_flight_.pop_front();
    if (device_failure_) in_flight_.clear();
    return;
  }
  const Precision precision = step.precision;
  StepRecord record = step.record;
  record.index = totals_.steps++;
  totals_.precision_switches += record.switched ? 1 : 0;
  totals_.steps_by_precision[static_cast<size_t>(precision)] += 1;
  totals_.tokens_by_precision[static_cast<size_t>(precision)] +=
      static_cast<uint64_t>(record.tokens - record.exact_tokens);
  totals_.tokens_by_precision[static_cast<size_t>(Precision::kFp16)] += static_cast<uint64_t>(record.exact_tokens);

  size_t next_sample = 0;
  for (size_t i = 0; i < step.plan.items.size(); ++i) {
    const ScheduledSequence item = step.plan.items[i];
    const size_t sample = item.samples ? next_sample++ : 0;
    if (item.sequence == nullptr) continue;
    Entry& entry = *by_sequence_.at(item.sequence);
    scheduler_.computed(item, is_exact(step.of(item)));
    account(entry, item, step.of(item));
    const bool scored = result->prompt_logprobs.empty() ||
                        std::all_of(result->prompt_logprobs[i].begin(), result->prompt_logprobs[i].end(), is_finite);
    if (!scored || (item.samples && !is_finite(result->sampled[sample]))) {
      end_with(std::string(item.sequence->request.id), runner_->overflow("logits"), outputs);
      continue;
    }
    if (!result->prompt_logprobs.empty()) take_prompt_logprobs(entry, item, std::move(result->prompt_logprobs[i]));
    if (item.sequence->pooled()) {
      if (!result->hidden.empty()) entry.pooled.add(item.sequence->request.pooling, result->hidden[i]);
      if (item.first + item.count < item.sequence->size()) continue;
      std::vector<float> embedding = entry.pooled.result();
      if (!std::all_of(embedding.begin(), embedding.end(), [](float x) { return std::isfinite(x); })) {
        end_with(std::string(item.sequence->request.id), runner_->overflow("hidden states"), outputs);
        continue;
      }
      RequestOutput& output = outputs.emplace_back();
      output.id = item.sequence->request.id;
      output.embedding = std::move(embedding);
      end(entry, FinishReason::kStop, output);
      remove(output.id);
      continue;
    }
    if (!item.samples) continue;
    // An output for each token, so that whoever reads them sees no difference between steps with drafts and without.
    const auto next = [&]() -> RequestOutput& {
      RequestOutput& output = outputs.emplace_back();
      output.id = item.sequence->request.id;
      return output;
    };
    const auto take = [&](OutputToken&& token) {
      token.precision = step.of(item);
      take_token(entry, std::move(token), next());
    };
    take(std::move(result->sampled[sample]));
    for (size_t a = 0; item.drafts > 0 && a < result->accepted[sample].size() && !outputs.back().finish; ++a) {
      scheduler_.accepted(*item.sequence, is_exact(step.of(item)));
      OutputToken& token = result->accepted[sample][a];
      if (is_finite(token)) {
        take(std::move(token));
        continue;
      }
      const Error overflow = runner_->overflow("logits");
      RequestOutput& output = next();
      output.error = overflow.message;
      output.error_code = overflow.code;
      end(entry, FinishReason::kError, output);
    }
    if (outputs.back().finish) {
      remove(outputs.back().id);
    } else if (item.drafts > 0) {
      scheduler_.trim(*item.sequence);
    }
  }
  const StepWork work = record.work = step.work;

  const auto now = this->now();
  record.seconds = seconds_between(std::max(record.start, last_collected_), now);
  if (step.plan.drafts() > 0) {
    count_drafts(step, *result, record);
  } else {
    if (draft_length_.on() && is_exact(precision) && all_decode(step.plan)) {
      draft_length_.plain(record.sequences, record.seconds);
    }
    policy_->observe(precision, record.fp8_share, work, record.seconds);
  }
  in_flight_.pop_front();
  if (const StepModel* model = policy_->model(); model != nullptr && record.drafted == 0) {
    const size_t level = model->find_level(precision, record.fp8_share);
    if (level < model->levels().size()) record.table_s = model->table_seconds(level, work);
  }
  last_collected_ = now;
  record.wait_s = seconds_between(waits, arrived);
  record.between_s = between;
  record.output_s = seconds_between(arrived, now);
  record.kv_use = static_cast<double>(blocks_.in_use()) / std::max(1, blocks_.total());
  if (observer_ != nullptr) observer_->on_step(record);
}

void Engine::account(Entry& entry, const ScheduledSequence& item, Precision precision) {
  const int32_t reached = std::min(item.first + item.count, entry.usage.prompt_tokens);
  if (reached > entry.prompt_counted) {
    entry.usage.prompt.add(precision, reached - entry.prompt_counted);
    entry.prompt_counted = reached;
  }
}

void Engine::take_prompt_logprobs(Entry& entry, const ScheduledSequence& item, std::vector<OutputToken>&& logprobs) {
  if (!item.sequence->request.sampling.prompt_logprobs) return;
  if (entry.prompt_logprobs.empty()) {
    OutputToken first;  // nothing comes before it
    first.token = item.sequence->tokens.front();
    entry.prompt_logprobs.push_back(first);
  }
  // logprobs[j] is of token item.first + 1 + j; after a preemption some have been collected before.
  for (size_t j = 0; j < logprobs.size(); ++j) {
    const size_t index = static_cast<size_t>(item.first) + 1 + j;
    if (index == entry.prompt_logprobs.size()) entry.prompt_logprobs.push_back(std::move(logprobs[j]));
  }
}

void Engine::take_token(Entry& entry, OutputToken token, RequestOutput& output) {
  Sequence& sequence = *entry.sequence;
  const SamplingParams& sampling = sequence.request.sampling;
  if (!token.has_choice) {
    output.error = fmt::format(
        "no token may come after {} of the answer: its grammar, allowed_token_ids, bad_words, logit_bias and "
        "min_tokens forbid all of them together",
        entry.usage.completion_tokens);
    output.error_code = ErrorCode::kInvalidInput;
    end(entry, FinishReason::kError, output);
    return;
  }
  const auto now = this->now();
  if (!entry.first_token) {
    entry.first_token = now;
    without_token_.erase(without_token_.find(entry.arrival));
    update_recent(recent_ttft_s_, seconds_between(entry.arrival, now));
    if (observer_ != nullptr && !sequence.request.prompt_only) {
      observer_->on_first_token(seconds_between(entry.arrival, now), entry.usage.prompt_tokens);
    }
    output.prompt_logprobs = std::move(entry.prompt_logprobs);
    if (sampling.prompt_logprobs && output.prompt_logprobs.empty()) {
      // A prompt of one token: the runner has nothing to score.
      output.prompt_logprobs.emplace_back().token = sequence.tokens.front();
    }
  } else {
    const double gap = seconds_between(*entry.last_token, now);
    entry.longest_gap_s = std::max(entry.longest_gap_s, gap);
    update_recent(recent_tpot_s_, gap);
    if (observer_ != nullptr) observer_->on_token_gap(gap);
  }
  entry.last_token = now;

  const int32_t id = token.token;
  sequence.tokens[static_cast<size_t>(sequence.size() - sequence.pending--)] = id;
  entry.usage.completion_tokens += 1;
  entry.usage.completion.add(token.precision, 1);
  output.tokens.push_back(std::move(token));
  if (sequence.request.constraint && !sequence.request.constraint->accept(id)) {
    const std::string_view failure = sequence.request.constraint->failure();
    output.error = !failure.empty()
                       ? std::string(failure)
                       : fmt::format("token {} was sampled although the request's grammar does not allow it", id);
    output.error_code = sequence.request.constraint->failure_code();
    end(entry, FinishReason::kError, output);
    return;
  }

  const bool ends = std::find(sequence.end_ids.begin(), sequence.end_ids.end(), id) != sequence.end_ids.end();
  const auto shows_end = [&] {
    return sampling.include_stop && !(sequence.request.skip_special_end && tokenizer_->is_special(id));
  };
  if (entry.detokenizer && (!ends || shows_end())) {
    const bool may_stop = entry.usage.completion_tokens >= sampling.min_tokens;
    output.text += entry.stop_filter->feed(entry.detokenizer->append(id), may_stop);
  }
  if (ends) {
    output.stop_token = id;
    end(entry, FinishReason::kStop, output);
  } else if (entry.stop_filter && entry.stop_filter->stopped()) {
    end(entry, FinishReason::kStop, output);
  } else if (sequence.size() - sequence.pending >= sequence.limit) {
    end(entry, FinishReason::kLength, output);
  } else {
    output.usage = entry.usage;
  }
}

void Engine::end(Entry& entry, FinishReason reason, RequestOutput& output) {
  if (entry.detokenizer) {
    // What was held back: half a UTF-8 sequence, the possible start of a stop string.
    // Where the answer is cut there, the half of a character is left out.
    const bool cut = reason == FinishReason::kLength || reason == FinishReason::kCancelled;
    if (!entry.stop_filter->stopped()) output.text += entry.stop_filter->feed(entry.detokenizer->finish(cut));
    if (!entry.stop_filter->stopped()) output.text += entry.stop_filter->finish();
    if (entry.stop_filter->stopped()) output.stop_string = entry.stop_filter->stop();
  }
  output.finish = reason;
  output.usage = entry.usage;

  const auto now = this->now();
  RequestRecord record;
  record.id = output.id;
  record.finish = reason;
  record.usage = entry.usage;
  record.max_tokens = entry.max_tokens;
  record.preemptions = entry.preemptions;
  record.shed = entry.shed;
  record.e2e_s = seconds_between(entry.arrival, now);
  record.queue_s = seconds_between(entry.arrival, entry.scheduled.value_or(now));
  const double ttft_target_s = entry.sequence->ttft_target_s, itl_target_s = entry.sequence->itl_target_s;
  const bool prompt_only = entry.sequence->pooled() || entry.sequence->request.prompt_only;
  if (prompt_only && (reason == FinishReason::kStop || reason == FinishReason::kLength)) {
    // What it waited for came when a first token would have come.
    record.prefill_s = seconds_between(*entry.scheduled, now);
    record.attained = record.e2e_s <= ttft_target_s;
    record.prompt_only = true;
    if (!entry.sequence->pooled()) record.finish = FinishReason::kLength;  // whichever its token was
    record.usage.completion_tokens = 0;
    record.usage.completion = {};
    record.max_tokens = 0;
  } else if (entry.first_token) {
    record.ttft_s = seconds_between(entry.arrival, *entry.first_token);
    record.prefill_s = seconds_between(*entry.scheduled, *entry.first_token);
    record.decode_s = seconds_between(*entry.first_token, *entry.last_token);
    const double gaps = (entry.usage.completion_tokens - 1) * itl_target_s;
    record.attained = config_.targets.whole_answer ? record.e2e_s <= ttft_target_s + gaps
                                                   : record.ttft_s <= ttft_target_s && record.decode_s <= gaps;
  }
  record.ttft_target_s = ttft_target_s;
  record.itl_target_s = itl_target_s;
  record.longest_gap_s = entry.longest_gap_s;
  record.own_targets = entry.sequence->request.slo_ttft_s || entry.sequence->request.slo_itl_s;
  if (entry.first_token || record.prompt_only) output.usage.slo_met = record.attained;
  if (observer_ != nullptr) observer_->on_finished(record);
}

void Engine::remove(const std::string& id) {
  const auto place = entries_.find(id);
  Sequence* sequence = place->second->sequence;
  if (!place->second->first_token) without_token_.erase(without_token_.find(place->second->arrival));
  free_slot(*sequence);
  by_sequence_.erase(sequence);
  for (Step& step : in_flight_) {
    for (ScheduledSequence& item : step.plan.items) {
      if (item.sequence == sequence) item.sequence = nullptr;
    }
  }
  scheduler_.remove(sequence);
  entries_.erase(place);
}

EngineStats Engine::stats() const {
  EngineStats stats = totals_;
  stats.running = scheduler_.running();
  stats.waiting = scheduler_.waiting();
  stats.kv_blocks = blocks_.total();
  stats.kv_blocks_used = blocks_.in_use();
  stats.block_size = blocks_.block_size();
  stats.preemptions = scheduler_.preemptions();
  stats.prefix_queries = scheduler_.prefix_queries();
  stats.prefix_hits = scheduler_.prefix_hits();
  stats.captured = runner_->captured();
  return stats;
}

}  // namespace nfp
