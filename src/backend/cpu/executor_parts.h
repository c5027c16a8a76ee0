// What the executor's files share: inputs of matrix products, as they are prepared, and the pieces of products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/kernel_table.h"
#include "backend/cpu/packed_weight.h"

namespace nfp::cpu {

constexpr size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline const PackedWeight& packed(const LinearWeight* weight) { return static_cast<const PackedWeight&>(*weight); }

// Up to so many rows every thread prepares the input of a matrix product for itself.
inline constexpr int32_t kPrivateRows = 4;

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

// From so many rows a thread on, threads share the rows of a matrix product instead of its columns: each unpacks all
// weights, but reads and writes rows that stay in its own cache.
inline constexpr int32_t kRowsToShare = 128;

// How a product is cut into pieces: each thread's share of the panels into pieces of about `piece_weights` weights, or,
// where threads share rows, all of its rows.
struct PieceList {
  static constexpr int64_t kPieceWeights = 1 << 18;
  int threads;
  int64_t piece_weights = kPieceWeights;

  bool by_rows(int32_t rows) const { return rows >= kRowsToShare * threads; }
  int64_t panels_a_piece(const PackedWeight& weight) const {
    return std::max<int64_t>(1, piece_weights / (weight.k() * kPanelRows * kGroupPanels)) * kGroupPanels;
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
    return {{begin, end},
            {0, rows},
            last ? nullptr : weight.panels().data() + end,
            last ? 0 : std::min(each, mine.end - end)};
  }
};

// What a linear operation does to its input before the panels see it.
struct Preparation {
  PairArithmetic pairs = PairArithmetic::kNone;  // KernelTable::to_pairs
  bool codes = false;                            // E4M3 with a scale a token
  bool scales = false;                           // of tokens
  bool split = false;                            // for FP16 steps: KernelTable::to_split, with scales of its own
  bool has_pairs() const { return pairs != PairArithmetic::kNone; }
  int64_t pair_words(int64_t k) const { return cpu::pair_words(pairs, k); }  // of a row
  explicit operator bool() const { return has_pairs() || codes || split; }
};

inline Preparation preparation_of(Precision precision, const PackedWeight& weight, const KernelTable& kernels) {
  Preparation p;
  if (is_exact(precision)) {
    p.split = kernels.to_split != nullptr;
    return p;
  }
  if (!weight.holds_nested()) return p;
  p.codes = precision == Precision::kFp8W8A8;
  p.pairs = kernels.pairs;
  p.scales = p.codes || p.pairs == PairArithmetic::kFp16 || p.pairs == PairArithmetic::kBf16Tiles;
  return p;
}
inline Preparation preparation_of(const LinearArgs& args, const KernelTable& kernels) {
  return preparation_of(args.precision, packed(args.weight), kernels);
}

inline Precision precision_of(const ExpertLinearArgs& args, int32_t expert) {
  return args.is_exact(expert) ? Precision::kFp16 : args.precision;
}

// Of any expert: those that need less find what they need in it.
inline Preparation preparation_of(const ExpertLinearArgs& args, const KernelTable& kernels) {
  Preparation all;
  for (int32_t e = 0; e < args.routes.experts; ++e) {
    const Preparation one = preparation_of(precision_of(args, e), packed(args.weights[e]), kernels);
    all.codes = all.codes || one.codes;
    if (one.has_pairs()) all.pairs = one.pairs;
    all.scales = all.scales || one.scales;
    all.split = all.split || one.split;
  }
  return all;
}

inline int32_t assignments_of(const ExpertRoutes& routes, int32_t rows) { return routes.top * rows; }

struct PreparedInput {
  uint32_t* pairs;     // [rows, pair_words(k)]
  float* codes;        // [rows, k]
  float* token_scale;  // [rows]
  uint32_t* split;     // [rows, split_words(k)]
  float* split_scale;  // [rows]
  size_t bytes;
};

inline PreparedInput carve(int64_t rows_of_x, int64_t cols, const Preparation& p, void* base) {
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
  input.split = reinterpret_cast<uint32_t*>(take(p.split, rows * static_cast<size_t>(split_words(cols)) * 4));
  input.split_scale = reinterpret_cast<float*>(take(p.split, rows * 4));
  input.bytes = used;
  return input;
}

// Rounds rows of x [*, k] into `input`.
inline void prepare_rows(const Preparation& p, const KernelTable& kernels, const float* x, int64_t k, Range rows,
                         const PreparedInput& input) {
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    float scale = 1.0f;
    if (p.codes) scale = kernels.quantize_e4m3(x + i * k, k, input.codes + i * k);
    if (p.has_pairs()) {
      scale *= kernels.to_pairs(p.codes ? input.codes + i * k : x + i * k, k, input.pairs + i * p.pair_words(k));
    }
    if (p.scales) input.token_scale[i] = scale;
    if (p.split) input.split_scale[i] = kernels.to_split(x + i * k, k, input.split + i * split_words(k));
  }
}

// What a product that wants so much finds there, from row `row` on.
inline void take_prepared(const PreparedInput& input, const Preparation& wants, int64_t k, int64_t row,
                          Product& product) {
  if (wants.has_pairs()) product.pairs = input.pairs + row * wants.pair_words(k);
  if (wants.codes) product.codes = input.codes + row * k;
  if (wants.scales) product.token_scale = input.token_scale + row;
  if (wants.split) {
    product.pairs = input.split + row * split_words(k);
    product.token_scale = input.split_scale + row;
  }
}

// The rows of one expert, brought together.
struct GatheredInput {
  float* x;
  PreparedInput prepared;
  size_t bytes;
};
inline GatheredInput carve_gathered(int64_t rows, int64_t k, const Preparation& p, void* base) {
  const size_t plain = round_up(static_cast<size_t>(rows * k) * sizeof(float));
  GatheredInput input{};
  input.x = static_cast<float*>(base);
  input.prepared = carve(rows, k, p, base == nullptr ? nullptr : static_cast<char*>(base) + plain);
  input.bytes = plain + input.prepared.bytes;
  return input;
}

// Bytes that any AttentionSplit of these arguments may need (executor_attention.cc). It is asked before the operations
// run, so the batch's arrays may still be those of another step: a copy among the operations fills them.
size_t most_split_bytes(const AttentionArgs& args, int threads);

}  // namespace nfp::cpu
