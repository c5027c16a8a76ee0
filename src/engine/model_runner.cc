#include "engine/model_runner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <exception>
#include <limits>

#include "base/log.h"
#include "base/process_memory.h"

namespace nfp {
namespace {

constexpr int64_t kMostCached = 1 << 30;  // tokens: slots are 32 bits wide

bool scores(const ScheduledSequence& item) {
  return item.sequence->request.sampling.prompt_logprobs && item.first + 1 < item.sequence->prompt_size();
}

// Row r of the item predicts token first + r + 1.
int32_t score_count(const ScheduledSequence& item) {
  return scores(item) ? std::min(item.count, item.sequence->prompt_size() - 1 - item.first) : 0;
}

// The place in the answer of what is sampled behind the item.
int32_t place_of(const ScheduledSequence& item) { return item.first + item.count - item.sequence->prompt_size(); }

// Logits divided by less may leave FP32's range, and what was seen before is as good as certain already.
constexpr float kLeastRepetitionPenalty = 1e-30f;

SamplingRow sampling_row(const ScheduledSequence& item) {
  const Sequence& sequence = *item.sequence;
  const SamplingParams& p = sequence.request.sampling;
  SamplingRow row;
  row.seed = sequence.seed;
  // The place in the answer, not the step: a sequence that is computed again after preemption draws the same numbers.
  row.draw = static_cast<uint64_t>(place_of(item));
  row.temperature = p.temperature;
  row.top_k = p.top_k;
  row.top_p = p.top_p;
  row.min_p = p.min_p;
  row.repetition_penalty = std::max(p.repetition_penalty, kLeastRepetitionPenalty);
  row.presence_penalty = p.presence_penalty;
  row.frequency_penalty = p.frequency_penalty;
  row.history_slot = has_penalties(p) ? sequence.history_slot : -1;
  row.report = p.logprobs ? p.top_logprobs : -1;
  return row;
}

bool forbids_end(const ScheduledSequence& item) {
  const Request& request = item.sequence->request;
  return !request.constraint && place_of(item) < request.sampling.min_tokens;
}

uint32_t needs_of(const ScheduledSequence& item, bool reports) {
  const Sequence& sequence = *item.sequence;
  const SamplingParams& p = sequence.request.sampling;
  uint32_t needs = 0;
  if (p.temperature > 0) {
    needs |= SamplingNeeds::kDraw;
    if (p.top_k > 0 || p.top_p < 1.0f || p.min_p > 0.0f) needs |= SamplingNeeds::kLimits;
  }
  if (has_penalties(p)) needs |= SamplingNeeds::kPenalties;
  if (!p.logit_bias.empty() || forbids_end(item)) needs |= SamplingNeeds::kBias;
  if (sequence.masked()) needs |= SamplingNeeds::kMask;
  if (p.logprobs && reports) needs |= SamplingNeeds::kReport;
  return needs;
}

// Each token once.
void collect_bias(const ScheduledSequence& item, std::vector<LogitBias>& out) {
  const Sequence& sequence = *item.sequence;
  out.clear();
  for (const auto& [token, bias] : sequence.request.sampling.logit_bias) out.push_back({token, bias});
  if (!forbids_end(item)) return;
  for (const int32_t token : sequence.end_ids) {
    const auto same = std::find_if(out.begin(), out.end(), [&](const LogitBias& b) { return b.token == token; });
    (same != out.end() ? *same : out.emplace_back()) = LogitBias{token, -std::numeric_limits<float>::infinity()};
  }
}

// Whether some token may be sampled. bias: each token once; mask: empty = all may.
bool has_choice(std::span<const uint32_t> mask, int32_t vocab, std::span<const LogitBias> bias) {
  int64_t allowed = mask.empty() ? vocab : 0;
  for (const uint32_t word : mask) allowed += std::popcount(word);
  for (const LogitBias& b : bias) {
    const auto token = static_cast<uint32_t>(b.token);
    const bool counted = mask.empty() || (mask[token / 32] >> (token % 32) & 1u) != 0;
    if (counted && b.value == -std::numeric_limits<float>::infinity()) --allowed;
  }
  return allowed > 0;
}

// An exception (there is no memory) is the step's error: what is between steps is not touched meanwhile.
template <typename Work>
Status caught(const Work& work) {
  try {
    return work();
  } catch (const std::exception& e) {
    return error(ErrorCode::kResource, "a step ended by an exception: {}; try again later", e.what());
  }
}

OutputToken output_token(const SampledRow& row, Precision precision, bool logprobs, const TokenLogprob* top,
                         int32_t top_n) {
  OutputToken token;
  token.token = row.token;
  token.precision = precision;
  token.finite = row.not_finite == 0;
  if (!logprobs) return token;
  token.logprob = row.logprob;
  token.rank = row.rank;
  token.top.assign(top, top + top_n);
  return token;
}

}  // namespace

std::vector<int32_t> default_graph_sizes(int32_t max_sequences) {
  std::vector<int32_t> sizes;
  for (int32_t size = 1; size < max_sequences; size += size < 8 ? size : size < 256 ? 8 : 32) sizes.push_back(size);
  sizes.push_back(max_sequences);
  return sizes;
}

void set_defaults(SchedulerLimits& limits, const Backend& backend) {
  if (limits.max_sequences <= 0) limits.max_sequences = backend.default_sequences();
  if (limits.max_step_tokens <= 0) limits.max_step_tokens = backend.default_step_tokens();
}

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(Model& model, EngineConfig config) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(model, std::move(config)));
  NFP_RETURN_IF_ERROR(runner->prepare());
  return runner;
}

Status ModelRunner::prepare() {
  Backend& backend = model_.backend();
  const ModelConfig& config = model_.config();
  SchedulerLimits& most = config_.limits;
  set_defaults(most, backend);
  const bool given = config_.max_context > 0;
  if (!given) config_.max_context = config.default_context();
  least_context_ = given ? config_.max_context : std::min(config_.max_context, kLeastContext);
  if (config_.max_context > config.max_context) {
    return error(ErrorCode::kUsage, "a context of {} tokens was asked for, but this model has {}", config_.max_context,
                 config.max_context);
  }
  if (config_.speculative_tokens < 0 || config_.speculative_tokens > kMaxDrafts) {
    return error(ErrorCode::kUsage, "{} speculative tokens were asked for, and there may be 0 to {}",
                 config_.speculative_tokens, kMaxDrafts);
  }
  const bool captures = backend.prefers_graphs();
  if (config_.steps_in_flight <= 0) config_.steps_in_flight = captures ? 2 : 1;
  // A token and its drafts are sequences of their own where they are verified. With more of them at once drafts gain
  // nothing: verifying them takes as long as computing them.
  constexpr int32_t kVerified = 128;
  launch_sequences_ =
      std::max(most.max_sequences, std::min(most.max_sequences * (config_.speculative_tokens + 1), kVerified));
  most.max_step_tokens = std::max(most.max_step_tokens, launch_sequences_);
  if (captures && config_.graphs) graph_sizes_ = default_graph_sizes(launch_sequences_);
  NFP_RETURN_IF_ERROR(model_.reserve(config_.limits.max_step_tokens, launch_sequences_, config_.max_context));
  NFP_ASSIGN_OR_RETURN(history_, backend.make_token_history(config_.limits.max_sequences, config.vocab));
  const auto rows = static_cast<size_t>(launch_sequences_),
             tokens = static_cast<size_t>(config_.limits.max_step_tokens);
  const size_t row_top = kMaxTopLogprobs * sizeof(TokenLogprob);
  NFP_ASSIGN_OR_RETURN(logits_, backend.allocate(rows * static_cast<size_t>(config.vocab) * sizeof(float)));
  const auto drafts = static_cast<size_t>(config_.speculative_tokens);
  NFP_ASSIGN_OR_RETURN(sampled_, backend.allocate((1 + drafts) * rows * sizeof(SampledRow)));
  NFP_ASSIGN_OR_RETURN(top_, backend.allocate(rows * row_top));
  NFP_ASSIGN_OR_RETURN(scored_, backend.allocate(tokens * sizeof(SampledRow)));
  NFP_ASSIGN_OR_RETURN(scored_top_, backend.allocate(tokens * row_top));
  StepLimits limits;
  limits.tokens = config_.limits.max_step_tokens;
  limits.sequences = launch_sequences_;
  limits.table_width = config_.max_context / config_.block_size + 1;
  limits.vocab = config.vocab;
  limits.block_size = config_.block_size;
  limits.row_bias = kMaxRowBias;
  limits.masks = true;
  // Two steps in flight of two launches each, as those of one are read while the next is planned; or one with drafts.
  limits.slots = std::max(2 * kInFlight, config_.speculative_tokens + 1);
  NFP_ASSIGN_OR_RETURN(input_, StepInput::create(backend, limits));

  // The cache is the last to take memory: it gets what the others leave.
  if (config_.kv_blocks <= 0) {
    NFP_ASSIGN_OR_RETURN(const int64_t blocks, choose_kv_blocks());
    if (blocks > kMostCached / config_.block_size) {
      return error(
          ErrorCode::kUsage,
          "the KV cache would hold {} blocks of {} tokens, and may hold {} tokens: ask for less memory for it, a "
          "shorter context or fewer sequences",
          blocks, config_.block_size, kMostCached);
    }
    config_.kv_blocks = static_cast<int32_t>(blocks);
  }
  const int64_t cached = int64_t{config_.kv_blocks} * config_.block_size;
  if (cached < config_.max_context && least_context_ < config_.max_context) {
    config_.max_context = static_cast<int32_t>(cached);
  }
  // One block more, for padding.
  const KvCacheSpec spec = model_.kv_spec(config_.kv_blocks + 1, config_.block_size, config_.kv_dtype);
  if (!backend.memory()) {
    warn_of_memory("the KV cache, when it is full, takes",
                   uint64_t{backend.kv_bytes_per_block(spec)} * static_cast<uint64_t>(spec.blocks),
                   "ask for a shorter context, or a smaller cache");
  }
  NFP_ASSIGN_OR_RETURN(cache_, backend.make_kv_cache(spec));
  input_->set_scratch_block(config_.kv_blocks);
  for (Slot& slot : slots_) {
    NFP_ASSIGN_OR_RETURN(slot.sampled, backend.allocate_host(sampled_.bytes()));
    NFP_ASSIGN_OR_RETURN(slot.top, backend.allocate_host(top_.bytes()));
    NFP_ASSIGN_OR_RETURN(slot.scored, backend.allocate_host(scored_.bytes()));
    NFP_ASSIGN_OR_RETURN(slot.scored_top, backend.allocate_host(scored_top_.bytes()));
    NFP_ASSIGN_OR_RETURN(slot.done, backend.make_event());
  }
  return backend.synchronize();  // the first step does not wait for the cache to be cleared
}

Result<int64_t> ModelRunner::choose_kv_blocks() const {
  const auto block = static_cast<int64_t>(
      model_.backend().kv_bytes_per_block(model_.kv_spec(1, config_.block_size, config_.kv_dtype)));
  if (config_.kv_bytes > 0) {
    if (config_.kv_bytes < block) {
      return error(ErrorCode::kUsage,
                   "a KV cache of {} bytes holds no block of {} tokens ({} bytes); give it more (--kv-cache-memory)",
                   config_.kv_bytes, config_.block_size, block);
    }
    return config_.kv_bytes / block;
  }
  if (const auto memory = model_.backend().memory()) return blocks_that_fit(*memory, static_cast<uint64_t>(block));
  const auto quarter = static_cast<int64_t>(available_memory() / 4) / block;
  return std::max(blocks_of(least_context_),
                  std::min(blocks_of(config_.max_context) * config_.limits.max_sequences, quarter));
}

Result<int64_t> ModelRunner::blocks_that_fit(const DeviceMemory& memory, uint64_t block_bytes) const {
  constexpr uint64_t kLater = kGraphBytes + (uint64_t{256} << 20);  // for graphs, and what libraries take late
  const auto allowed = static_cast<uint64_t>(config_.memory_share * static_cast<double>(memory.total));
  // Others may have given some back since.
  const uint64_t taken = memory.total - memory.free - std::min(memory.others, memory.total - memory.free);
  const uint64_t left = std::min(allowed > taken ? allowed - taken : 0, memory.free);
  const uint64_t blocks = left > kLater ? (left - kLater) / block_bytes : 0;
  const auto context = static_cast<uint64_t>(blocks_of(least_context_));
  if (blocks <= context) {
    constexpr double kGiB = 1 << 30;
    return error(
        ErrorCode::kResource,
        "of {:.1f} GiB GPU memory this program may take {:.1f}; weights and buffers take {:.1f}, graphs {:.1f}, "
        "and other programs and the driver have {:.1f}: what is left holds {} tokens of KV cache, less than one "
        "context of {}; ask for a shorter context, fewer sequences or tokens a step, or a larger "
        "--gpu-memory-utilization",
        static_cast<double>(memory.total) / kGiB, static_cast<double>(allowed) / kGiB,
        static_cast<double>(taken) / kGiB, static_cast<double>(kLater) / kGiB,
        static_cast<double>(memory.others) / kGiB, blocks * static_cast<uint64_t>(config_.block_size), least_context_);
  }
  return std::min(static_cast<int64_t>(blocks - 1), kMostCached / config_.block_size);
}

Status ModelRunner::start(const Sequence& sequence) {
  if (!has_penalties(sequence.request.sampling)) return ok_status();  // nobody reads it
  const std::span<const int32_t> tokens(sequence.tokens);
  const auto prompt = static_cast<size_t>(sequence.prompt_size());
  return model_.backend().reset_history(*history_, sequence.history_slot, tokens.first(prompt), tokens.subspan(prompt));
}

StepShape ModelRunner::shape_of(const Part& part) const {
  StepShape shape;
  shape.precision = part.precision;
  shape.fp8_share = is_exact(part.precision) ? 0.0 : part.fp8_share;
  shape.fresh_keys = part.fresh_keys;
  int32_t longest = 0;
  for (const ScheduledSequence& item : part.items) {
    longest = std::max(longest, item.first + item.count);
    shape.tokens += item.count;
    shape.sequences += 1;
    shape.single += item.count == 1 ? 1 : 0;
    shape.scored += score_count(item);
    shape.pooled += pooled_rows(item);
    if (!item.samples) continue;
    shape.rows += 1;
    shape.needs |= needs_of(item, !part.drafts);
  }
  shape.last_only = shape.single < shape.sequences && shape.scored == 0 && shape.pooled == 0;
  if (!shape.decode() || graph_sizes_.empty()) return shape;
  const auto size = std::lower_bound(graph_sizes_.begin(), graph_sizes_.end(), shape.rows);
  if (size != graph_sizes_.end()) shape.tokens = shape.sequences = shape.single = shape.rows = *size;
  shape.launch_context = model_.backend().launch_context(*cache_, shape.sequences, longest);
  return shape;
}

void ModelRunner::add_samples(const ScheduledSequence& item, int32_t last_row, const Part& part, Slot& slot) {
  const Sequence& sequence = *item.sequence;
  SamplingRow row = sampling_row(item);
  if (part.drafts) row.report = -1;
  collect_bias(item, biases_);
  input_->add_row(last_row, row, biases_);
  std::span<uint32_t> mask;
  if (sequence.masked()) {
    mask = input_->add_mask();
    if (!sequence.fill_mask(place_of(item), mask)) {
      input_->drop_mask();
      mask = {};
    }
  }
  if (part.drafts) return;
  slot.rows.push_back({part.precision, row.report >= 0, std::max(0, row.report), has_choice(mask, vocab(), biases_)});
}

void ModelRunner::add_scores(const ScheduledSequence& item, size_t index, int32_t last_token_row, Precision precision,
                             Slot& slot) {
  const Sequence& sequence = *item.sequence;
  const int32_t count = score_count(item), first_row = last_token_row - item.count + 1;
  for (int32_t r = 0; r < count; ++r) {
    input_->add_score(first_row + r, sequence.tokens[static_cast<size_t>(item.first) + static_cast<size_t>(r) + 1]);
  }
  slot.scores.push_back({precision, index, count, *sequence.request.sampling.prompt_logprobs});
}

void ModelRunner::add_hidden(const ScheduledSequence& item, size_t index, int32_t last_token_row, Slot& slot) {
  const int32_t count = pooled_rows(item);
  if (count == 0) return;
  for (int32_t r = 0; r < count; ++r) input_->add_pooled(last_token_row - count + 1 + r);
  slot.pooled.push_back({index, item.first + item.count - count, count});
}

Result<StepTicket> ModelRunner::submit(const StepPlan& plan, Precision precision) {
  assert(submitted_ - collected_ < slots_.size());
  const auto sequences = static_cast<int32_t>(plan.items.size());
  if (plan.tokens > config_.limits.max_step_tokens || sequences > config_.limits.max_sequences) {
    return error(ErrorCode::kResource, "a step of {} tokens and {} sequences is over the {} and {} there is room for",
                 plan.tokens, sequences, config_.limits.max_step_tokens, config_.limits.max_sequences);
  }
  const Status enqueued = caught([&] {
    const auto turn = model_.backend().turn();
    return enqueue_step(plan, precision);
  });
  if (enqueued.ok()) return submitted_++;
  // What is enqueued of it is done with before its blocks, and the arrays that it reads, are another step's. By an
  // event, as a device that hangs is not waited for longer than for any step.
  Event& done = *slots_[submitted_ % slots_.size()].done;
  model_.backend().record(done);
  NFP_RETURN_IF_ERROR(model_.backend().wait(done));
  return enqueued.error();
}

Status ModelRunner::enqueue_step(const StepPlan& plan, Precision precision) {
  const size_t place = submitted_ % slots_.size();
  Slot& slot = slots_[place];
  slot.items = plan.items.size();
  slot.rows.clear();
  slot.scores.clear();
  slot.pooled.clear();
  slot.verified.clear();
  slot.drafts = 0;
  slot.scored_rows = slot.hidden_rows = 0;
  slot.top_n = 0;
  size_t hidden_bytes = 0;
  for (const ScheduledSequence& item : plan.items) {
    if (scores(item)) slot.top_n = std::max(slot.top_n, *item.sequence->request.sampling.prompt_logprobs);
    hidden_bytes += static_cast<size_t>(pooled_rows(item)) * hidden_row_bytes();
  }
  if (slot.hidden.bytes() < hidden_bytes) {  // the step that used it before has been collected
    NFP_ASSIGN_OR_RETURN(slot.hidden, model_.backend().allocate_host(hidden_bytes));
  }

  if (plan.drafts() > 0) {
    NFP_RETURN_IF_ERROR(submit_drafts(plan, slot));
  } else {
    const std::span<const ScheduledSequence> items(plan.items);
    const auto host_slot = static_cast<int>(2 * place);
    size_t apart = 0;
    while (plan.exact_singles && apart < items.size() && items[apart].count == 1) ++apart;
    if (apart > 0) NFP_RETURN_IF_ERROR(submit_part({items.first(apart), 0, Precision::kFp16}, host_slot, slot));
    const Part others = {items.subspan(apart), apart, precision, plan.fp8_share};
    if (!others.items.empty()) NFP_RETURN_IF_ERROR(submit_part(others, host_slot + 1, slot));
  }
  enqueue_downloads(slot);
  model_.backend().record(*slot.done);
  return ok_status();
}

Status ModelRunner::submit_drafts(const StepPlan& plan, Slot& slot) {
  // Entry j of an item is its token first + j, a sequence of its own: each attends to those before it, whose keys the
  // same launch writes.
  const int32_t most = plan.drafts(), rows = launch_sequences_;
  slot.drafts = most;
  slot.verified.resize(plan.items.size());
  const auto entry = [&](size_t i, int32_t j) {
    ScheduledSequence one = plan.items[i];
    one.first += j;
    if (j > 0) one.source = j * rows + slot.verified[i].draft_row[static_cast<size_t>(j - 1)];
    return one;
  };
  for (int32_t j = 0; j < most; ++j) {
    drafting_.clear();
    for (size_t i = 0; i < plan.items.size(); ++i) {
      if (plan.items[i].drafts <= j) continue;
      drafting_.push_back(entry(i, j));
      slot.verified[i].draft_row[static_cast<size_t>(j)] = static_cast<int32_t>(drafting_.size()) - 1;
    }
    const Part part = {.items = drafting_, .precision = model_.backend().fastest_fp8(), .drafts = true};
    NFP_RETURN_IF_ERROR(submit_part(part, j, slot));
    // Behind what later launches sample.
    model_.backend().copy({.dst = sampled_.as<SampledRow>() + static_cast<ptrdiff_t>(j + 1) * rows,
                           .src = sampled_.data(),
                           .bytes = drafting_.size() * sizeof(SampledRow)});
  }
  drafting_.clear();
  for (size_t i = 0; i < plan.items.size(); ++i) {
    slot.verified[i].row = drafting_.size();
    slot.verified[i].drafts = plan.items[i].drafts;
    for (int32_t j = 0; j <= plan.items[i].drafts; ++j) drafting_.push_back(entry(i, j));
  }
  return submit_part({.items = drafting_, .fresh_keys = true}, most, slot);
}

Status ModelRunner::submit_part(const Part& part, int host_slot, Slot& slot) {
  const StepShape shape = shape_of(part);
  const FirstRows first = {static_cast<int32_t>(slot.rows.size()), static_cast<int32_t>(slot.scored_rows)};
  input_->begin(host_slot, shape);
  singles_first_.resize(part.items.size());
  for (size_t i = 0; i < singles_first_.size(); ++i) singles_first_[i] = i;
  std::stable_partition(singles_first_.begin(), singles_first_.end(),
                        [&](size_t i) { return part.items[i].count == 1; });
  last_rows_.resize(part.items.size());
  for (const size_t i : singles_first_) {
    const ScheduledSequence& item = part.items[i];
    const std::span<const int32_t> tokens(item.sequence->tokens);
    const bool known = item.source < 0;
    last_rows_[i] =
        input_->add({.tokens = known ? tokens.subspan(static_cast<size_t>(item.first), static_cast<size_t>(item.count))
                                     : std::span(&kPendingToken, 1),
                     .first = item.first,
                     .source = item.source,
                     .blocks = item.sequence->blocks});
  }
  for (size_t i = 0; i < part.items.size(); ++i) {
    const ScheduledSequence& item = part.items[i];
    if (item.samples) add_samples(item, last_rows_[i], part, slot);
    if (scores(item)) add_scores(item, part.first + i, last_rows_[i], part.precision, slot);
    add_hidden(item, part.first + i, last_rows_[i], slot);
  }
  input_->upload();
  NFP_RETURN_IF_ERROR(launch(shape, first, slot.top_n));
  slot.scored_rows += static_cast<size_t>(shape.scored);
  enqueue_hidden(shape, slot);
  return ok_status();
}

Status ModelRunner::launch(const StepShape& shape, FirstRows first, int32_t top_n) {
  const auto& sizes = graph_sizes_;
  Backend& backend = model_.backend();
  const bool captured = shape.decode() && !backend.profiling() &&
                        std::binary_search(sizes.begin(), sizes.end(), shape.rows) && !captured_.first(shape);
  if (!captured) {
    enqueue(shape, first, top_n);
    return ok_status();
  }
  if (Graph* graph = captured_.find(shape)) return backend.replay(*graph);
  if (captures_) {
    NFP_RETURN_IF_ERROR(backend.begin_capture());
    try {
      enqueue(shape, first, top_n);
    } catch (...) {  // nothing else may be asked of a device that still records
      (void)backend.end_capture();
      throw;
    }
    Result<std::unique_ptr<Graph>> graph = backend.end_capture();
    if (graph.ok()) return backend.replay(captured_.keep(shape, std::move(graph).value()));
    if (graph.error().code != ErrorCode::kResource) return graph.error();
    captures_ = false;
    log::warn(
        "{}: further steps run without, which makes short ones longer; leave more memory free, by a lower GPU memory "
        "utilization",
        graph.error().message);
  }
  enqueue(shape, first, top_n);
  return ok_status();
}

void ModelRunner::enqueue(const StepShape& shape, FirstRows first, int32_t top_n) {
  model_.forward({.batch = input_->view(shape, sampled_.as<SampledRow>()),
                  .precision = shape.precision,
                  .cache = cache_.get(),
                  .fp8_share = shape.fp8_share});
  if (shape.rows > 0) {
    // Decoded tokens are in order: a row each.
    const int32_t* const rows = shape.decode() ? nullptr : input_->sampled_rows(shape);
    SampleArgs args = input_->sampling(shape);
    args.history = history_.get();
    args.out = sampled_.as<SampledRow>() + first.sampled;
    args.top = top_.as<TokenLogprob>() + static_cast<ptrdiff_t>(first.sampled) * kMaxTopLogprobs;
    model_.sample(rows, shape.precision, logits_.as<float>(), args);
  }
  for (int32_t done = 0; done < shape.scored; done += launch_sequences_) {
    const int32_t count = std::min(launch_sequences_, shape.scored - done);
    model_.logits(input_->scored_rows(shape) + done, count, shape.precision, logits_.as<float>());
    ScoreArgs args;
    args.logits = logits_.as<float>();
    args.target = input_->scored_targets(shape) + done;
    args.rows = count;
    args.vocab = vocab();
    args.top_n = top_n;
    args.out = scored_.as<SampledRow>() + first.scored + done;
    args.top = scored_top_.as<TokenLogprob>() + (static_cast<ptrdiff_t>(first.scored) + done) * top_n;
    model_.backend().score(args);
  }
}

void ModelRunner::enqueue_downloads(Slot& slot) {
  const auto download = [](const Buffer& host, const Buffer& device, int64_t count, size_t size) {
    return CopyArgs{.dst = host.data(), .src = device.data(), .bytes = static_cast<size_t>(count) * size};
  };
  const auto rows = static_cast<int64_t>(slot.rows.size());
  const bool alternatives =
      std::any_of(slot.rows.begin(), slot.rows.end(), [](const Sampled& r) { return r.top_n > 0; });
  const auto scored = static_cast<int64_t>(slot.scored_rows);
  const std::array<CopyArgs, 4> copies = {
      download(slot.sampled, sampled_, slot.drafts > 0 ? int64_t{slot.drafts + 1} * launch_sequences_ : rows,
               sizeof(SampledRow)),
      download(slot.top, top_, alternatives ? rows * kMaxTopLogprobs : 0, sizeof(TokenLogprob)),
      download(slot.scored, scored_, scored, sizeof(SampledRow)),
      download(slot.scored_top, scored_top_, scored * slot.top_n, sizeof(TokenLogprob))};
  model_.backend().copy_all(copies);
}

size_t ModelRunner::hidden_row_bytes() const {
  return static_cast<size_t>(model_.config().hidden) * size_of(model_.backend().activation_dtype());
}

// Not part of a captured step: shapes with hidden states are prefills. Before the next launch, which overwrites them.
void ModelRunner::enqueue_hidden(const StepShape& shape, Slot& slot) {
  const size_t row_bytes = hidden_row_bytes();
  for (int32_t done = 0; done < shape.pooled; done += launch_sequences_) {
    const int32_t count = std::min(launch_sequences_, shape.pooled - done);
    const Buffer& normed = model_.final_states(input_->pooled_rows(shape) + done, count);
    model_.backend().copy({.dst = slot.hidden.as<char>() + slot.hidden_rows * row_bytes,
                           .src = normed.data(),
                           .bytes = static_cast<size_t>(count) * row_bytes});
    slot.hidden_rows += static_cast<size_t>(count);
  }
}

Result<StepOutput> ModelRunner::collect(StepTicket ticket) {
  assert(ticket == collected_ && collected_ < submitted_);
  Slot& slot = slots_[ticket % slots_.size()];
  ++collected_;
  NFP_RETURN_IF_ERROR(model_.backend().wait(*slot.done));
  StepOutput output;
  NFP_RETURN_IF_ERROR(caught([&] {
    take_results(slot, output);
    return ok_status();
  }));
  return output;
}

void ModelRunner::take_results(const Slot& slot, StepOutput& output) const {
  const SampledRow* const sampled = slot.sampled.as<SampledRow>();
  const auto token = [&](size_t i) {
    const Sampled& row = slot.rows[i];
    OutputToken out = output_token(sampled[i], row.precision, row.logprobs,
                                   slot.top.as<TokenLogprob>() + i * kMaxTopLogprobs, row.top_n);
    out.has_choice = row.has_choice;
    return out;
  };
  for (const Verified& item : slot.verified) {
    output.sampled.push_back(token(item.row));
    std::vector<OutputToken>& accepted = output.accepted.emplace_back();
    for (size_t j = 0; j < static_cast<size_t>(item.drafts); ++j) {
      const SampledRow& sure = sampled[item.row + j];
      const SampledRow& draft =
          sampled[(j + 1) * static_cast<size_t>(launch_sequences_) + static_cast<size_t>(item.draft_row[j])];
      if (sure.not_finite != 0 || draft.token != sure.token) break;
      accepted.push_back(token(item.row + j + 1));
    }
  }
  if (slot.verified.empty()) {
    for (size_t i = 0; i < slot.rows.size(); ++i) output.sampled.push_back(token(i));
  }
  if (!slot.pooled.empty()) {
    output.hidden.resize(slot.items);
    const char* data = slot.hidden.as<char>();
    for (const Pooled& item : slot.pooled) {
      output.hidden[item.item] = {data, model_.backend().activation_dtype(), hidden(), item.first, item.count};
      data += static_cast<size_t>(item.count) * hidden_row_bytes();
    }
  }
  if (slot.scores.empty()) return;
  output.prompt_logprobs.resize(slot.items);
  size_t row = 0;
  for (const Scored& item : slot.scores) {
    for (int32_t r = 0; r < item.count; ++r, ++row) {
      output.prompt_logprobs[item.item].push_back(
          output_token(slot.scored.as<SampledRow>()[row], item.precision, true,
                       slot.scored_top.as<TokenLogprob>() + row * static_cast<size_t>(slot.top_n), item.top_n));
    }
  }
}

}  // namespace nfp
