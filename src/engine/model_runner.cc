#include "engine/model_runner.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>

namespace nfp {
namespace {

constexpr size_t kAlign = 64;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Sampling parameters of some rows as the arrays that SamplingView points to.
struct SamplingArrays {
  std::vector<float> temperature, top_p, min_p, repetition, presence, frequency;
  std::vector<int32_t> top_k, history_slot;
  std::vector<uint64_t> seed, draw;
  std::vector<int32_t> bias_start{0}, bias_token, allowed_row;
  std::vector<float> bias_value;
  std::vector<uint32_t> allowed;

  void add(const Sequence& sequence, int32_t allowed_words) {
    const SamplingParams& p = sequence.request.sampling;
    temperature.push_back(p.temperature);
    top_k.push_back(p.top_k);
    top_p.push_back(p.top_p);
    min_p.push_back(p.min_p);
    repetition.push_back(p.repetition_penalty);
    presence.push_back(p.presence_penalty);
    frequency.push_back(p.frequency_penalty);
    const bool penalties = p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
    history_slot.push_back(penalties ? sequence.history_slot : -1);
    seed.push_back(sequence.seed);
    // The place in the answer, not the step: a sequence that is computed again after preemption draws the same numbers.
    draw.push_back(static_cast<uint64_t>(sequence.output_size()));
    for (const auto& [token, bias] : p.logit_bias) {
      bias_token.push_back(token);
      bias_value.push_back(bias);
    }
    if (sequence.output_size() < p.min_tokens) {
      for (int32_t token : sequence.end_ids) {
        bias_token.push_back(token);
        bias_value.push_back(-std::numeric_limits<float>::infinity());
      }
    }
    bias_start.push_back(static_cast<int32_t>(bias_token.size()));
    add_constraint(sequence, allowed_words);
  }

 private:
  void add_constraint(const Sequence& sequence, int32_t allowed_words) {
    int32_t row = -1;
    if (sequence.request.constraint) {
      const size_t before = allowed.size();
      const auto words = static_cast<size_t>(allowed_words);
      allowed.resize(before + words, 0);
      if (sequence.request.constraint->fill(std::span(allowed).subspan(before))) {
        row = static_cast<int32_t>(before / words);
      } else {
        allowed.resize(before);
      }
    }
    allowed_row.push_back(row);
  }
};

void fill_top(OutputToken& token, const int32_t* ids, const float* logprobs, int32_t count) {
  for (int32_t i = 0; i < count; ++i) token.top.push_back({ids[i], logprobs[i]});
}

}  // namespace

Status ModelRunner::Staging::reserve_at_least(Backend& backend, size_t bytes) {
  if (bytes <= host_.size()) return ok_status();
  host_.resize(bytes);
  NFP_ASSIGN_OR_RETURN(device_, backend.allocate(bytes));
  return ok_status();
}

const void* ModelRunner::Staging::add_bytes(const void* data, size_t bytes) {
  if (bytes == 0) return nullptr;
  assert(used_ + bytes <= host_.size());
  std::memcpy(host_.data() + used_, data, bytes);
  const void* address = device_.as<std::byte>() + used_;
  used_ = aligned(used_ + bytes);
  return address;
}

Status ModelRunner::Staging::upload(Backend& backend) { return backend.upload(device_.data(), host_.data(), used_); }

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(Model& model, const RunnerOptions& options) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(model, options));
  NFP_RETURN_IF_ERROR(runner->prepare());
  return runner;
}

Status ModelRunner::prepare() {
  Backend& backend = model_.backend();
  const ModelConfig& config = model_.config();
  if (options_.max_context <= 0) options_.max_context = config.max_context;
  if (options_.max_context > config.max_context) {
    return error(ErrorCode::kUsage, "a context of {} tokens was asked for, but this model has {}", options_.max_context,
                 config.max_context);
  }
  NFP_RETURN_IF_ERROR(model_.reserve(options_.max_step_tokens, kLogitRows, options_.max_context));
  NFP_ASSIGN_OR_RETURN(
      cache_, backend.make_kv_cache(model_.kv_spec(options_.kv_blocks, options_.block_size, options_.kv_dtype)));
  NFP_ASSIGN_OR_RETURN(history_, backend.make_token_history(options_.max_sequences, config.vocab));

  const auto tokens = static_cast<size_t>(options_.max_step_tokens);
  const auto sequences = static_cast<size_t>(options_.max_sequences);
  const auto width = static_cast<size_t>(options_.max_context / options_.block_size + 1);
  NFP_RETURN_IF_ERROR(batch_.reserve_at_least(
      backend, 3 * aligned(tokens * 4) + 2 * aligned((sequences + 1) * 4) + aligned(sequences * width * 4)));
  const size_t rows = kLogitRows;
  NFP_ASSIGN_OR_RETURN(logits_, backend.allocate(rows * static_cast<size_t>(config.vocab) * sizeof(float)));
  NFP_ASSIGN_OR_RETURN(token_, backend.allocate(rows * sizeof(int32_t)));
  NFP_ASSIGN_OR_RETURN(logprob_, backend.allocate(rows * sizeof(float)));
  NFP_ASSIGN_OR_RETURN(rank_, backend.allocate(rows * sizeof(int32_t)));
  NFP_ASSIGN_OR_RETURN(top_token_, backend.allocate(rows * kMaxTopLogprobs * sizeof(int32_t)));
  NFP_ASSIGN_OR_RETURN(top_logprob_, backend.allocate(rows * kMaxTopLogprobs * sizeof(float)));
  return ok_status();
}

Status ModelRunner::start(const Sequence& sequence) {
  const std::span<const int32_t> tokens(sequence.tokens);
  const auto prompt = static_cast<size_t>(sequence.prompt_size());
  return model_.backend().reset_history(*history_, sequence.history_slot, tokens.first(prompt), tokens.subspan(prompt));
}

Result<BatchView> ModelRunner::upload_batch(const StepPlan& plan) {
  std::vector<int32_t> ids, positions, slots, query_start{0}, context, table;
  BatchView view;
  const auto size = static_cast<size_t>(options_.block_size);
  size_t width = 1;
  for (const ScheduledSequence& item : plan.items) width = std::max(width, item.sequence->blocks.size());
  for (const ScheduledSequence& item : plan.items) {
    const Sequence& sequence = *item.sequence;
    for (int32_t position = item.first; position < item.first + item.count; ++position) {
      const auto index = static_cast<size_t>(position);
      ids.push_back(sequence.tokens[index]);
      positions.push_back(position);
      slots.push_back(sequence.blocks[index / size] * options_.block_size + static_cast<int32_t>(index % size));
    }
    query_start.push_back(static_cast<int32_t>(ids.size()));
    context.push_back(item.first + item.count);
    table.insert(table.end(), sequence.blocks.begin(), sequence.blocks.end());
    table.resize(context.size() * width, 0);
    view.max_query = std::max(view.max_query, item.count);
    view.max_context = std::max(view.max_context, context.back());
  }
  view.tokens = static_cast<int32_t>(ids.size());
  view.sequences = static_cast<int32_t>(context.size());
  view.table_width = static_cast<int32_t>(width);
  if (view.tokens > options_.max_step_tokens || view.sequences > options_.max_sequences) {
    return error(ErrorCode::kResource, "a step of {} tokens and {} sequences is over the {} and {} there is room for",
                 view.tokens, view.sequences, options_.max_step_tokens, options_.max_sequences);
  }
  batch_.clear();
  view.token_ids = batch_.add(ids);
  view.positions = batch_.add(positions);
  view.slots = batch_.add(slots);
  view.query_start = batch_.add(query_start);
  view.context = batch_.add(context);
  view.block_table = batch_.add(table);
  NFP_RETURN_IF_ERROR(batch_.upload(model_.backend()));
  return view;
}

Result<StepOutput> ModelRunner::run(const StepPlan& plan, Precision precision) {
  NFP_ASSIGN_OR_RETURN(const BatchView batch, upload_batch(plan));
  model_.forward({.batch = batch, .precision = precision, .cache = cache_.get(), .fp8_share = plan.fp8_share});
  StepOutput output;
  NFP_RETURN_IF_ERROR(sample_rows(plan, precision, output));
  const auto scores = [](const ScheduledSequence& item) {
    return item.sequence->request.sampling.prompt_logprobs && item.first + 1 < item.sequence->prompt_size();
  };
  if (std::any_of(plan.items.begin(), plan.items.end(), scores)) {
    output.prompt_logprobs.resize(plan.items.size());
    int32_t row = 0;
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const ScheduledSequence& item = plan.items[i];
      if (scores(item)) NFP_RETURN_IF_ERROR(score_prompt(item, row, precision, output.prompt_logprobs[i]));
      row += item.count;
    }
  }
  NFP_RETURN_IF_ERROR(model_.backend().synchronize());
  return output;
}

Status ModelRunner::sample_rows(const StepPlan& plan, Precision precision, StepOutput& output) {
  Backend& backend = model_.backend();
  struct Row {
    const Sequence* sequence;
    int32_t token_row;
  };
  std::vector<Row> all;
  int32_t end = 0;
  for (const ScheduledSequence& item : plan.items) {
    end += item.count;
    if (item.samples) all.push_back({item.sequence, end - 1});
  }
  const int32_t vocab = model_.config().vocab;
  for (size_t first = 0; first < all.size(); first += kLogitRows) {
    const size_t count = std::min<size_t>(kLogitRows, all.size() - first);
    SamplingArrays arrays;
    std::vector<int32_t> token_rows;
    SampleArgs args;
    const int32_t allowed_words = (vocab + 31) / 32;
    for (size_t i = first; i < first + count; ++i) {
      const SamplingParams& params = all[i].sequence->request.sampling;
      arrays.add(*all[i].sequence, allowed_words);
      token_rows.push_back(all[i].token_row);
      if (params.logprobs) args.top_n = std::max(args.top_n, params.top_logprobs);
      if (params.logprobs) args.logprob = logprob_.as<float>();
      if (params.logprobs) args.rank = rank_.as<int32_t>();
    }
    const size_t most =
        16 * aligned(count * 8 + 8) + aligned(arrays.bias_token.size() * 4) * 2 + aligned(arrays.allowed.size() * 4);
    NFP_RETURN_IF_ERROR(rows_.reserve_at_least(backend, most));
    rows_.clear();
    const int32_t* device_rows = rows_.add(token_rows);
    SamplingView& view = args.sampling;
    view.temperature = rows_.add(arrays.temperature);
    view.top_k = rows_.add(arrays.top_k);
    view.top_p = rows_.add(arrays.top_p);
    view.min_p = rows_.add(arrays.min_p);
    view.repetition_penalty = rows_.add(arrays.repetition);
    view.presence_penalty = rows_.add(arrays.presence);
    view.frequency_penalty = rows_.add(arrays.frequency);
    view.history_slot = rows_.add(arrays.history_slot);
    view.seed = rows_.add(arrays.seed);
    view.draw = rows_.add(arrays.draw);
    if (!arrays.bias_token.empty()) {
      view.bias_start = rows_.add(arrays.bias_start);
      view.bias_token = rows_.add(arrays.bias_token);
      view.bias_value = rows_.add(arrays.bias_value);
    }
    if (!arrays.allowed.empty()) {
      view.allowed = rows_.add(arrays.allowed);
      view.allowed_row = rows_.add(arrays.allowed_row);
      view.allowed_words = allowed_words;
    }
    NFP_RETURN_IF_ERROR(rows_.upload(backend));

    model_.logits(device_rows, static_cast<int32_t>(count), precision, logits_.as<float>());
    args.logits = logits_.as<float>();
    args.rows = static_cast<int32_t>(count);
    args.vocab = vocab;
    args.history = history_.get();
    args.token = token_.as<int32_t>();
    args.top_token = args.top_n > 0 ? top_token_.as<int32_t>() : nullptr;
    args.top_logprob = args.top_n > 0 ? top_logprob_.as<float>() : nullptr;
    backend.sample(args);

    std::vector<int32_t> tokens(count), ranks(count);
    std::vector<float> logprobs(count);
    std::vector<int32_t> top(count * static_cast<size_t>(args.top_n));
    std::vector<float> top_logprobs(top.size());
    NFP_RETURN_IF_ERROR(backend.download(tokens.data(), token_.data(), count * 4));
    if (args.logprob != nullptr) {
      NFP_RETURN_IF_ERROR(backend.download(logprobs.data(), logprob_.data(), count * 4));
      NFP_RETURN_IF_ERROR(backend.download(ranks.data(), rank_.data(), count * 4));
    }
    if (args.top_n > 0) {
      NFP_RETURN_IF_ERROR(backend.download(top.data(), top_token_.data(), top.size() * 4));
      NFP_RETURN_IF_ERROR(backend.download(top_logprobs.data(), top_logprob_.data(), top.size() * 4));
    }
    for (size_t i = 0; i < count; ++i) {
      const SamplingParams& params = all[first + i].sequence->request.sampling;
      OutputToken& token = output.sampled.emplace_back();
      token.token = tokens[i];
      token.precision = precision;
      if (!params.logprobs) continue;
      token.logprob = logprobs[i];
      token.rank = ranks[i];
      const size_t at = i * static_cast<size_t>(args.top_n);
      fill_top(token, top.data() + at, top_logprobs.data() + at, params.top_logprobs);
    }
  }
  return ok_status();
}

Status ModelRunner::score_prompt(const ScheduledSequence& item, int32_t first_row, Precision precision,
                                 std::vector<OutputToken>& scores) {
  Backend& backend = model_.backend();
  const Sequence& sequence = *item.sequence;
  const int32_t top_n = *sequence.request.sampling.prompt_logprobs;
  // Row r of the item predicts token first + r + 1.
  const int32_t rows = std::min(item.count, sequence.prompt_size() - 1 - item.first);
  for (int32_t done = 0; done < rows; done += kLogitRows) {
    const int32_t count = std::min(kLogitRows, rows - done);
    std::vector<int32_t> token_rows, targets;
    for (int32_t r = done; r < done + count; ++r) {
      token_rows.push_back(first_row + r);
      targets.push_back(sequence.tokens[static_cast<size_t>(item.first + r + 1)]);
    }
    NFP_RETURN_IF_ERROR(rows_.reserve_at_least(backend, 2 * aligned(static_cast<size_t>(count) * 4)));
    rows_.clear();
    const int32_t* device_rows = rows_.add(token_rows);
    ScoreArgs args;
    args.target = rows_.add(targets);
    NFP_RETURN_IF_ERROR(rows_.upload(backend));
    model_.logits(device_rows, count, precision, logits_.as<float>());
    args.logits = logits_.as<float>();
    args.rows = count;
    args.vocab = model_.config().vocab;
    args.top_n = top_n;
    args.logprob = logprob_.as<float>();
    args.rank = rank_.as<int32_t>();
    args.top_token = top_n > 0 ? top_token_.as<int32_t>() : nullptr;
    args.top_logprob = top_n > 0 ? top_logprob_.as<float>() : nullptr;
    backend.score(args);
    const auto n = static_cast<size_t>(count);
    std::vector<float> logprobs(n), top_logprobs(n * static_cast<size_t>(top_n));
    std::vector<int32_t> ranks(n), top(n * static_cast<size_t>(top_n));
    NFP_RETURN_IF_ERROR(backend.download(logprobs.data(), logprob_.data(), n * 4));
    NFP_RETURN_IF_ERROR(backend.download(ranks.data(), rank_.data(), n * 4));
    if (top_n > 0) {
      NFP_RETURN_IF_ERROR(backend.download(top.data(), top_token_.data(), top.size() * 4));
      NFP_RETURN_IF_ERROR(backend.download(top_logprobs.data(), top_logprob_.data(), top.size() * 4));
    }
    for (size_t i = 0; i < n; ++i) {
      OutputToken& token = scores.emplace_back();
      token.token = targets[i];
      token.precision = precision;
      token.logprob = logprobs[i];
      token.rank = ranks[i];
      const size_t at = i * static_cast<size_t>(top_n);
      fill_top(token, top.data() + at, top_logprobs.data() + at, top_n);
    }
  }
  return ok_status();
}

}  // namespace nfp
