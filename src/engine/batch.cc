#include "engine/batch.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <functional>

namespace nfp {
namespace {

constexpr size_t kAlign = 64;

size_t bytes_of(int32_t count, size_t size) {
  return (static_cast<size_t>(count) * size + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

size_t StepShapeHash::operator()(const StepShape& s) const {
  size_t hash = 0;
  for (const size_t part :
       {static_cast<size_t>(s.tokens), static_cast<size_t>(s.sequences), static_cast<size_t>(s.single),
        static_cast<size_t>(s.rows), static_cast<size_t>(s.scored), static_cast<size_t>(s.pooled), size_t{s.last_only},
        size_t{s.fresh_keys}, static_cast<size_t>(s.needs), static_cast<size_t>(s.precision),
        std::hash<double>{}(s.fp8_share), static_cast<size_t>(s.launch_context)}) {
    hash = (hash ^ part) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

StepInput::Layout StepInput::layout(const StepShape& s) {
  Layout at{};
  size_t used = 0;
  const auto place = [&](size_t& offset, int32_t count, size_t size) {
    offset = used;
    used += bytes_of(count, size);
  };
  constexpr size_t kInt = sizeof(int32_t);
  place(at.token_ids, s.tokens, kInt);
  place(at.token_source, s.tokens, kInt);
  place(at.positions, s.tokens, kInt);
  place(at.slots, s.tokens, kInt);
  place(at.query_start, s.sequences + 1, kInt);
  place(at.context, s.sequences, kInt);
  const int32_t last = s.last_only ? s.sequences : 0;
  place(at.last_token, last, kInt);
  place(at.last_position, last, kInt);
  place(at.last_start, last > 0 ? last + 1 : 0, kInt);
  place(at.rows, s.rows, kInt);
  place(at.scored_rows, s.scored, kInt);
  place(at.scored_targets, s.scored, kInt);
  place(at.pooled_rows, s.pooled, kInt);
  place(at.sampling, s.rows, sizeof(SamplingRow));
  at.bytes = used;
  return at;
}

Result<std::unique_ptr<StepInput>> StepInput::create(Backend& backend, const StepLimits& limits) {
  std::unique_ptr<StepInput> input(new StepInput(backend, limits));
  StepShape most;
  most.tokens = most.scored = most.pooled = limits.tokens;
  most.sequences = most.rows = limits.sequences;
  most.last_only = true;
  const auto sequences = static_cast<size_t>(limits.sequences);
  const size_t arrays = layout(most).bytes;
  const size_t table = sequences * static_cast<size_t>(limits.table_width) * sizeof(int32_t);
  const size_t bias = sequences * static_cast<size_t>(limits.row_bias) * sizeof(LogitBias);
  const size_t masks = limits.masks ? sequences * static_cast<size_t>(input->mask_words()) * sizeof(uint32_t) : 0;
  const auto both = [&](std::vector<Buffer>& host, Buffer& device, size_t bytes) -> Status {
    host.resize(static_cast<size_t>(limits.slots));
    for (Buffer& slot : host) {
      NFP_ASSIGN_OR_RETURN(slot, backend.allocate_host(bytes));
    }
    NFP_ASSIGN_OR_RETURN(device, backend.allocate(bytes));
    return ok_status();
  };
  NFP_RETURN_IF_ERROR(both(input->arrays_, input->device_arrays_, arrays));
  NFP_RETURN_IF_ERROR(both(input->tables_, input->device_table_, table));
  NFP_RETURN_IF_ERROR(both(input->biases_, input->device_bias_, bias));
  NFP_RETURN_IF_ERROR(both(input->masks_, input->device_masks_, masks));
  return input;
}

void StepInput::begin(int slot, const StepShape& shape) {
  assert(shape.tokens <= limits_.tokens && shape.sequences <= limits_.sequences && shape.rows <= limits_.sequences);
  slot_ = slot;
  shape_ = shape;
  at_ = layout(shape);
  tokens_ = sequences_ = rows_ = scored_ = pooled_ = biased_ = masked_ = 0;
  widest_ = 1;
  host<int32_t>(at_.query_start)[0] = 0;
  if (shape_.last_only) host<int32_t>(at_.last_start)[0] = 0;
}

int32_t StepInput::add(const BatchItem& item) {
  const auto count = static_cast<int32_t>(item.tokens.size());
  assert(tokens_ + count <= shape_.tokens && sequences_ < shape_.sequences);
  assert((sequences_ < shape_.single) == (count == 1) || sequences_ >= shape_.single);
  assert(item.source < 0 || count == 1);
  const int32_t size = limits_.block_size;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = item.first + i;
    host<int32_t>(at_.token_ids)[tokens_ + i] = item.source < 0 ? item.tokens[static_cast<size_t>(i)] : 0;
    host<int32_t>(at_.token_source)[tokens_ + i] = item.source;
    host<int32_t>(at_.positions)[tokens_ + i] = position;
    host<int32_t>(at_.slots)[tokens_ + i] = item.blocks[static_cast<size_t>(position / size)] * size + position % size;
  }
  tokens_ += count;
  host<int32_t>(at_.context)[sequences_] = item.first + count;
  if (shape_.last_only) {
    host<int32_t>(at_.last_token)[sequences_] = tokens_ - 1;
    host<int32_t>(at_.last_position)[sequences_] = item.first + count - 1;
    host<int32_t>(at_.last_start)[sequences_ + 1] = sequences_ + 1;
  }
  assert(item.blocks.size() <= static_cast<size_t>(limits_.table_width));
  auto* table = tables_[static_cast<size_t>(slot_)].as<int32_t>();
  std::copy(item.blocks.begin(), item.blocks.end(),
            table + static_cast<size_t>(sequences_) * static_cast<size_t>(limits_.table_width));
  widest_ = std::max(widest_, static_cast<int32_t>(item.blocks.size()));
  host<int32_t>(at_.query_start)[++sequences_] = tokens_;
  return shape_.last_only ? sequences_ - 1 : tokens_ - 1;
}

void StepInput::add_row(int32_t last_row, SamplingRow row, std::span<const LogitBias> bias) {
  assert(rows_ < shape_.rows && bias.size() <= static_cast<size_t>(limits_.row_bias));
  row.bias_first = biased_;
  row.bias_count = static_cast<int32_t>(bias.size());
  row.allowed_row = -1;
  std::copy(bias.begin(), bias.end(), biases_[static_cast<size_t>(slot_)].as<LogitBias>() + biased_);
  biased_ += row.bias_count;
  host<int32_t>(at_.rows)[rows_] = last_row;
  host<SamplingRow>(at_.sampling)[rows_++] = row;
}

std::span<uint32_t> StepInput::add_mask() {
  assert(limits_.masks && rows_ > 0);
  const auto words = static_cast<size_t>(mask_words());
  uint32_t* mask = masks_[static_cast<size_t>(slot_)].as<uint32_t>() + static_cast<size_t>(masked_) * words;
  std::fill(mask, mask + words, 0u);
  host<SamplingRow>(at_.sampling)[rows_ - 1].allowed_row = masked_++;
  return {mask, words};
}

void StepInput::drop_mask() {
  --masked_;
  host<SamplingRow>(at_.sampling)[rows_ - 1].allowed_row = -1;
}

void StepInput::add_score(int32_t token_row, int32_t target) {
  assert(scored_ < shape_.scored);
  host<int32_t>(at_.scored_rows)[scored_] = token_row;
  host<int32_t>(at_.scored_targets)[scored_++] = target;
}

void StepInput::add_pooled(int32_t token_row) {
  assert(pooled_ < shape_.pooled);
  host<int32_t>(at_.pooled_rows)[pooled_++] = token_row;
}

void StepInput::upload() {
  assert(scored_ == shape_.scored && pooled_ == shape_.pooled);
  const auto slot = static_cast<size_t>(slot_);
  const auto width = static_cast<size_t>(limits_.table_width);
  auto* table = tables_[slot].as<int32_t>();
  for (; sequences_ < shape_.sequences; ++sequences_, ++tokens_) {  // padding, of decode steps
    assert(shape_.decode());
    host<int32_t>(at_.token_ids)[tokens_] = 0;
    host<int32_t>(at_.token_source)[tokens_] = -1;
    host<int32_t>(at_.positions)[tokens_] = 0;
    host<int32_t>(at_.slots)[tokens_] = -1;
    host<int32_t>(at_.query_start)[sequences_ + 1] = tokens_ + 1;
    host<int32_t>(at_.context)[sequences_] = 0;  // attention has no work with it
    table[static_cast<size_t>(sequences_) * width] = scratch_block_;
  }
  for (; rows_ < shape_.rows; ++rows_) {
    host<int32_t>(at_.rows)[rows_] = rows_;
    host<SamplingRow>(at_.sampling)[rows_] = {};
  }
  assert(tokens_ == shape_.tokens);
  const std::array<CopyArgs, 4> copies = {
      {{.dst = device_arrays_.data(), .src = arrays_[slot].data(), .bytes = at_.bytes},
       {.dst = device_table_.data(),
        .src = table,
        .bytes = static_cast<size_t>(widest_) * sizeof(int32_t),
        .rows = shape_.sequences,
        .dst_pitch = width * sizeof(int32_t),
        .src_pitch = width * sizeof(int32_t)},
       {.dst = device_bias_.data(),
        .src = biases_[slot].data(),
        .bytes = static_cast<size_t>(biased_) * sizeof(LogitBias)},
       {.dst = device_masks_.data(),
        .src = masks_[slot].data(),
        .bytes = static_cast<size_t>(masked_) * static_cast<size_t>(mask_words()) * sizeof(uint32_t)}}};
  backend_.copy_all(copies);
}

BatchView StepInput::view(const StepShape& shape, const SampledRow* previous) const {
  const Layout at = layout(shape);
  BatchView view;
  view.tokens = shape.tokens;
  view.sequences = shape.sequences;
  view.single = shape.single;
  view.table_width = limits_.table_width;
  view.launch_context = shape.launch_context;
  view.fresh_keys = shape.fresh_keys;
  view.token_ids = device<int32_t>(at.token_ids);
  view.token_source = previous != nullptr ? device<int32_t>(at.token_source) : nullptr;
  view.previous = previous;
  view.positions = device<int32_t>(at.positions);
  view.slots = device<int32_t>(at.slots);
  view.query_start = device<int32_t>(at.query_start);
  view.context = device<int32_t>(at.context);
  view.block_table = device_table_.as<int32_t>();
  if (shape.last_only) {
    view.last = {device<int32_t>(at.last_token), device<int32_t>(at.last_position), device<int32_t>(at.last_start)};
  }
  return view;
}

SampleArgs StepInput::sampling(const StepShape& shape) const {
  SampleArgs args;
  args.rows = shape.rows;
  args.vocab = limits_.vocab;
  args.needs = shape.needs;
  args.row = device<SamplingRow>(layout(shape).sampling);
  args.bias = device_bias_.as<LogitBias>();
  args.allowed = device_masks_.as<uint32_t>();
  args.allowed_words = mask_words();
  return args;
}

const int32_t* StepInput::sampled_rows(const StepShape& shape) const { return device<int32_t>(layout(shape).rows); }
const int32_t* StepInput::scored_rows(const StepShape& shape) const {
  return device<int32_t>(layout(shape).scored_rows);
}
const int32_t* StepInput::scored_targets(const StepShape& shape) const {
  return device<int32_t>(layout(shape).scored_targets);
}
const int32_t* StepInput::pooled_rows(const StepShape& shape) const {
  return device<int32_t>(layout(shape).pooled_rows);
}

}  // namespace nfp
