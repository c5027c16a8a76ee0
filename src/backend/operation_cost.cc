#include "backend/operation_cost.h"

#include <algorithm>

namespace nfp {
namespace {

constexpr uint64_t kWord = 4;  // of FP32 and i32

uint64_t product(int64_t a, int64_t b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); }

// Keys and values of one token in one layer.
uint64_t kv_token_bytes(const KvCacheSpec& spec) {
  return 2 * product(spec.kv_heads, spec.head_dim) * size_of(spec.dtype);
}

// Of a chunk of `count` tokens, the last of `context` ones.
struct Attended {
  uint64_t keys;   // that any of them reads
  uint64_t pairs;  // of a query and a key
};
Attended attended(int64_t count, int64_t context, int64_t window) {
  const int64_t first = context - count + 1;  // keys of the first token, without a window
  if (window <= 0) window = context;
  // Tokens whose keys all lie in the window, then those that lose some.
  const int64_t whole = std::clamp(window, first - 1, context);
  const int64_t pairs = (first + whole) * (whole - first + 1) / 2 + (context - whole) * window;
  return {static_cast<uint64_t>(context - std::max<int64_t>(0, first - window)), static_cast<uint64_t>(pairs)};
}

uint64_t linear_outputs(Epilogue epilogue, int64_t n) {
  return static_cast<uint64_t>(epilogue == Epilogue::kGatedActivation ? n / 2 : n);
}

}  // namespace

OperationCost operator+(const OperationCost& a, const OperationCost& b) {
  return {a.weight_bytes + b.weight_bytes, a.activation_bytes + b.activation_bytes, a.kv_bytes + b.kv_bytes,
          a.flops + b.flops};
}

uint64_t ActivationForm::bytes(int64_t rows, int64_t features, Precision consumer) const {
  if (rounds_for(consumer)) return product(rows, features) + product(rows, kWord);
  return product(rows, features) * feature_bytes;
}

Precision product_precision(const LinearWeight& weight, Precision step) {
  if (weight.bytes_read(step) == weight.bytes_read(Precision::kFp16)) return Precision::kFp16;
  return step == Precision::kFp8W8A8 && is_exact(weight.consumes(step)) ? Precision::kFp8 : step;
}

OperationCost cost_of(const EmbedArgs& args, const ActivationForm& form) {
  const uint64_t features = product(args.batch.tokens, args.table->k());
  return {.weight_bytes = 2 * features,
          .activation_bytes =
              product(args.batch.tokens, kWord) + features * (args.out_is_f32 ? sizeof(float) : form.feature_bytes)};
}

OperationCost cost_of(const RmsNormArgs& args, const ActivationForm& form) {
  const uint64_t features = product(args.rows, args.hidden);
  const uint64_t stream = features * (args.x_is_f32 ? sizeof(float) : form.feature_bytes);
  OperationCost cost;
  cost.activation_bytes = stream;
  if (args.residual != nullptr) {
    cost.activation_bytes += 2 * stream;
    cost.flops += features;
  }
  if (args.out == nullptr) return cost;
  cost.weight_bytes = product(args.hidden, kWord);
  cost.activation_bytes +=
      args.out_is_f32 ? features * sizeof(float) : form.bytes(args.rows, args.hidden, args.consumer);
  cost.flops += 4 * features;  // its square, their sum, by the root, by the weight
  return cost;
}

OperationCost cost_of(const LinearArgs& args, const ActivationForm& form, std::optional<uint64_t> largest_bytes) {
  const LinearWeight& weight = *args.weight;
  const auto outputs = static_cast<int64_t>(linear_outputs(args.epilogue, weight.n()));
  const uint64_t stored =
      args.y_is_f32 ? product(args.rows, outputs) * sizeof(float) : form.bytes(args.rows, outputs, args.consumer);
  return {.weight_bytes = weight.bytes_read(args.precision),
          .activation_bytes =
              form.bytes(args.rows, weight.k(), weight.consumes(args.precision)) + largest_bytes.value_or(stored),
          .flops = 2 * product(args.rows, weight.n()) * static_cast<uint64_t>(weight.k())};
}

OperationCost cost_of(const RopeArgs& args, const ActivationForm& form) {
  const int64_t tokens = args.batch.tokens;
  const int64_t q = int64_t{args.heads} * args.head_dim, kv = int64_t{args.kv_heads} * args.head_dim;
  OperationCost cost;
  cost.activation_bytes =
      form.bytes(tokens, q + 2 * kv) + form.bytes(tokens, q) + product(tokens, args.rotary_dim) * sizeof(float);
  cost.kv_bytes = product(tokens, 1) * kv_token_bytes(args.cache->spec());
  cost.flops = 3 * product(tokens, args.heads + args.kv_heads) * static_cast<uint64_t>(args.rotary_dim);
  if (args.q_norm != nullptr) {
    cost.weight_bytes = (args.norm_spans_heads ? static_cast<uint64_t>(q + kv) : 2 * product(args.head_dim, 1)) * kWord;
    cost.flops += 4 * product(tokens, q + kv);
  }
  return cost;
}

OperationCost cost_of(const AttentionArgs& args, const ActivationForm& form, const SequenceLengths& lengths,
                      int32_t first, int32_t count) {
  OperationCost cost;
  if (lengths.context == nullptr || (lengths.query_start == nullptr && !args.batch.narrowed)) return cost;
  int64_t tokens = 0;
  uint64_t keys = 0, pairs = 0;
  for (int32_t s = first; s < first + count; ++s) {
    const int32_t queries = args.batch.narrowed ? 1 : lengths.query_start[s + 1] - lengths.query_start[s];
    const Attended found = attended(queries, lengths.context[s], args.window);
    tokens += queries;
    keys += found.keys;
    pairs += found.pairs;
  }
  const int64_t features = int64_t{args.heads} * args.head_dim;
  cost.activation_bytes = 2 * form.bytes(tokens, features);  // q and the result
  cost.kv_bytes = keys * kv_token_bytes(args.cache->spec());
  cost.flops = 4 * pairs * static_cast<uint64_t>(features);  // products with keys and with values
  return cost;
}

OperationCost cost_of(const RopeArgs& rope, const AttentionArgs& args, const ActivationForm& form,
                      const SequenceLengths& lengths) {
  OperationCost cost = cost_of(rope, form) + cost_of(args, form, lengths, 0, args.batch.sequences);
  cost.activation_bytes -= 2 * form.bytes(rope.batch.tokens, int64_t{rope.heads} * rope.head_dim);
  return cost;
}

OperationCost cost_of(const RouteArgs& args, const ActivationForm& form) {
  const int64_t rows_of_weights = args.routes.experts + (args.shared_gate != nullptr ? 1 : 0);
  const uint64_t weights = product(rows_of_weights, args.hidden);
  return {.weight_bytes = weights * kWord,
          // Row, place and weight of each assignment.
          .activation_bytes = form.bytes(args.rows, args.hidden) + 3 * kWord * product(args.rows, args.routes.top) +
                              kWord * (product(args.routes.experts, 1) + 1),
          .flops = 2 * product(args.rows, 1) * weights};
}

OperationCost cost_of(const ExpertLinearArgs& args, const ActivationForm& form, const int32_t* start,
                      Precision inputs) {
  OperationCost cost;
  if (start == nullptr) return cost;
  const LinearWeight& first = *args.weights[0];
  for (int32_t e = 0; e < args.routes.experts; ++e) {
    if (start[e + 1] == start[e]) continue;
    cost.weight_bytes += args.weights[e]->bytes_read(args.is_exact(e) ? Precision::kFp16 : args.precision);
  }
  const int64_t assignments = start[args.routes.experts];
  cost.activation_bytes = form.bytes(args.sorted ? assignments : args.rows, first.k(), inputs) +
                          form.bytes(assignments, static_cast<int64_t>(linear_outputs(args.epilogue, first.n())));
  cost.flops = 2 * product(assignments, first.n()) * static_cast<uint64_t>(first.k());
  return cost;
}

OperationCost cost_of(const CombineExpertsArgs& args, const ActivationForm& form) {
  const int64_t assignments = int64_t{args.rows} * args.routes.top;
  const int64_t shared_rows = args.shared != nullptr ? args.rows : 0;
  return {.activation_bytes =
              form.bytes(assignments + shared_rows + args.rows, args.hidden) + 2 * kWord * product(assignments, 1),
          .flops = 2 * product(assignments + shared_rows, args.hidden)};
}

OperationCost cost_of(const CombineExpertsArgs& first, const RmsNormArgs& then, const ActivationForm& form) {
  OperationCost cost = cost_of(first, form) + cost_of(then, form);
  cost.activation_bytes -= 2 * form.bytes(first.rows, first.hidden);  // the sum stays in the kernel
  return cost;
}

OperationCost cost_of(const GatherRowsArgs& args, const ActivationForm& form) {
  return {.activation_bytes = product(args.count, kWord) + 2 * product(args.count, args.hidden) *
                                                               (args.is_f32 ? sizeof(float) : form.feature_bytes)};
}

OperationCost cost_of(const SampleArgs& args, std::optional<uint64_t> largest_bytes) {
  if (largest_bytes) return {.activation_bytes = *largest_bytes + product(args.rows, sizeof(SampledRow))};
  return {.activation_bytes = product(args.rows, args.vocab) * sizeof(float) +
                              product(args.rows, sizeof(SamplingRow) + sizeof(SampledRow))};
}

OperationCost cost_of(const ScoreArgs& args) {
  return {.activation_bytes =
              product(args.rows, args.vocab) * sizeof(float) + product(args.rows, kWord + sizeof(SampledRow))};
}

OperationCost cost_of(const CopyArgs& args) {
  return {.activation_bytes = 2 * product(args.rows, 1) * static_cast<uint64_t>(args.bytes)};
}

OperationCost gating_cost(int64_t rows, int64_t n, Precision consumer, const ActivationForm& form) {
  return {.activation_bytes = form.bytes(rows, n) + form.bytes(rows, n / 2, consumer)};
}

OperationCost rounding_cost(int64_t rows, int64_t features, const ActivationForm& form, int32_t copies) {
  return {.activation_bytes = form.bytes(rows, features) + form.bytes(rows * copies, features, Precision::kFp8W8A8)};
}

std::string_view stage_of(const RmsNormArgs& args, const ActivationForm& form) {
  if (args.out == nullptr) return stage::kAdd;
  return form.rounds_for(args.consumer) ? stage::kRmsNormRound : stage::kRmsNorm;
}

std::string_view stage_of(const CombineExpertsArgs&, const RmsNormArgs& then, const ActivationForm& form) {
  return form.rounds_for(then.consumer) ? stage::kCombineRmsNormRound : stage::kCombineRmsNorm;
}

void StageTimes::add(std::string_view stage, std::optional<Precision> precision, const OperationCost& cost,
                     double seconds) {
  auto place = std::find_if(times_.begin(), times_.end(),
                            [&](const StageTime& time) { return time.stage == stage && time.precision == precision; });
  if (place == times_.end()) place = times_.insert(place, {stage, precision, 0, 0, {}});
  ++place->calls;
  place->seconds += seconds;
  place->cost = place->cost + cost;
}

}  // namespace nfp
