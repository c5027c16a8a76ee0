// Mixtures of experts: routes, the products of an expert's rows, and their weighted sum.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cpu/executor.h"
#include "backend/cpu/executor_parts.h"

namespace nfp::cpu {
namespace {

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

// What the product of `weight` reads of it.
void gather_row(const Preparation& wants, const PackedWeight& weight, const float* x, const PreparedInput& from,
                int64_t row, const GatheredInput& to, int64_t at) {
  const int64_t k = weight.k();
  const auto copy = [&](auto* out, const auto* in, int64_t size) {
    std::memcpy(out + at * size, in + row * size, static_cast<size_t>(size) * sizeof(*in));
  };
  if (!wants.split && (weight.holds_dense() || !wants.has_pairs())) copy(to.x, x, k);
  if (wants.codes && !wants.has_pairs()) copy(to.prepared.codes, from.codes, k);
  if (wants.scales) copy(to.prepared.token_scale, from.token_scale, 1);
  if (wants.has_pairs()) copy(to.prepared.pairs, from.pairs, wants.pair_words(k));
  if (wants.split) {
    copy(to.prepared.split, from.split, split_words(k));
    copy(to.prepared.split_scale, from.split_scale, 1);
  }
}

// What a matrix is, which no cache holds when its turn comes; not its panels.
void ask_for(const PackedWeight& weight) {
  for (size_t at = 0; at < sizeof(weight); at += 64) __builtin_prefetch(reinterpret_cast<const char*>(&weight) + at);
}

// Which parts of the experts' rows, most rows first, are whose, and in which order. Where there are many with few rows
// each thread has some to itself: beginning with an expert costs time, and half of its panels end a stream of weights
// twice as often. Else, and where threads are on several memory nodes, each thread has its share of every expert.
class PartOrder {
 public:
  PartOrder(const std::vector<ExpertRows>& parts, int threads, int nodes)
      : parts_(parts.size()),
        threads_(threads),
        whole_(nodes == 1 && parts.size() >= 2 * static_cast<size_t>(threads) && parts.front().count < kRowsToShare) {}

  size_t count(int owner) const {
    if (!whole_) return parts_;
    return (parts_ + static_cast<size_t>(threads_ - 1 - owner)) / static_cast<size_t>(threads_);
  }
  // Every other thread begins with the experts that have few rows: while one thread reads as fast as it can, what it
  // multiplies being little, the next one is busy multiplying.
  size_t part(size_t i, int owner) const {
    const size_t at = owner % 2 == 0 ? i : count(owner) - 1 - i;
    return whole_ ? at * static_cast<size_t>(threads_) + static_cast<size_t>(owner) : at;
  }
  PieceList pieces() const { return whole_ ? PieceList{1, 2 * PieceList::kPieceWeights} : PieceList{threads_}; }
  // Whose share of an expert is owner's.
  int sharer(int owner) const { return whole_ ? 0 : owner; }

 private:
  size_t parts_;
  int threads_;
  bool whole_;
};

}  // namespace

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
    Product product;
    product.weight = &weight;
    product.x = plain + row * k;
    take_prepared(prepared, preparation_of(precision, weight, kernels_), k, row, product);
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
  std::sort(parts.begin(), parts.end(), [](const ExpertRows& a, const ExpertRows& b) {
    return a.count != b.count ? a.count > b.count : a.first < b.first;
  });
  const PartOrder order(parts, threads_.size(), nodes_);
  const PieceList list = order.pieces();
  // Experts are all of one size: so one is looked at, and once for an owner (measured: half a per cent of a step).
  int counted = -1;  // whose pieces of an expert are `each`
  int32_t each = 0;
  const auto pieces_of = [&](size_t part, int owner) {
    if (list.by_rows(parts[part].count)) return 1;
    if (owner != counted) each = list.count(packed(args.weights[0]), 1, order.sharer(owner)), counted = owner;
    return each;
  };
  Product product;
  size_t at = 0, multiplied = parts.size();  // in the owner's order; the last piece's part
  int32_t first_piece = 0;                   // of the part there
  int last_owner = -1;
  const auto work = [&](int owner, int32_t index) {
    if (owner != last_owner) at = 0, first_piece = 0, last_owner = owner;
    for (int32_t count; index - first_piece >= (count = pieces_of(order.part(at, owner), owner)); ++at) {
      first_piece += count;
    }
    const size_t part = order.part(at, owner);
    const ExpertRows& rows = parts[part];
    const PackedWeight& weight = packed(args.weights[rows.expert]);
    ProductPiece piece = list.piece(weight, rows.count, order.sharer(owner), index - first_piece);
    if (piece.next == nullptr && at + 1 < order.count(owner)) {
      const ExpertRows& following = parts[order.part(at + 1, owner)];
      const PackedWeight& next = packed(args.weights[following.expert]);
      const Range panels = list.piece(next, following.count, order.sharer(owner), 0).panels;
      piece.next = next.panels().data() + panels.begin;
      piece.next_count = panels.size();
    }
    piece.same_x = piece.same_x && part == multiplied;
    if (part != multiplied) {
      if (at + 2 < order.count(owner)) ask_for(packed(args.weights[parts[order.part(at + 2, owner)].expert]));
      const int32_t* from = routes.row + rows.first;
      // Rows are in order: so they are neighbours where the last is as far from the first.
      if (args.sorted || from[rows.count - 1] - from[0] == rows.count - 1) {
        product = product_of(rows.expert, x, all, args.sorted ? rows.first : from[0]);
      } else {
        const Preparation wants = preparation_of(precision_of(args, rows.expert), weight, kernels_);
        const GatheredInput gathered = carve_gathered(rows.count, k, wants, scratch);
        for (int32_t i = 0; i < rows.count; ++i) {
          gather_row(wants, weight, x, all, from[i], gathered, i);
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
    for (size_t i = 0; i < order.count(owner); ++i) pieces += pieces_of(order.part(i, owner), owner);
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

}  // namespace nfp::cpu
