#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>

namespace nfp {

namespace {

// Whether `reader` may use what `writer` computes.
bool may_give_prefix(const Sequence& writer, const Sequence& reader) {
  return writer.wants_exact() || !reader.wants_exact();
}

}  // namespace

void Scheduler::queue_up(std::unique_ptr<Sequence> sequence) {
  if (free_views_.empty()) {
    free_views_.push_back(static_cast<uint32_t>(views_.size()));
    views_.emplace_back();
  }
  const uint32_t view = free_views_.back();
  const int32_t priority = sequence->request.priority;
  const uint64_t serial = sequence->serial;
  Waiting waiting{std::move(sequence), view, priority, serial};
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), waiting), std::move(waiting));
  views_[view].current = false;
  free_views_.pop_back();
}

std::unique_ptr<Sequence> Scheduler::take_waiting(size_t index) {
  const auto place = waiting_.begin() + static_cast<std::ptrdiff_t>(index);
  std::unique_ptr<Sequence> taken = std::move(place->sequence);
  free_views_.push_back(place->view);
  waiting_.erase(place);
  return taken;
}

std::deque<Scheduler::Waiting>::iterator Scheduler::find_waiting(const Sequence& sequence) {
  const Waiting wanted{nullptr, 0, sequence.request.priority, sequence.serial};
  const auto place = std::lower_bound(waiting_.begin(), waiting_.end(), wanted);
  return place != waiting_.end() && place->sequence.get() == &sequence ? place : waiting_.end();
}

void Scheduler::close_gaps() {
  if (gaps_ == 0) return;
  std::erase_if(waiting_, [](const Waiting& waiting) { return waiting.sequence == nullptr; });
  gaps_ = 0;
}

bool Scheduler::enqueue(std::unique_ptr<Sequence>& sequence) {
  if (waiting() >= limits_.max_queue) return false;
  // Of the whole prompt now: steps that plan with many waiting ones then only compare.
  const size_t full = sequence->tokens.size() / static_cast<size_t>(blocks_->block_size());
  if (blocks_->caching() && full > 0) key_of(*sequence, full - 1);
  queue_up(std::move(sequence));
  return true;
}

bool Scheduler::grow(Sequence& sequence, int32_t tokens) {
  const int32_t size = blocks_->block_size();
  const auto needed = static_cast<size_t>((tokens + size - 1) / size);
  if (needed <= sequence.blocks.size()) return true;
  const auto missing = static_cast<int32_t>(needed - sequence.blocks.size());
  if (missing > blocks_->available()) return false;
  for (int32_t i = 0; i < missing; ++i) sequence.blocks.push_back(*blocks_->allocate());
  return true;
}

void Scheduler::trim(Sequence& sequence) {
  const auto needed = static_cast<size_t>((sequence.scheduled + blocks_->block_size() - 1) / blocks_->block_size());
  for (; sequence.blocks.size() > needed; sequence.blocks.pop_back()) blocks_->release(sequence.blocks.back());
}

void Scheduler::give_back(Sequence& sequence) {
  // Last block first: a prefix is worth more than what follows it, and what is freed first is reused first.
  for (auto block = sequence.blocks.rbegin(); block != sequence.blocks.rend(); ++block) blocks_->release(*block);
  sequence.blocks.clear();
  sequence.published = 0;
  sequence.fp16_tokens.clear();
  sequence.computed = sequence.scheduled = 0;
  sequence.exact = true;
  ++sequence.life;
}

void Scheduler::preempt(size_t index, StepPlan& plan) {
  std::unique_ptr<Sequence> victim = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  std::erase_if(plan.items, [&](const ScheduledSequence& item) {
    if (item.sequence != victim.get()) return false;
    plan.tokens -= item.count;
    return true;
  });
  give_back(*victim);
  plan.preempted.push_back(victim.get());
  ++preemptions_;
  queue_up(std::move(victim));
}

const PrefixKey& Scheduler::key_of(Sequence& sequence, size_t block) const {
  const auto size = static_cast<size_t>(blocks_->block_size());
  std::vector<PrefixKey>& keys = sequence.keys;
  while (keys.size() <= block) {
    const PrefixKey& parent = keys.empty() ? sequence.request.cache_scope : keys.back();
    keys.push_back(extend(parent, std::span(sequence.tokens).subspan(keys.size() * size, size)));
  }
  return keys[block];
}

size_t Scheduler::most_reusable(const Sequence& sequence) const {
  // Whoever wants something of every token of the prompt has all of them computed.
  const bool wants_all = sequence.request.sampling.prompt_logprobs || sequence.request.pooling == Pooling::kMean;
  if (!blocks_->caching() || wants_all) return 0;
  // The last token is always computed: its logits are what the step is for.
  return (sequence.tokens.size() - 1) / static_cast<size_t>(blocks_->block_size());
}

size_t Scheduler::find_prefix(Sequence& sequence) const {
  const size_t most = most_reusable(sequence);
  const auto has = [&](size_t blocks) {
    return blocks == 0 || blocks_->findable(key_of(sequence, blocks - 1), sequence.wants_exact());
  };
  // It has `least` and not `beyond`; from where the prefix ended last time, in strides that double.
  size_t least = std::min(sequence.found, most), beyond = most + 1, stride = 1;
  if (has(least)) {
    for (; least + stride < beyond; stride *= 2) {
      if (!has(least + stride)) {
        beyond = least + stride;
      } else {
        least += stride;
      }
    }
  } else {
    do {
      beyond = least;
      least -= std::min(least, stride);
      stride *= 2;
    } while (!has(least));
  }
  while (beyond - least > 1) {
    const size_t middle = least + (beyond - least) / 2;
    (has(middle) ? least : beyond) = middle;
  }
  return sequence.found = least;
}

bool Scheduler::prefix_is_coming(const Waiting& waiting, const StepPlan& plan) {
  Sequence& sequence = *waiting.sequence;
  views_[waiting.view].current = false;  // it was of another search
  const size_t found = find_prefix(sequence), common = found + least_prefix_;
  if (common > most_reusable(sequence)) return false;
  const PrefixKey& key = key_of(sequence, common - 1);
  const int32_t end = static_cast<int32_t>(found + 1) * blocks_->block_size();
  return std::any_of(running_.begin(), running_.end(), [&](const std::unique_ptr<Sequence>& other) {
    if (other->computed >= end || other->keys.size() < common || !may_give_prefix(*other, sequence)) return false;
    if (other->keys[common - 1] != key) return false;
    if (other->scheduled >= end) return true;
    return std::any_of(plan.items.begin(), plan.items.end(), [&](const ScheduledSequence& item) {
      // The end of a prompt may yet be left out, until its grammar is ready.
      const bool certain = !item.samples || !other->request.constraint;
      return item.sequence == other.get() && item.first + item.count >= end && certain;
    });
  });
}

void Scheduler::reuse_prefix(Sequence& sequence) {
  const auto size = static_cast<size_t>(blocks_->block_size());
  const auto most = static_cast<int64_t>(most_reusable(sequence) * size);
  if (most == 0) return;
  PrefixMatch found = blocks_->match(sequence.tokens, most, sequence.wants_exact(), sequence.request.cache_scope);
  sequence.exact = std::find(found.exact.begin(), found.exact.end(), false) == found.exact.end();
  sequence.published = found.blocks.size();
  sequence.blocks = std::move(found.blocks);
  sequence.fp16_tokens = std::move(found.fp16_tokens);
  sequence.computed = sequence.scheduled = static_cast<int32_t>(sequence.blocks.size() * size);
  sequence.reused = sequence.computed;
  sequence.reused_fp16 = std::accumulate(sequence.fp16_tokens.begin(), sequence.fp16_tokens.end(), 0);
  if (!sequence.admitted) sequence.cached = sequence.computed;
}

void Scheduler::add(StepPlan& plan, Sequence& sequence, int32_t count) const {
  const bool reaches_end = sequence.scheduled + count == sequence.size();
  plan.items.push_back({&sequence, sequence.scheduled, count, reaches_end && !sequence.pooled(),
                        sequence.pending > 0 && reaches_end ? sequence.last_row : -1, sequence.life});
  plan.tokens += count;
}

void Scheduler::admit(size_t index, StepPlan& plan) {
  std::unique_ptr<Sequence> taken = take_waiting(index);
  Sequence& sequence = *taken;
  plan.admitted.push_back(&sequence);
  if (!sequence.admitted && blocks_->caching()) {
    prefix_queries_ += static_cast<uint64_t>(sequence.prompt_size());
    prefix_hits_ += static_cast<uint64_t>(sequence.cached);
  }
  sequence.admitted = true;
  const auto later = [&](const std::unique_ptr<Sequence>& other) {
    return other->request.priority > sequence.request.priority;
  };
  running_.insert(std::find_if(running_.begin(), running_.end(), later), std::move(taken));
}

void Scheduler::count_prefill(StepPlan& plan) {
  plan.prefill_tokens = 0;
  for (const ScheduledSequence& item : plan.items) {
    if (item.first < item.sequence->prompt_size() || item.count > 1) plan.prefill_tokens += item.count;
  }
}

StepPlan Scheduler::schedule() {
  StepPlan plan;
  close_gaps();

  for (size_t i = 0; i < running_.size() && plan.tokens < limits_.max_step_tokens;) {
    Sequence& sequence = *running_[i];
    if (sequence.all_scheduled() || (sequence.pending > 0 && !sequence.may_run_ahead())) {
      ++i;
      continue;
    }
    const int32_t count = std::min(sequence.size() - sequence.scheduled, limits_.max_step_tokens - plan.tokens);
    bool preempted_itself = false;
    while (!grow(sequence, sequence.scheduled + count)) {
      const size_t youngest = running_.size() - 1;
      preempted_itself = youngest == i;
      preempt(youngest, plan);
      if (preempted_itself) break;
    }
    if (preempted_itself) break;
    add(plan, sequence, count);
    ++i;
  }

  // Nobody is admitted in a step that had to preempt: the blocks would only be taken away again.
  // Those that wait for a prefix stay before the others, and keep their places.
  size_t next = 0;
  const auto places = static_cast<size_t>(limits_.max_sequences);
  while (plan.preempted.empty() && next < waiting_.size() && running_.size() + next < places &&
         plan.tokens < limits_.max_step_tokens) {
    Sequence& sequence = *waiting_[next].sequence;
    if (sequence.pending > 0) break;  // preempted a step ago: its tokens are known after the next collect
    if (prefix_is_coming(waiting_[next], plan)) {
      ++next;
      continue;
    }
    reuse_prefix(sequence);
    const int32_t count = std::min(sequence.size() - sequence.scheduled, limits_.max_step_tokens - plan.tokens);
    // Blocks for all its tokens, not for this chunk only: where the others leave no room for the rest, it would be
    // preempted and begin again in every other step, at the cost of those that decode and, where it may not use the
    // prefix cache, from its first token.
    if (!grow(sequence, sequence.size())) {
      give_back(sequence);  // its cached blocks stay findable; it will look them up again
      break;
    }
    add(plan, sequence, count);
    admit(next, plan);
  }
  count_prefill(plan);
  return plan;
}

int32_t Scheduler::coming_blocks(const Sequence& sequence, View& view) {
  const Sequence& other = beginners_.enter(view.next, sequence, view.state.exact);
  if (&other == &sequence || !may_give_prefix(other, sequence)) return 0;
  // A sequence's keys stay, and more may come.
  if (view.compared_with == other.serial && view.compared_keys == other.keys.size()) return view.coming;
  // Keys are equal up to where the tokens differ.
  const size_t known = sequence.found;
  size_t equal = known;
  size_t differs = std::min({most_reusable(sequence), sequence.keys.size(), other.keys.size()}) + 1;
  while (differs - equal > 1) {
    const size_t middle = equal + (differs - equal) / 2;
    (sequence.keys[middle - 1] == other.keys[middle - 1] ? equal : differs) = middle;
  }
  view.compared_with = other.serial;
  view.compared_keys = static_cast<uint32_t>(other.keys.size());
  view.coming = equal - known < least_prefix_ ? 0 : static_cast<int32_t>(equal);
  return view.coming;
}

SequenceState Scheduler::state_of(const Sequence& sequence, bool running) {
  SequenceState state;
  state.serial = sequence.serial;
  state.running = running;
  state.started = sequence.admitted;
  state.ready = running ? !sequence.all_scheduled() && (sequence.pending == 0 || sequence.may_run_ahead())
                        : sequence.pending == 0;
  state.context = sequence.scheduled;
  state.missing = sequence.size() - state.context;
  state.emitted = sequence.output_size();
  state.exact = sequence.wants_exact();
  state.priority = sequence.request.priority;
  state.arrival_s = sequence.arrival_s;
  state.ttft_s = sequence.ttft_target_s;
  state.itl_s = sequence.itl_target_s;
  state.due_s = state.arrival_s + state.ttft_s;
  return state;
}

void Scheduler::look(Sequence& sequence, View& view) const {
  view = {};
  SequenceState& state = view.state = state_of(sequence, false);
  if (!state.ready) return;
  const size_t found = find_prefix(sequence);
  state.context = static_cast<int32_t>(found) * blocks_->block_size();
  state.missing = sequence.size() - state.context;
  view.current = true;
  view.has_last = found > 0;
  view.has_next = found < most_reusable(sequence);
  view.begins = found < sequence.keys.size() && state.missing > 1;
  if (view.has_last) view.last = sequence.keys[found - 1];
  if (found < sequence.keys.size()) view.next = sequence.keys[found];
}

std::span<SequenceState> Scheduler::states() {
  close_gaps();
  const size_t all = running_.size() + waiting_.size();
  states_.resize(all);
  viewed_.resize(all);
  beginners_.clear(all);
  size_t i = 0;
  for (const auto& sequence : running_) {
    const SequenceState& state = states_[i] = state_of(*sequence, true);
    const size_t next = sequence->published;
    if (state.ready && state.missing > 1 && next < sequence->keys.size()) {
      beginners_.enter(sequence->keys[next], *sequence, state.exact);
    }
    viewed_[i++] = sequence.get();
  }
  viewed_running_ = i;
  for (const Waiting& waiting : waiting_) {
    View& view = views_[waiting.view];
    const bool as_it_was =
        view.current &&
        (!view.has_last || !blocks_->changed(view.last) || blocks_->findable(view.last, view.state.exact)) &&
        (!view.has_next || !blocks_->changed(view.next) || !blocks_->findable(view.next, view.state.exact));
    if (!as_it_was) look(*waiting.sequence, view);
    SequenceState& state = states_[i] = view.state;
    if (const int32_t coming = view.begins ? coming_blocks(*waiting.sequence, view) : 0; coming > 0) {
      state.missing += state.context - coming * blocks_->block_size();
      state.context = coming * blocks_->block_size();
    }
    viewed_[i++] = waiting.sequence.get();
  }
  blocks_->forget_changes();
  return states_;
}

StepPlan Scheduler::schedule(const StepDecision& decision) {
  StepPlan plan;
  // Who gives blocks back: the last of the running ones that the decision leaves out, then the last that it names. One
  // whose token is on its way is not left out: it has its place between those that decode, who come first.
  const auto decodes = [&](size_t view) { return states_[view].running && states_[view].missing == 1; };
  const auto rank_of = [&](const Sequence* sequence) -> size_t {
    const auto view = static_cast<size_t>(std::find(viewed_.begin(), viewed_.end(), sequence) - viewed_.begin());
    size_t before = 0;
    for (size_t i = 0; i < decision.chunks.size(); ++i) {
      const size_t other = decision.chunks[i].sequence;
      if (other == view) return 2 * i + 1;
      before += other < view && decodes(other) ? 1 : 0;
    }
    return sequence->pending > 0 && sequence->size() < sequence->limit ? 2 * before : 2 * decision.chunks.size() + 1;
  };
  const auto victim = [&](const Sequence* wanting) -> size_t {
    size_t last = running_.size(), last_rank = 0;
    for (size_t i = running_.size(); i-- > 0;) {
      const size_t rank = rank_of(running_[i].get());
      if (last == running_.size() || rank > last_rank) last = i, last_rank = rank;
    }
    return last_rank < rank_of(wanting) ? running_.size() : last;
  };
  for (const StepChunk& chunk : decision.chunks) {
    if (plan.tokens >= limits_.max_step_tokens) break;
    Sequence& sequence = *viewed_[chunk.sequence];
    const auto is_it = [&](const std::unique_ptr<Sequence>& other) { return other.get() == &sequence; };
    const auto at = std::find_if(running_.begin(), running_.end(), is_it);
    int32_t count = std::min(chunk.tokens, limits_.max_step_tokens - plan.tokens);
    if (at != running_.end()) {
      count = std::min(count, sequence.size() - sequence.scheduled);
      bool gone = false;
      while (!gone && !grow(sequence, sequence.scheduled + count)) {
        const size_t index = victim(&sequence);
        gone = index == running_.size() || running_[index].get() == &sequence;
        if (index < running_.size()) preempt(index, plan);
      }
      if (!gone) add(plan, sequence, count);
      continue;
    }
    // As in schedule(): nobody is admitted in a step that had to preempt, nor one whose tokens are still to come.
    if (!plan.preempted.empty() || running() >= limits_.max_sequences || sequence.pending > 0) continue;
    // Since states() others may have been admitted, which only moves it forward.
    size_t queued = std::min(chunk.sequence - viewed_running_, waiting_.size() - 1);
    while (waiting_[queued].sequence.get() != &sequence) --queued;
    if (prefix_is_coming(waiting_[queued], plan)) continue;
    reuse_prefix(sequence);
    count = std::min(count, sequence.size() - sequence.scheduled);
    if (!grow(sequence, sequence.scheduled + count)) {
      give_back(sequence);
      continue;
    }
    add(plan, sequence, count);
    admit(queued, plan);
  }
  count_prefill(plan);
  return plan;
}

void Scheduler::submitted(const StepPlan& plan) {
  int32_t row = 0;
  for (const ScheduledSequence& item : plan.items) {
    Sequence& sequence = *item.sequence;
    sequence.scheduled = item.first + item.count;
    if (!item.samples) continue;
    sequence.last_row = row++;
    sequence.tokens.push_back(kPendingToken);
    ++sequence.pending;
  }
}

void Scheduler::computed(const ScheduledSequence& item, bool exact) {
  Sequence& sequence = *item.sequence;
  if (item.life != sequence.life) return;  // preempted since
  sequence.computed = item.first + item.count;
  sequence.exact = sequence.exact && exact;
  if (!blocks_->caching()) return;
  const auto size = static_cast<size_t>(blocks_->block_size());
  sequence.fp16_tokens.resize(sequence.blocks.size());
  for (auto token = static_cast<size_t>(item.first); exact && token < static_cast<size_t>(sequence.computed); ++token) {
    ++sequence.fp16_tokens[token / size];
  }
  const size_t full = static_cast<size_t>(sequence.computed) / size;
  for (size_t& index = sequence.published; index < full; ++index) {
    blocks_->publish(sequence.blocks[index], key_of(sequence, index),
                     std::span(sequence.tokens).subspan(index * size, size), sequence.exact,
                     sequence.fp16_tokens[index]);
  }
}

void Scheduler::accepted(Sequence& sequence, bool exact) {
  const int32_t first = sequence.scheduled;
  sequence.tokens.push_back(kPendingToken);
  ++sequence.pending;
  ++sequence.scheduled;
  computed({.sequence = &sequence, .first = first, .count = 1, .life = sequence.life}, exact);
}

void Scheduler::take_back(const StepPlan& plan) {
  for (const ScheduledSequence& item : plan.items) {
    if (item.sequence == nullptr || item.life != item.sequence->life) continue;
    item.sequence->scheduled = item.first;
    if (!item.samples) continue;
    item.sequence->tokens.pop_back();
    --item.sequence->pending;
  }
}

std::unique_ptr<Sequence> Scheduler::remove(Sequence* sequence) {
  const auto runs = [&](const std::unique_ptr<Sequence>& other) { return other.get() == sequence; };
  std::unique_ptr<Sequence> taken;
  if (const auto queued = find_waiting(*sequence); queued != waiting_.end()) {
    taken = std::move(queued->sequence);
    free_views_.push_back(queued->view);
    ++gaps_;
  } else if (const auto place = std::find_if(running_.begin(), running_.end(), runs); place != running_.end()) {
    taken = std::move(*place);
    running_.erase(place);
  }
  if (taken) give_back(*taken);
  return taken;
}

}  // namespace nfp
