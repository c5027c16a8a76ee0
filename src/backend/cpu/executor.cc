#include "backend/cpu/executor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <thread>

#include "backend/cpu/kv_cache.h"
#include "backend/cpu/packed_weight.h"
#include "backend/cpu/token_history.h"

namespace nfp::cpu {

// Few items with long contexts keep few threads busy, so partitions of their keys become the pieces of work, and their
// results are merged afterwards: in the same order as in one piece, hence with the same bits.
struct AttentionSplit {
  int32_t items = 0;
  int32_t partitions = 0;  // of the longest context; 0 = not worth it
  size_t state_floats = 0;
  explicit operator bool() const { return partitions > 1; }
  size_t bytes() const { return static_cast<size_t>(items) * static_cast<size_t>(partitions) * state_floats * 4; }
};

// Rows of prepared inputs times one weight.
struct Product {
  const PackedWeight* weight = nullptr;
  int32_t rows = 0;
  const float* x = nullptr;  // [rows, k]; the next as LinearTask has them
  const uint32_t* pairs = nullptr;
  const float* codes = nullptr;
  const float* token_scale = nullptr;
  bool upper_only = false;
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;
  float soft_cap = 0.0f;
  float* y = nullptr;
};

// What one thread computes at a time: panels of a product, or all of them with some of the rows.
struct ProductPiece {
  Range panels;
  Range rows;
  const Panel* next = nullptr;  // panels that are multiplied after it, by few rows
  int64_t next_count = 0;
  bool same_x = true;  // as the product's other pieces
};

namespace {

constexpr ActivationForm kForm{.feature_bytes = sizeof(float)};  // what products round stays with them

constexpr size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

const PackedWeight& packed(const LinearWeight* weight) { return static_cast<const PackedWeight&>(*weight); }

// Up to so many rows every thread prepares the input of a matrix product for itself.
constexpr int32_t kPrivateRows = 4;

// From so many rows a thread on, threads share the rows of a matrix product instead of its columns: each unpacks all
// weights, but reads and writes rows that stay in its own cache.
constexpr int32_t kRowsToShare = 128;

// How a product is cut into pieces: each thread's share of the panels into pieces of about kPieceWeights weights, or,
// where threads share rows, all of its rows.
struct PieceList {
  static constexpr int64_t kPieceWeights = 1 << 17;
  int threads;

  bool by_rows(int32_t rows) const { return rows >= kRowsToShare * threads; }
  static int64_t panels_a_piece(const PackedWeight& weight) {
    return std::max<int64_t>(1, kPieceWeights / (weight.k() * kPanelRows * kGroupPanels)) * kGroupPanels;
  }
  int32_t count(const PackedWeight& weight, int32_t rows, int owner) const {
    if (by_rows(rows)) return 1;
    const int64_t each = panels_a_piece(weight);
    return static_cast<int32_t>((weight.share(owner, threads).size() + each - 1) / each);
  }
  ProductPiece piece(const PackedWeight& weight, int32_t rows, int owner, int32_t index) const {
    if (by_rows(rows)) return {weight.share(0, 1), partition(rows, owner, threads), nullptr, 0, false};
    const Range mine = weight.share(owner, threads);
    const int64_t each = panels_a_piece(weight), begin = mine.begin + index * each;
    const int64_t end = std::min(begin + each, mine.end);
    const bool last = end == mine.end;
    return {{begin, end}, {0, rows}, last ? nullptr : weight.panels().data() + end, last ? 0 : mine.end - end};
  }
};

// Whether the norm may be computed on the way into the product that follows it.
bool fuses(std::span<const Operation> operations, size_t i) {
  if (i + 1 >= operations.size()) return false;
  const auto* norm = std::get_if<RmsNormArgs>(&operations[i]);
  const auto* linear = std::get_if<LinearArgs>(&operations[i + 1]);
  return norm != nullptr && linear != nullptr && norm->out != nullptr && linear->x == norm->out &&
         linear->rows == norm->rows && norm->rows <= kPrivateRows && linear->y != norm->x && linear->y != norm->out &&
         linear->y != norm->residual;
}

// What a linear operation does to its input before the panels see it.
struct Preparation {
  PairArithmetic pairs = PairArithmetic::kNone;  // KernelTable::to_pairs
  bool codes = false;                            // E4M3 with a scale a token
  bool scales = false;                           // of tokens
  bool has_pairs() const { return pairs != PairArithmetic::kNone; }
  int64_t pair_words(int64_t k) const { return cpu::pair_words(pairs, k); }  // of a row
  explicit operator bool() const { return has_pairs() || codes; }
};

Preparation preparation_of(Precision precision, const PackedWeight& weight, const KernelTable& kernels) {
  Preparation p;
  const bool upper = !is_exact(precision) && weight.holds_nested();
  p.codes = upper && precision == Precision::kFp8W8A8;
  if (upper) p.pairs = kernels.pairs;
  p.scales = p.codes || (upper && kernels.pairs == PairArithmetic::kFp16);
  return p;
}
Preparation preparation_of(const LinearArgs& args, const KernelTable& kernels) {
  return preparation_of(args.precision, packed(args.weight), kernels);
}

Precision precision_of(const ExpertLinearArgs& args, int32_t expert) {
  return args.is_exact(expert) ? Precision::kFp16 : args.precision;
}

// Of any expert: those that need less find what they need in it.
Preparation preparation_of(const ExpertLinearArgs& args, const KernelTable& kernels) {
  Preparation all;
  for (int32_t e = 0; e < args.routes.experts && !is_exact(args.precision); ++e) {
    const Preparation one = preparation_of(precision_of(args, e), packed(args.weights[e]), kernels);
    all.codes = all.codes || one.codes;
    if (one.has_pairs()) all.pairs = one.pairs;
    all.scales = all.scales || one.scales;
  }
  return all;
}

int32_t assignments_of(const ExpertRoutes& routes, int32_t rows) { return routes.top * rows; }

struct PreparedInput {
  uint32_t* pairs;     // [rows, pair_words(k)]
  float* codes;        // [rows, k]
  float* token_scale;  // [rows]
  size_t bytes;
};

PreparedInput carve(int64_t rows_of_x, int64_t cols, const Preparation& p, void* base) {
  auto* at = static_cast<char*>(base);
  const auto rows = static_cast<size_t>(rows_of_x), k = static_cast<size_t>(cols);
  size_t used = 0;
  const auto take = [&](bool wanted, size_t bytes) -> char* {
    if (!wanted) return nullptr;
    char* piece = at == nullptr ? nullptr : at + used;
    used += round_up(bytes);
    return piece;
  };
  PreparedInput input{};
  input.pairs = reinterpret_cast<uint32_t*>(take(p.has_pairs(), rows * static_cast<size_t>(p.pair_words(cols)) * 4));
  input.codes = reinterpret_cast<float*>(take(p.codes, rows * k * 4));
  input.token_scale = reinterpret_cast<float*>(take(p.scales, rows * 4));
  input.bytes = used;
  return input;
}

// Rounds rows of x [*, k] into `input`.
void prepare_rows(const Preparation& p, const KernelTable& kernels, const float* x, int64_t k, Range rows,
                  const PreparedInput& input) {
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    float scale = 1.0f;
    if (p.codes) scale = kernels.quantize_e4m3(x + i * k, k, input.codes + i * k);
    if (p.has_pairs()) {
      scale *= kernels.to_pairs(p.codes ? input.codes + i * k : x + i * k, k, input.pairs + i * p.pair_words(k));
    }
    if (p.scales) input.token_scale[i] = scale;
  }
}

// The rows of one expert, brought together.
struct GatheredInput {
  float* x;
  PreparedInput prepared;
  size_t bytes;
};
GatheredInput carve_gathered(int64_t rows, int64_t k, const Preparation& p, void* base) {
  const size_t plain = round_up(static_cast<size_t>(rows * k) * sizeof(float));
  GatheredInput input{};
  input.x = static_cast<float*>(base);
  input.prepared = carve(rows, k, p, base == nullptr ? nullptr : static_cast<char*>(base) + plain);
  input.bytes = plain + input.prepared.bytes;
  return input;
}

// Into how many tiles the rows of a chunk are cut, at least `least`: each thread takes every so many-th item, a tile of
// a kv head, and where there are few items one more or less decides how long all wait. 16 tokens of three kv heads on
// two threads are two items against one, or three against three of half the size.
int32_t balanced_tiles(int32_t tokens, int32_t group, int32_t least, int32_t kv_heads, int threads) {
  constexpr int32_t kWideningRows = 12;  // a tile's keys and values are widened in the time of about so many rows
  constexpr int32_t kManyItems = 16;     // a thread: one more hardly matters
  int32_t best = least, best_cost = std::numeric_limits<int32_t>::max();
  if (threads == 1 || least * kv_heads > kManyItems * threads) return best;
  for (int32_t tiles = least; tiles <= std::min(2 * least, tokens); ++tiles) {
    const int32_t items = (tiles * kv_heads + threads - 1) / threads;  // of the thread that has most
    const int32_t cost = items * (kWideningRows + (tokens + tiles - 1) / tiles * group);
    if (cost < best_cost) best = tiles, best_cost = cost;
  }
  return best;
}

// Calls f(sequence, kv head, first row, row count) for each piece of attention work. A row is a (token, query head of
// the kv head) pair, token-major.
template <typename F>
void for_each_attention_item(const AttentionArgs& args, int threads, F f) {
  const int32_t group = args.heads / args.kv_heads;
  for (int32_t s = 0; s < args.batch.sequences; ++s) {
    const int32_t tokens = args.batch.query_start[s + 1] - args.batch.query_start[s], rows = tokens * group;
    const int32_t most = std::max(kMaxQueryRows / group * group, std::min(group, kMaxQueryRows));
    const int32_t least = (rows + most - 1) / most;
    const int32_t tiles = tokens > least ? balanced_tiles(tokens, group, least, args.kv_heads, threads) : least;
    for (int32_t tile = 0; tile < tiles; ++tile) {
      // Whole tokens, as nearly as many in each; a token with more heads than a tile has rows is cut.
      const auto bound = [&](int32_t t) {
        return tiles > tokens ? std::min(rows, t * most) : static_cast<int32_t>(int64_t{tokens} * t / tiles) * group;
      };
      const int32_t first = bound(tile), end = bound(tile + 1);
      for (int32_t head = 0; head < args.kv_heads; ++head) f(s, head, first, end - first);
    }
  }
}

// Points `task` at an item, whose rows, keys and results lie where the batch says.
void set_item(const AttentionArgs& args, int32_t s, int32_t head, int32_t first, int32_t count, QueryRow* rows,
              AttentionTask& task) {
  const int64_t dim = args.head_dim;
  const int64_t q_stride = (args.heads + 2 * args.kv_heads) * dim;
  const int32_t group = args.heads / args.kv_heads;
  for (int32_t r = 0; r < count; ++r) {
    const int64_t token = args.batch.query_start[s] + (first + r) / group;
    const int64_t q_head = head * group + (first + r) % group;
    const int32_t position = args.batch.positions[token];
    rows[r] = {static_cast<const float*>(args.qkv) + token * q_stride + q_head * dim,
               static_cast<float*>(args.out) + (token * args.heads + q_head) * dim,
               args.window > 0 ? std::max(0, position - args.window + 1) : 0, position + 1};
  }
  task.blocks = args.batch.block_table + static_cast<int64_t>(s) * args.batch.table_width;
  task.kv_head = head;
  task.rows = rows;
  task.row_count = count;
}

AttentionTask attention_task(const AttentionArgs& args, float* scratch) {
  AttentionTask task;
  task.layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  task.head_dim = args.head_dim;
  task.scale = args.scale;
  task.soft_cap = args.soft_cap;
  task.scratch = scratch;
  return task;
}

constexpr int32_t kMaxSplitRows = 8;  // an item's: a decode step's
constexpr int32_t kMaxSplitPartitions = 1024;

AttentionSplit split_of(const AttentionArgs& args, int threads) {
  AttentionSplit split;
  int32_t rows = 0, longest = 0;
  for_each_attention_item(args, threads, [&](int32_t s, int32_t, int32_t, int32_t count) {
    ++split.items;
    rows = std::max(rows, count);
    longest = std::max(longest, args.batch.positions[args.batch.query_start[s + 1] - 1] + 1);
  });
  const KvLayer layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  const int32_t partitions = (longest + partition_keys(layer) - 1) / partition_keys(layer);
  if (threads > 1 && rows <= kMaxSplitRows && split.items < 4 * threads && partitions <= kMaxSplitPartitions) {
    split.partitions = partitions;
    split.state_floats = attention_state_floats(kMaxSplitRows, layer.dim);
  }
  return split;
}

// What any split of these arguments may need. It is asked before the operations run, so the batch's arrays may still be
// those of another step: a copy among the operations fills them.
size_t most_split_bytes(const AttentionArgs& args, int threads) {
  if (threads <= 1) return 0;
  const KvLayer layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  const int64_t keys = int64_t{args.batch.table_width} * layer.block_size;
  const int64_t partitions = (keys + partition_keys(layer) - 1) / partition_keys(layer);
  AttentionSplit split;
  split.items = 4 * threads - 1;
  split.partitions = static_cast<int32_t>(std::min<int64_t>(partitions, kMaxSplitPartitions));
  split.state_floats = attention_state_floats(kMaxSplitRows, layer.dim);
  return split.bytes();
}

bool all_finite(const uint16_t* halves, int64_t count) {
  constexpr uint16_t kInfinity = 0x7c00;
  uint32_t beyond = 0;
  for (int64_t i = 0; i < count; ++i) beyond |= (halves[i] & kInfinity) == kInfinity ? 1u : 0u;
  return beyond == 0;
}

bool all_finite(const float* values, int64_t count) {
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t beyond = 0;
  for (int64_t i = 0; i < count; ++i) {
    beyond |= (std::bit_cast<uint32_t>(values[i]) & kInfinity) == kInfinity ? 1u : 0u;
  }
  return beyond == 0;
}

// A row's experts go to routes.place until sort_assignments puts assignments there.
void choose_experts(const RouteArgs& args, int64_t row, const KernelTable& kernels) {
  const ExpertRoutes& routes = args.routes;
  const float* logits = args.logits + row * routes.experts;
  int32_t* chosen = routes.place + row * routes.top;
  float* weight = routes.weight + row * routes.top;
  // The likeliest so far, in order; of equals the first expert is before the others, and what is no number is last.
  int32_t found = 0;
  const auto is_before = [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (std::isnan(logits[b]) && !std::isnan(logits[a]));
  };
  for (int32_t e = 0; e < routes.experts; ++e) {
    if (found == routes.top && !is_before(e, chosen[found - 1])) continue;
    int32_t at = found < routes.top ? found++ : found - 1;
    for (; at > 0 && is_before(e, chosen[at - 1]); --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  std::array<float, kMaxExperts> powers;
  const float most = logits[chosen[0]];
  kernels.exps(logits, routes.experts, most, 1.0f, powers.data());
  float sum = 0;
  if (args.renormalise) {
    for (int32_t i = 0; i < routes.top; ++i) sum += powers[static_cast<size_t>(chosen[i])];
  } else {
    for (int32_t e = 0; e < routes.experts; ++e) sum += powers[static_cast<size_t>(e)];
  }
  for (int32_t i = 0; i < routes.top; ++i) weight[i] = powers[static_cast<size_t>(chosen[i])] / sum;
}

// By counting.
void sort_assignments(const ExpertRoutes& routes, int32_t rows) {
  const int32_t count = assignments_of(routes, rows);
  std::fill_n(routes.start, routes.experts + 1, 0);
  for (int32_t i = 0; i < count; ++i) ++routes.start[routes.place[i] + 1];
  for (int32_t e = 0; e < routes.experts; ++e) routes.start[e + 1] += routes.start[e];
  std::array<int32_t, kMaxExperts> next;
  std::copy_n(routes.start, routes.experts, next.begin());
  for (int32_t i = 0; i < count; ++i) {
    const int32_t at = next[static_cast<size_t>(routes.place[i])]++;
    routes.row[at] = i / routes.top;
    routes.place[i] = at;
  }
}

void gather_row(const Preparation& wants, const float* x, const PreparedInput& from, int64_t row, int64_t k,
                const GatheredInput& to, int64_t at) {
  const auto copy = [&](auto* out, const auto* in, int64_t size) {
    std::memcpy(out + at * size, in + row * size, static_cast<size_t>(size) * sizeof(*in));
  };
  copy(to.x, x, k);
  if (wants.codes) copy(to.prepared.codes, from.codes, k);
  if (wants.scales) copy(to.prepared.token_scale, from.token_scale, 1);
  if (wants.has_pairs()) copy(to.prepared.pairs, from.pairs, wants.pair_words(k));
}

}  // namespace

Executor::Executor(const KernelTable& kernels, ThreadPool& threads)
    : kernels_(kernels),
      threads_(threads),
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
  if (most.vocab > 0) {
    try {
      for (SampleScratch& scratch : sampling_) scratch.reserve(most.vocab);
    } catch (const std::bad_alloc&) {
      return error(ErrorCode::kResource, "cannot allocate memory to sample from a vocabulary of {}", most.vocab);
    }
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
                 "where the verb has it)",
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
  // By now the others have long read what is written here: this hardly ever waits.
  counts.readers += threads_.size();
  while (readers_done_.load(std::memory_order_acquire) < counts.readers) std::this_thread::yield();
  const Range share = partition(static_cast<int64_t>(size), thread, threads_.size(), 16);
  if (!share.empty()) {
    std::memcpy(static_cast<float*>(norm.residual) + share.begin, sum + share.begin,
                static_cast<size_t>(share.size()) * sizeof(float));
  }
}

void Executor::multiply(const LinearArgs& args, const float* x, char* prepared, int thread, RunCounts& counts) {
  const PackedWeight& weight = packed(args.weight);
  const PreparedInput input = carve(args.rows, weight.k(), preparation_of(args, kernels_), prepared);
  const Product product{&weight,
                        args.rows,
                        x,
                        input.pairs,
                        input.codes,
                        input.token_scale,
                        !is_exact(args.precision),
                        args.epilogue,
                        args.activation,
                        args.soft_cap,
                        static_cast<float*>(args.y)};
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
  const Range rows = piece.rows;
  for (int64_t first = rows.begin; first < rows.end; first += kMaxLinearRows) {
    task.rows = static_cast<int32_t>(std::min(kMaxLinearRows, rows.end - first));
    task.x = product.x + first * k;
    task.x_codes = product.codes != nullptr ? product.codes + first * k : nullptr;
    task.token_scale = product.token_scale != nullptr ? product.token_scale + first : nullptr;
    task.x_pairs = product.pairs != nullptr ? product.pairs + first * pair_words(kernels_.pairs, k) : nullptr;
    task.y = product.y + first * task.y_stride;
    kernels_.linear(task);
  }
}

void Executor::execute(const RopeArgs& args, int thread) {
  const KvLayer layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  const int64_t all_heads = args.heads + 2 * args.kv_heads;
  const int64_t dim = args.head_dim;
  auto* rotated = scratch_[static_cast<size_t>(thread)].as<float>();
  auto* narrow = reinterpret_cast<uint8_t*>(rotated + dim + 16);  // the head as the cache holds it
  if (args.norm_spans_heads) {
    const Range tokens = partition(args.batch.tokens, thread, threads_.size());
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      float* q = static_cast<float*>(args.qkv) + t * all_heads * dim;
      float* k = q + args.heads * dim;
      if (args.q_norm != nullptr) kernels_.rms_norm(q, args.q_norm, args.norm_eps, args.heads * dim, q);
      if (args.k_norm != nullptr) kernels_.rms_norm(k, args.k_norm, args.norm_eps, args.kv_heads * dim, k);
    }
    threads_.barrier();
  }
  const float* q_norm = args.norm_spans_heads ? nullptr : args.q_norm;
  const float* k_norm = args.norm_spans_heads ? nullptr : args.k_norm;
  const Range items = partition(args.batch.tokens * all_heads, thread, threads_.size());
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t token = item / all_heads;
    const auto head = static_cast<int32_t>(item % all_heads);
    float* x = static_cast<float*>(args.qkv) + item * dim;
    const bool is_query = head < args.heads;
    const bool is_value = head >= args.heads + args.kv_heads;
    if (!is_value) {
      const float* cos = args.cos_sin + int64_t{args.batch.positions[token]} * args.rotary_dim;
      kernels_.rope({x, cos, cos + args.rotary_dim / 2, is_query ? q_norm : k_norm, args.norm_eps, args.head_dim,
                     args.rotary_dim, is_query ? x : rotated});
      if (is_query) continue;
    }
    const int64_t slot = args.batch.slots[token];
    const int64_t block = slot / layer.block_size, place = slot % layer.block_size;
    const int64_t kv_head = head - args.heads - (is_value ? args.kv_heads : 0);
    const int64_t base = block * layer.kv_heads + kv_head;
    const float* source = is_value ? x : rotated;
    const auto write = [&](auto* cache, const auto* row) {
      if (is_value) {
        std::memcpy(cache + (base * layer.block_size + place) * layer.dim, row,
                    static_cast<size_t>(dim) * sizeof(*row));
      } else {
        auto* column = cache + (base * layer.lane_groups + place / 16) * layer.dim * 16 + place % 16;
        for (int64_t d = 0; d < dim; ++d) column[d * 16] = row[d];
      }
    };
    void* cache = const_cast<void*>(is_value ? layer.values : layer.keys);
    if (layer.dtype != DType::kF16 && !all_finite(source, dim)) {
      infinite_layer_.store(args.layer, std::memory_order_relaxed);
    }
    if (layer.dtype == DType::kF16) {
      auto* halves = reinterpret_cast<uint16_t*>(narrow);
      kernels_.to_f16(source, dim, halves);
      if (!all_finite(halves, dim)) overflowed_layer_.store(args.layer, std::memory_order_relaxed);
      write(static_cast<uint16_t*>(cache), halves);
    } else if (layer.dtype == DType::kF8E4M3) {
      kernels_.to_e4m3(source, dim, narrow);
      write(static_cast<uint8_t*>(cache), narrow);
    } else {
      write(static_cast<float*>(cache), source);
    }
  }
}

void Executor::execute(const AttentionArgs& args, int thread) {
  if (const AttentionSplit split = split_of(args, threads_.size())) return split_attention(args, split, thread);
  AttentionTask task = attention_task(args, scratch_[static_cast<size_t>(thread)].as<float>());
  std::array<QueryRow, kMaxQueryRows> rows;
  int64_t item = 0;
  for_each_attention_item(args, threads_.size(), [&](int32_t s, int32_t head, int32_t first, int32_t count) {
    if (item++ % threads_.size() != thread) return;
    set_item(args, s, head, first, count, rows.data(), task);
    kernels_.attention(task);
  });
}

void Executor::split_attention(const AttentionArgs& args, const AttentionSplit& split, int thread) {
  AttentionTask task = attention_task(args, scratch_[static_cast<size_t>(thread)].as<float>());
  std::array<QueryRow, kMaxQueryRows> rows;
  const int32_t keys = partition_keys(task.layer);
  const auto state = [&](int64_t item, int32_t partition) {
    return shared_.as<float>() + (item * split.partitions + partition) * static_cast<int64_t>(split.state_floats);
  };
  // Calls f(item, its first partition, the one after its last) with `task` set to the item.
  const auto for_each_item = [&](auto f) {
    int64_t item = 0;
    for_each_attention_item(args, threads_.size(), [&](int32_t s, int32_t head, int32_t first, int32_t count) {
      set_item(args, s, head, first, count, rows.data(), task);
      const int32_t begin = rows[0].begin;  // later rows begin and end later
      const int32_t end = rows[static_cast<size_t>(count) - 1].end;
      f(item++, begin / keys, (end - 1) / keys + 1);
    });
  };
  int64_t piece = 0;
  for_each_item([&](int64_t item, int32_t begin, int32_t end) {
    for (int32_t p = begin; p < end; ++p) {
      if (piece++ % threads_.size() == thread) kernels_.attention_partition(task, p, state(item, p));
    }
  });
  threads_.barrier();
  std::array<const float*, kMaxSplitPartitions> states;
  for_each_item([&](int64_t item, int32_t begin, int32_t end) {
    if (item % threads_.size() != thread) return;
    for (int32_t p = begin; p < end; ++p) states[static_cast<size_t>(p - begin)] = state(item, p);
    kernels_.attention_merge(task, states.data(), end - begin);
  });
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

// ---- experts -------------------------------------------------------------------------------------------------------

void Executor::execute(const RouteArgs& args, int thread) {
  const ExpertRoutes& routes = args.routes;
  const int64_t experts = routes.experts, hidden = args.hidden;
  const auto* x = static_cast<const float*>(args.x);
  // A few experts at a time, whose weights then stay in L1 for all rows.
  constexpr int64_t kExpertsAtOnce = 8;
  const bool by_rows = args.rows >= threads_.size();
  const Range tokens = by_rows ? partition(args.rows, thread, threads_.size()) : Range{0, args.rows};
  const Range mine = by_rows ? Range{0, experts} : partition(experts, thread, threads_.size());
  for (int64_t first = mine.begin; first < mine.end; first += kExpertsAtOnce) {
    kernels_.dots(x + tokens.begin * hidden, tokens.size(), args.router + first * hidden,
                  std::min(kExpertsAtOnce, mine.end - first), hidden, args.logits + tokens.begin * experts + first,
                  experts);
  }
  threads_.barrier();
  const Range rows = partition(args.rows, thread, threads_.size());
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    choose_experts(args, r, kernels_);
    if (args.shared_gate == nullptr) continue;
    float gate = 0;
    kernels_.dots(x + r * hidden, 1, args.shared_gate, 1, hidden, &gate, 1);
    gate = -gate;
    float power = 0;
    kernels_.exps(&gate, 1, 0.0f, 1.0f, &power);
    args.shared_weight[r] = 1.0f / (1.0f + power);
  }
  threads_.barrier();
  if (thread == 0) sort_assignments(routes, args.rows);
}

void Executor::execute(const ExpertLinearArgs& args, int thread, RunCounts& counts) {
  const ExpertRoutes& routes = args.routes;
  const int64_t k = args.weights[0]->k();
  const Preparation prepare = preparation_of(args, kernels_);
  const int32_t inputs = args.sorted ? assignments_of(routes, args.rows) : args.rows;
  const auto* x = static_cast<const float*>(args.x);
  const bool alone = inputs <= kPrivateRows;
  const PreparedInput all =
      carve(inputs, k, prepare, prepare ? (alone ? inputs_[static_cast<size_t>(thread)] : shared_).data() : nullptr);
  if (prepare) {
    const Range rows = alone ? Range{0, inputs} : partition(inputs, thread, threads_.size());
    prepare_rows(prepare, kernels_, x, k, rows, all);
    if (!alone) threads_.barrier();
  }
  // Rows of an expert, prepared for it, from row `row` of x on.
  const auto product_of = [&](int32_t expert, const float* plain, const PreparedInput& prepared, int64_t row) {
    const PackedWeight& weight = packed(args.weights[expert]);
    const Precision precision = precision_of(args, expert);
    const Preparation wants = preparation_of(precision, weight, kernels_);
    Product product;
    product.weight = &weight;
    product.x = plain + row * k;
    product.pairs = wants.has_pairs() ? prepared.pairs + row * wants.pair_words(k) : nullptr;
    product.codes = wants.codes ? prepared.codes + row * k : nullptr;
    product.token_scale = wants.scales ? prepared.token_scale + row : nullptr;
    product.upper_only = !is_exact(precision);
    product.epilogue = args.epilogue;
    product.activation = args.activation;
    return product;
  };
  const int64_t n = args.weights[0]->n();
  const int64_t stride = args.epilogue == Epilogue::kGatedActivation ? n / 2 : n;
  const int64_t chunk = std::min<int64_t>(args.rows, kMaxLinearRows);
  char* scratch =
      scratch_[static_cast<size_t>(thread)].as<char>() + round_up(linear_scratch_bytes(kernels_.pairs, chunk, k));
  std::vector<ExpertRows>& parts = expert_rows_[static_cast<size_t>(thread)];
  parts.clear();
  for (int32_t e = 0; e < routes.experts; ++e) {
    for (int32_t first = routes.start[e]; first < routes.start[e + 1]; first += static_cast<int32_t>(chunk)) {
      parts.push_back({e, first, std::min(static_cast<int32_t>(chunk), routes.start[e + 1] - first)});
    }
  }
  // Every other thread begins with the experts that have few rows: while one thread reads as fast as it can, what it
  // multiplies being little, the next one is busy multiplying.
  std::sort(parts.begin(), parts.end(), [](const ExpertRows& a, const ExpertRows& b) {
    return a.count != b.count ? a.count > b.count : a.first < b.first;
  });
  const PieceList list{threads_.size()};
  const auto part_of = [&](size_t i, int owner) { return owner % 2 == 0 ? i : parts.size() - 1 - i; };
  const auto pieces_of = [&](size_t part, int owner) {
    return list.count(packed(args.weights[parts[part].expert]), parts[part].count, owner);
  };
  Product product;
  size_t at = 0, multiplied = parts.size();  // in the owner's order; the last piece's part
  int32_t first_piece = 0;                   // of the part there
  int last_owner = -1;
  const auto work = [&](int owner, int32_t index) {
    if (owner != last_owner) at = 0, first_piece = 0, last_owner = owner;
    for (int32_t count; index - first_piece >= (count = pieces_of(part_of(at, owner), owner)); ++at) {
      first_piece += count;
    }
    const size_t part = part_of(at, owner);
    const ExpertRows& rows = parts[part];
    const PackedWeight& weight = packed(args.weights[rows.expert]);
    ProductPiece piece = list.piece(weight, rows.count, owner, index - first_piece);
    if (piece.next == nullptr && at + 1 < parts.size()) {
      const PackedWeight& next = packed(args.weights[parts[part_of(at + 1, owner)].expert]);
      const Range panels = next.share(owner, threads_.size());
      piece.next = next.panels().data() + panels.begin;
      piece.next_count = panels.size();
    }
    piece.same_x = piece.same_x && part == multiplied;
    if (part != multiplied) {
      const int32_t* from = routes.row + rows.first;
      // Rows are in order: so they are neighbours where the last is as far from the first.
      if (args.sorted || from[rows.count - 1] - from[0] == rows.count - 1) {
        product = product_of(rows.expert, x, all, args.sorted ? rows.first : from[0]);
      } else {
        const Preparation wants = preparation_of(precision_of(args, rows.expert), weight, kernels_);
        const GatheredInput gathered = carve_gathered(rows.count, k, wants, scratch);
        for (int32_t i = 0; i < rows.count; ++i) {
          gather_row(wants, x, all, from[i], k, gathered, i);
        }
        product = product_of(rows.expert, gathered.x, gathered.prepared, 0);
      }
      product.rows = rows.count;
      product.y = static_cast<float*>(args.y) + rows.first * stride;
      multiplied = part;
    }
    multiply(product, piece, thread);
  };
  const auto count = [&](int owner) {
    int32_t pieces = 0;
    for (size_t i = 0; i < parts.size(); ++i) pieces += pieces_of(i, owner);
    return pieces;
  };
  pieces_.share(thread, counts.work_turns, count, work);
}

void Executor::execute(const CombineExpertsArgs& args, int thread) {
  const ExpertRoutes& routes = args.routes;
  const auto* x = static_cast<const float*>(args.x);
  const int64_t hidden = args.hidden;
  // Of few rows a thread takes some of the columns.
  const bool by_columns = args.rows < threads_.size();
  const Range rows = by_columns ? Range{0, args.rows} : partition(args.rows, thread, threads_.size());
  const Range columns = by_columns ? partition(hidden, thread, threads_.size(), 16) : Range{0, hidden};
  if (columns.empty()) return;
  std::array<const float*, kMaxTopExperts + 1> parts;
  std::array<float, kMaxTopExperts + 1> weights;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    int32_t count = 0;
    const auto add = [&](const float* row, float weight) {
      parts[static_cast<size_t>(count)] = row + columns.begin;
      weights[static_cast<size_t>(count++)] = weight;
    };
    for (int64_t i = r * routes.top; i < (r + 1) * routes.top; ++i) {
      add(x + int64_t{routes.place[i]} * hidden, routes.weight[i]);
    }
    if (args.shared != nullptr) {
      add(static_cast<const float*>(args.shared) + r * hidden,
          args.shared_weight != nullptr ? args.shared_weight[r] : 1.0f);
    }
    kernels_.weighted_sum(parts.data(), weights.data(), count, columns.size(),
                          static_cast<float*>(args.out) + r * hidden + columns.begin);
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
