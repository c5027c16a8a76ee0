#include "backend/cpu/executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "backend/cpu/executor_parts.h"
#include "backend/cpu/kv_cache.h"
#include "backend/cpu/token_history.h"

namespace nfp::cpu {
namespace {

constexpr ActivationForm kForm{.feature_bytes = sizeof(float)};  // what products round stays with them

// Whether the norm may be computed on the way into the product that follows it.
bool fuses(std::span<const Operation> operations, size_t i) {
  if (i + 1 >= operations.size()) return false;
  const auto* norm = std::get_if<RmsNormArgs>(&operations[i]);
  const auto* linear = std::get_if<LinearArgs>(&operations[i + 1]);
  return norm != nullptr && linear != nullptr && norm->out != nullptr && linear->x == norm->out &&
         linear->rows == norm->rows && norm->rows <= kPrivateRows && linear->y != norm->x && linear->y != norm->out &&
         linear->y != norm->residual;
}

}  // namespace

Executor::Executor(const KernelTable& kernels, ThreadPool& threads, int nodes)
    : kernels_(kernels),
      threads_(threads),
      nodes_(nodes),
      scratch_(static_cast<size_t>(threads.size())),
      inputs_(static_cast<size_t>(threads.size())),
      pieces_(threads.size()),
      expert_rows_(static_cast<size_t>(threads.size())),
      sampling_(static_cast<size_t>(threads.size())) {}

Executor::Needs Executor::needs_of(const Operation& operation) const {
  Needs needs;
  if (const auto* linear = std::get_if<LinearArgs>(&operation)) {
    needs.per_thread =
        linear_scratch_bytes(kernels_.pairs, std::min<int64_t>(linear->rows, kMaxLinearRows), linear->weight->k());
    const size_t prepared = carve(linear->rows, linear->weight->k(), preparation_of(*linear, kernels_), nullptr).bytes;
    if (linear->rows <= kPrivateRows) {  // and the norm before it, with the residual stream
      needs.input = prepared + 2 * round_up(static_cast<size_t>(linear->rows * linear->weight->k()) * sizeof(float));
    } else {
      needs.shared = prepared;
    }
  } else if (const auto* experts = std::get_if<ExpertLinearArgs>(&operation)) {
    const int64_t k = experts->weights[0]->k();
    const Preparation prepare = preparation_of(*experts, kernels_);
    const int32_t inputs = experts->sorted ? assignments_of(experts->routes, experts->rows) : experts->rows;
    const int64_t chunk = std::min<int64_t>(experts->rows, kMaxLinearRows);  // an expert has a row at most once
    needs.per_thread = round_up(linear_scratch_bytes(kernels_.pairs, chunk, k));
    if (!experts->sorted) needs.per_thread += carve_gathered(chunk, k, prepare, nullptr).bytes;
    const int64_t full = assignments_of(experts->routes, experts->rows) / std::max<int64_t>(1, chunk);
    needs.parts = static_cast<size_t>(experts->routes.experts + full);
    (inputs <= kPrivateRows ? needs.input : needs.shared) = carve(inputs, k, prepare, nullptr).bytes;
  } else if (const auto* rope = std::get_if<RopeArgs>(&operation)) {
    needs.per_thread = round_up(static_cast<size_t>(rope->head_dim + 16) * (sizeof(float) + sizeof(uint16_t)));
  } else if (const auto* attention = std::get_if<AttentionArgs>(&operation)) {
    const auto& cache = static_cast<const CpuKvCache&>(*attention->cache);
    needs.per_thread = attention_scratch_floats(cache.layer(0).dim) * sizeof(float);
    needs.shared = most_split_bytes(*attention, threads_.size());
  } else if (const auto* sample = std::get_if<SampleArgs>(&operation)) {
    needs.vocab = sample->vocab;
  } else if (const auto* score = std::get_if<ScoreArgs>(&operation)) {
    needs.vocab = score->vocab;
  }
  return needs;
}

Status Executor::reserve(std::span<const Operation> operations) {
  Needs most;
  for (const Operation& operation : operations) {
    const Needs needs = needs_of(operation);
    most.per_thread = std::max(most.per_thread, needs.per_thread);
    most.input = std::max(most.input, needs.input);
    most.shared = std::max(most.shared, needs.shared);
    most.parts = std::max(most.parts, needs.parts);
    most.vocab = std::max(most.vocab, needs.vocab);
  }
  for (Mapping& scratch : scratch_) {
    if (scratch.bytes() >= most.per_thread) continue;
    NFP_ASSIGN_OR_RETURN(scratch, Mapping::create(most.per_thread));
  }
  for (Mapping& input : inputs_) {
    if (input.bytes() >= most.input) continue;
    NFP_ASSIGN_OR_RETURN(input, Mapping::create(most.input));
  }
  if (shared_.bytes() < most.shared) {
    NFP_ASSIGN_OR_RETURN(shared_, Mapping::create(most.shared));
  }
  try {  // here, as no thread of the pool may throw
    for (std::vector<ExpertRows>& parts : expert_rows_) parts.reserve(most.parts);
    for (SampleScratch& scratch : sampling_) {
      if (most.vocab > 0) scratch.reserve(most.vocab);
    }
  } catch (const std::bad_alloc&) {
    return error(ErrorCode::kResource,
                 "cannot allocate memory to sample from a vocabulary of {}, or for {} parts of experts' rows",
                 most.vocab, most.parts);
  }
  return ok_status();
}

Status Executor::run(std::span<const Operation> operations) {
  if (operations.empty()) return ok_status();
  NFP_RETURN_IF_ERROR(reserve(operations));
  using Clock = std::chrono::steady_clock;
  readers_done_.store(0, std::memory_order_relaxed);
  pieces_.restart();
  threads_.run([&](int thread) {
    Clock::time_point start;
    RunCounts counts;
    for (size_t i = 0; i < operations.size(); ++i) {
      if (profiling_ && thread == 0) start = Clock::now();
      const RmsNormArgs* norm = nullptr;
      if (fuses(operations, i)) {
        norm = &std::get<RmsNormArgs>(operations[i++]);
        normed_linear(*norm, std::get<LinearArgs>(operations[i]), thread, counts);
      } else {
        const auto call = [&](const auto& args) {
          if constexpr (requires { execute(args, thread, counts); }) {
            execute(args, thread, counts);
          } else {
            execute(args, thread);
          }
        };
        std::visit(call, operations[i]);
      }
      const Operation& operation = operations[i];
      threads_.barrier();
      if (profiling_ && thread == 0) {
        account(operation, norm, std::chrono::duration<double>(Clock::now() - start).count());
      }
    }
  });
  if (const int32_t layer = overflowed_layer_.exchange(-1, std::memory_order_relaxed); layer >= 0) {
    return error(ErrorCode::kUnsupported,
                 "layer {}: a key or value is beyond FP16's range (65504); keep the KV cache in FP32 (--dtype-kv f32, "
                 "where that can be chosen)",
                 layer);
  }
  if (const int32_t layer = infinite_layer_.exchange(-1, std::memory_order_relaxed); layer >= 0) {
    return error(
        ErrorCode::kUnsupported,
        "layer {}: a key or value is beyond FP32's range; the weights may be damaged: compare the model's files "
        "with where they came from",
        layer);
  }
  return ok_status();
}

void Executor::execute(const EmbedArgs& args, int thread) {
  const PackedWeight& table = packed(args.table);
  const BatchView& batch = args.batch;
  const Range rows = partition(batch.tokens, thread, threads_.size());
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const int32_t source = batch.token_source != nullptr ? batch.token_source[i] : -1;
    const int32_t token = source < 0 ? batch.token_ids[i] : batch.previous[source].token;
    table.read_row(token, args.scale, static_cast<float*>(args.out) + i * table.k());
  }
}

void Executor::execute(const RmsNormArgs& args, int thread) {
  const Range rows = partition(args.rows, thread, threads_.size());
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const float* x = static_cast<const float*>(args.x) + i * args.hidden;
    if (args.residual != nullptr) {
      float* sum = static_cast<float*>(args.residual) + i * args.hidden;
      kernels_.residual_add(x, sum, args.hidden, sum);
      x = sum;
    }
    if (args.out == nullptr) continue;
    kernels_.rms_norm(x, args.weight, args.eps, args.hidden, static_cast<float*>(args.out) + i * args.hidden);
  }
}

void Executor::execute(const LinearArgs& args, int thread, RunCounts& counts) {
  const Preparation prepare = preparation_of(args, kernels_);
  const auto* x = static_cast<const float*>(args.x);
  char* prepared = (args.rows <= kPrivateRows ? inputs_[static_cast<size_t>(thread)] : shared_).as<char>();
  if (prepare) {
    const bool alone = args.rows <= kPrivateRows;
    const Range rows = alone ? Range{0, args.rows} : partition(args.rows, thread, threads_.size());
    const int64_t k = args.weight->k();
    prepare_rows(prepare, kernels_, x, k, rows, carve(args.rows, k, prepare, prepared));
    if (!alone) threads_.barrier();
  }
  multiply(args, x, prepared, thread, counts);
}

void Executor::normed_linear(const RmsNormArgs& norm, const LinearArgs& linear, int thread, RunCounts& counts) {
  char* prepared = inputs_[static_cast<size_t>(thread)].as<char>();
  const Preparation prepare = preparation_of(linear, kernels_);
  const PreparedInput input = carve(linear.rows, linear.weight->k(), prepare, prepared);
  auto* normed = reinterpret_cast<float*>(prepared + input.bytes);
  const size_t size = static_cast<size_t>(norm.rows) * static_cast<size_t>(norm.hidden);
  auto* sum = reinterpret_cast<float*>(reinterpret_cast<char*>(normed) + round_up(size * sizeof(float)));
  const float* x = static_cast<const float*>(norm.x);
  if (norm.residual != nullptr) {
    kernels_.residual_add(x, static_cast<const float*>(norm.residual), static_cast<int64_t>(size), sum);
    x = sum;
    readers_done_.fetch_add(1, std::memory_order_acq_rel);
  }
  for (int64_t i = 0; i < norm.rows; ++i) {
    kernels_.rms_norm(x + i * norm.hidden, norm.weight, norm.eps, norm.hidden, normed + i * norm.hidden);
  }
  // Whoever else reads the norm's output finds it where it was asked for.
  const Range mine = partition(norm.rows, thread, threads_.size());
  if (!mine.empty()) {
    std::memcpy(static_cast<float*>(norm.out) + mine.begin * norm.hidden, normed + mine.begin * norm.hidden,
                static_cast<size_t>(mine.size() * norm.hidden) * sizeof(float));
  }
  if (prepare) prepare_rows(prepare, kernels_, normed, linear.weight->k(), Range{0, linear.rows}, input);
  multiply(linear, normed, prepared, thread, counts);
  if (norm.residual == nullptr) return;
  // By now the others have long read what is written here: this hardly ever waits, but for a thread whose CPU another
  // program has.
  constexpr int kSpins = 2000;
  counts.readers += threads_.size();
  for (int turn = 0; readers_done_.load(std::memory_order_acquire) < counts.readers; ++turn) {
    if (turn >= kSpins) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  const Range share = partition(static_cast<int64_t>(size), thread, threads_.size(), 16);
  if (!share.empty()) {
    std::memcpy(static_cast<float*>(norm.residual) + share.begin, sum + share.begin,
                static_cast<size_t>(share.size()) * sizeof(float));
  }
}

void Executor::multiply(const LinearArgs& args, const float* x, char* prepared, int thread, RunCounts& counts) {
  const PackedWeight& weight = packed(args.weight);
  const Preparation prepare = preparation_of(args, kernels_);
  const PreparedInput input = carve(args.rows, weight.k(), prepare, prepared);
  Product product;
  product.weight = &weight;
  product.rows = args.rows;
  product.x = x;
  take_prepared(input, prepare, weight.k(), 0, product);
  product.upper_only = !is_exact(args.precision);
  product.epilogue = args.epilogue;
  product.activation = args.activation;
  product.soft_cap = args.soft_cap;
  product.y = static_cast<float*>(args.y);
  const PieceList list{threads_.size()};
  bool same_x = false;
  pieces_.share(
      thread, counts.work_turns, [&](int owner) { return list.count(weight, args.rows, owner); },
      [&](int owner, int32_t index) {
        ProductPiece piece = list.piece(weight, args.rows, owner, index);
        piece.same_x = piece.same_x && same_x;
        multiply(product, piece, thread);
        same_x = true;
      });
}

void Executor::multiply(const Product& product, const ProductPiece& piece, int thread) {
  const PackedWeight& weight = *product.weight;
  const int64_t k = weight.k();
  LinearTask task;
  task.panels = weight.panels().data();
  task.first = piece.panels.begin;
  task.last = piece.panels.end;
  task.k = k;
  task.x_stride = k;
  task.upper_only = product.upper_only;
  task.epilogue = product.epilogue;
  task.activation = product.activation;
  task.soft_cap = product.soft_cap;
  task.cheap_subnormals = cheap_subnormals_;
  task.y_stride = product.epilogue == Epilogue::kGatedActivation ? weight.n() / 2 : weight.n();
  task.scratch = scratch_[static_cast<size_t>(thread)].data();
  task.next = piece.next;
  task.next_count = piece.next_count;
  task.same_x = piece.same_x && piece.rows.size() <= kMaxLinearRows;
  const int64_t words = product.upper_only ? pair_words(kernels_.pairs, k) : split_words(k);  // of x_pairs' rows
  const Range rows = piece.rows;
  for (int64_t first = rows.begin; first < rows.end; first += kMaxLinearRows) {
    task.rows = static_cast<int32_t>(std::min(kMaxLinearRows, rows.end - first));
    task.x = product.x + first * k;
    task.x_codes = product.codes != nullptr ? product.codes + first * k : nullptr;
    task.token_scale = product.token_scale != nullptr ? product.token_scale + first : nullptr;
    task.x_pairs = product.pairs != nullptr ? product.pairs + first * words : nullptr;
    task.y = product.y + first * task.y_stride;
    kernels_.linear(task);
  }
}

void Executor::execute(const GatherRowsArgs& args, int thread) {
  const Range rows = partition(args.count, thread, threads_.size());
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    std::memcpy(static_cast<float*>(args.out) + i * args.hidden,
                static_cast<const float*>(args.x) + static_cast<int64_t>(args.rows[i]) * args.hidden,
                static_cast<size_t>(args.hidden) * sizeof(float));
  }
}

void Executor::execute(const CopyArgs& args, int thread) {
  if (thread != 0) return;
  for (int32_t row = 0; row < args.rows; ++row) {
    std::memcpy(static_cast<char*>(args.dst) + static_cast<size_t>(row) * args.dst_pitch,
                static_cast<const char*>(args.src) + static_cast<size_t>(row) * args.src_pitch, args.bytes);
  }
}

void Executor::execute(const SampleArgs& args, int thread) {
  const Range rows = partition(args.rows, thread, threads_.size());
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    sample_row(kernels_, args, static_cast<int32_t>(i), sampling_[static_cast<size_t>(thread)]);
  }
  if (args.history == nullptr || (args.needs & SamplingNeeds::kPenalties) == 0) return;
  threads_.barrier();
  if (thread != 0) return;  // one thread writes the history, since rows may share a slot
  auto& history = static_cast<CpuTokenHistory&>(*args.history);
  for (int32_t row = 0; row < args.rows; ++row) {
    const int32_t slot = args.row[row].history_slot;
    if (slot >= 0) history.append(slot, args.out[row].token);
  }
}

void Executor::execute(const ScoreArgs& args, int thread) {
  const Range rows = partition(args.rows, thread, threads_.size());
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    score_row(kernels_, args, static_cast<int32_t>(i), sampling_[static_cast<size_t>(thread)]);
  }
}

void Executor::set_profiling(bool on) {
  profiling_ = on;
  times_.clear();
}

void Executor::account(const Operation& operation, const RmsNormArgs* norm, double seconds) {
  const auto add = [&](std::string_view name, const OperationCost& cost, std::optional<Precision> precision = {}) {
    times_.add(name, precision, cost, seconds);
  };
  if (const auto* linear = std::get_if<LinearArgs>(&operation)) {
    OperationCost cost = cost_of(*linear, kForm);
    if (norm != nullptr) {  // whose result is nowhere but in the threads' own inputs
      cost = cost + cost_of(*norm, kForm);
      cost.activation_bytes -= 2 * kForm.bytes(norm->rows, norm->hidden);
    }
    add(linear->stage, cost, product_precision(*linear->weight, linear->precision));
  } else if (const auto* experts = std::get_if<ExpertLinearArgs>(&operation)) {
    Precision precision = Precision::kFp16;
    for (int32_t e = 0; e < experts->routes.experts && is_exact(precision); ++e) {
      precision = product_precision(*experts->weights[e], precision_of(*experts, e));
    }
    add(experts->stage, cost_of(*experts, kForm, experts->routes.start), precision);
  } else if (const auto* attention = std::get_if<AttentionArgs>(&operation)) {
    const BatchView& batch = attention->batch;
    add(batch.single == batch.sequences ? stage::kDecodeAttention : stage::kPrefillAttention,
        cost_of(*attention, kForm, {batch.query_start, batch.context}, 0, batch.sequences));
  } else if (const auto* rms_norm = std::get_if<RmsNormArgs>(&operation)) {
    add(stage_of(*rms_norm, kForm), cost_of(*rms_norm, kForm));
  } else if (const auto* embed = std::get_if<EmbedArgs>(&operation)) {
    add(stage::kEmbed, cost_of(*embed, kForm));
  } else if (const auto* rope = std::get_if<RopeArgs>(&operation)) {
    add(stage::kRope, cost_of(*rope, kForm));
  } else if (const auto* route = std::get_if<RouteArgs>(&operation)) {
    add(stage::kRoute, cost_of(*route, kForm));
  } else if (const auto* combine = std::get_if<CombineExpertsArgs>(&operation)) {
    add(stage::kCombine, cost_of(*combine, kForm));
  } else if (const auto* gather = std::get_if<GatherRowsArgs>(&operation)) {
    add(stage::kGatherRows, cost_of(*gather, kForm));
  } else if (const auto* sample = std::get_if<SampleArgs>(&operation)) {
    add(stage::kSample, cost_of(*sample));
  } else if (const auto* score = std::get_if<ScoreArgs>(&operation)) {
    add(stage::kScore, cost_of(*score));
  } else if (const auto* copy = std::get_if<CopyArgs>(&operation)) {
    add(stage::kCopy, cost_of(*copy));
  }
}

}  // namespace nfp::cpu
