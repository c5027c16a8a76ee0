#include "backend/operation_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace nfp {
namespace {

constexpr ActivationForm kPlain{.feature_bytes = 4}, kRounding{.feature_bytes = 2, .rounds = true};

// A byte a weight and plane; `dense`: 2 in every precision.
class Weight final : public LinearWeight {
 public:
  Weight(int64_t n, int64_t k, bool dense = false, bool plain_inputs = false)
      : n_(n), k_(k), dense_(dense), plain_inputs_(plain_inputs) {}
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  size_t bytes_read(Precision precision) const override {
    return static_cast<size_t>(n_ * k_) * (dense_ || is_exact(precision) ? 2 : 1);
  }
  size_t bytes_held() const override { return bytes_read(Precision::kFp16); }
  Precision consumes(Precision step) const override {
    return step == Precision::kFp8W8A8 && !plain_inputs_ && !dense_ ? step : Precision::kFp16;
  }

 private:
  int64_t n_, k_;
  bool dense_, plain_inputs_;
};

class Cache final : public KvCache {
 public:
  const KvCacheSpec& spec() const override { return spec_; }
  size_t bytes() const override { return 0; }

 private:
  KvCacheSpec spec_{.layers = 1, .kv_heads = 2, .head_dim = 8, .dtype = DType::kF16};
};

TEST(OperationCost, AProductReadsItsWeightInItsPrecisionAndMovesActivationsOnce) {
  const Weight weight(6, 10);
  LinearArgs args{.weight = &weight, .rows = 3};
  OperationCost cost = cost_of(args, kRounding);
  EXPECT_EQ(cost.weight_bytes, 120u);
  EXPECT_EQ(cost.activation_bytes, 2u * 3 * 10 + 2 * 3 * 6);
  EXPECT_EQ(cost.flops, 2u * 3 * 6 * 10);
  args.precision = Precision::kFp8W8A8;
  cost = cost_of(args, kRounding);
  EXPECT_EQ(cost.weight_bytes, 60u);
  EXPECT_EQ(cost.activation_bytes, 3u * 10 + 3 * 4 + 2 * 3 * 6) << "codes and a scale a row in, FP16 out";
  EXPECT_EQ(cost_of(args, kPlain).activation_bytes, 4u * 3 * 10 + 4 * 3 * 6);
  args.epilogue = Epilogue::kGatedActivation;
  args.consumer = Precision::kFp8W8A8;
  EXPECT_EQ(cost_of(args, kRounding).activation_bytes, 3u * 10 + 3 * 4 + 3 * 3 + 3 * 4);
  args.epilogue = Epilogue::kStore;
  args.y_is_f32 = true;
  EXPECT_EQ(cost_of(args, kRounding).activation_bytes, 3u * 10 + 3 * 4 + 4 * 3 * 6);
}

TEST(OperationCost, GreedySamplingOfWhatAProductFindsMovesNoLogits) {
  const Weight weight(6, 10);
  const LinearArgs product{.weight = &weight, .rows = 3, .y_is_f32 = true};
  EXPECT_EQ(cost_of(product, kRounding, 7).activation_bytes, 2u * 3 * 10 + 7);
  EXPECT_EQ(cost_of(product, kRounding, 7).flops, cost_of(product, kRounding).flops);
  const SampleArgs sample{.rows = 3, .vocab = 6};
  EXPECT_EQ(cost_of(sample).activation_bytes, 4u * 3 * 6 + 3 * (64 + 16));
  EXPECT_EQ(cost_of(sample, 7).activation_bytes, 7u + 3 * 16);
}

TEST(OperationCost, WhatAProductIsComputedIn) {
  EXPECT_EQ(product_precision(Weight(4, 4), Precision::kFp16), Precision::kFp16);
  EXPECT_EQ(product_precision(Weight(4, 4), Precision::kFp8), Precision::kFp8);
  EXPECT_EQ(product_precision(Weight(4, 4), Precision::kFp8W8A8), Precision::kFp8W8A8);
  EXPECT_EQ(product_precision(Weight(4, 4, true), Precision::kFp8W8A8), Precision::kFp16);
  EXPECT_EQ(product_precision(Weight(4, 4, false, true), Precision::kFp8W8A8), Precision::kFp8);
}

TEST(OperationCost, AttentionByWhatEachTokenSees) {
  Cache cache;
  AttentionArgs args;
  args.heads = 4;
  args.kv_heads = 2;
  args.head_dim = 8;
  args.cache = &cache;
  constexpr std::array<int32_t, 4> kStart = {0, 1, 8, 12}, kContext = {5, 7, 30, 0};
  const SequenceLengths lengths{kStart.data(), kContext.data()};
  for (const int32_t window : {0, 1, 3, 6, 7, 29, 100}) {
    args.window = window;
    uint64_t pairs = 0, keys = 0, tokens = 0;
    for (size_t s = 0; s < 3; ++s) {
      const int32_t queries = kStart[s + 1] - kStart[s];
      int32_t oldest = kContext[s];
      for (int32_t position = kContext[s] - queries; position < kContext[s]; ++position) {
        const int32_t from = window == 0 ? 0 : std::max(0, position - window + 1);
        pairs += static_cast<uint64_t>(position + 1 - from);
        oldest = std::min(oldest, from);
        ++tokens;
      }
      keys += static_cast<uint64_t>(kContext[s] - oldest);
    }
    const OperationCost cost = cost_of(args, kRounding, lengths, 0, 3);
    EXPECT_EQ(cost.kv_bytes, keys * 2 * 2 * 8 * 2) << window;
    EXPECT_EQ(cost.flops, pairs * 4 * 4 * 8) << window;
    EXPECT_EQ(cost.activation_bytes, tokens * 2 * 4 * 8 * 2) << window;
    const OperationCost parts = cost_of(args, kRounding, lengths, 0, 1) + cost_of(args, kRounding, lengths, 1, 2);
    EXPECT_EQ(parts.flops, cost.flops);
    EXPECT_EQ(parts.kv_bytes, cost.kv_bytes);
  }
  args.window = 0;
  EXPECT_EQ(cost_of(args, kRounding, {}, 0, 3).kv_bytes, 0u) << "lengths are not known";
  args.batch.narrowed = true;  // each sequence's last token
  EXPECT_EQ(cost_of(args, kRounding, lengths, 0, 3).flops, (5u + 7 + 30) * 4 * 4 * 8);
}

TEST(OperationCost, RotationTogetherWithAttentionKeepsQInTheKernel) {
  Cache cache;
  RopeArgs rope;
  rope.heads = 4;
  rope.kv_heads = 2;
  rope.head_dim = rope.rotary_dim = 8;
  rope.cache = &cache;
  rope.batch.tokens = rope.batch.sequences = 2;
  AttentionArgs args;
  args.heads = 4;
  args.kv_heads = 2;
  args.head_dim = 8;
  args.cache = &cache;
  args.batch = rope.batch;
  constexpr std::array<int32_t, 3> kStart = {0, 1, 2};
  constexpr std::array<int32_t, 2> kContext = {5, 7};
  const SequenceLengths lengths{kStart.data(), kContext.data()};
  EXPECT_EQ(cost_of(rope, kRounding).kv_bytes, 2u * 2 * 2 * 8 * 2);
  EXPECT_EQ(cost_of(rope, kRounding).flops, 3u * 2 * 6 * 8);
  const OperationCost cost = cost_of(rope, args, kRounding, lengths);
  EXPECT_EQ(cost.kv_bytes, (2u + 5 + 7) * 2 * 2 * 8 * 2);
  EXPECT_EQ(cost.activation_bytes, 2u * (64 * 2 + 8 * 4 + 32 * 2)) << "q, k and v, a table's row, the result";
}

TEST(OperationCost, ExpertsThatHaveNoRowsAreNotRead) {
  const Weight nested(4, 6), dense(4, 6, true);
  const std::array<const LinearWeight*, 4> weights = {&nested, &dense, &nested, &nested};
  constexpr std::array<int32_t, 5> kStart = {0, 2, 3, 3, 6};
  ExpertLinearArgs args;
  args.weights = weights.data();
  args.routes.experts = 4;
  args.routes.top = 2;
  args.rows = 3;
  args.precision = Precision::kFp8;
  args.exact[0] = 1u << 3;
  const OperationCost cost = cost_of(args, kRounding, kStart.data());
  EXPECT_EQ(cost.weight_bytes, 24u + 48 + 48);
  EXPECT_EQ(cost.activation_bytes, 2u * 3 * 6 + 2 * 6 * 4);
  EXPECT_EQ(cost.flops, 2u * 6 * 4 * 6);
  args.sorted = true;
  EXPECT_EQ(cost_of(args, kRounding, kStart.data(), Precision::kFp8W8A8).activation_bytes, 6u * 6 + 6 * 4 + 2 * 6 * 4);
  EXPECT_EQ(cost_of(args, kRounding, nullptr).weight_bytes, 0u);
}

TEST(OperationCost, NormsByWhatTheyAddAndWrite) {
  float weight = 0;
  RmsNormArgs args;
  args.weight = &weight;
  args.rows = 3;
  args.hidden = 5;
  args.out = &weight;
  EXPECT_EQ(cost_of(args, kRounding).activation_bytes, 2u * 2 * 15);
  EXPECT_EQ(cost_of(args, kRounding).weight_bytes, 20u);
  EXPECT_EQ(stage_of(args, kRounding), stage::kRmsNorm);
  args.residual = &weight;
  args.consumer = Precision::kFp8W8A8;
  EXPECT_EQ(cost_of(args, kRounding).activation_bytes, 3u * 2 * 15 + 15 + 3 * 4);
  EXPECT_EQ(stage_of(args, kRounding), stage::kRmsNormRound);
  EXPECT_EQ(stage_of(args, kPlain), stage::kRmsNorm);
  EXPECT_EQ(cost_of(args, kPlain).activation_bytes, 4u * 4 * 15);
  args.out = nullptr;
  EXPECT_EQ(stage_of(args, kRounding), stage::kAdd);
  EXPECT_EQ(cost_of(args, kRounding).activation_bytes, 3u * 2 * 15);
}

TEST(StageTimes, SumsByStageAndPrecisionInTheOrderOfTheFirst) {
  StageTimes times;
  times.add(stage::kLinear, Precision::kFp16, {.weight_bytes = 2, .flops = 3}, 0.5);
  times.add(stage::kRope, std::nullopt, {.kv_bytes = 7}, 1);
  times.add(stage::kLinear, Precision::kFp8, {.weight_bytes = 1}, 0.25);
  times.add(stage::kLinear, Precision::kFp16, {.weight_bytes = 2, .activation_bytes = 9}, 0.5);
  ASSERT_EQ(times.all().size(), 3u);
  const StageTime& first = times.all()[0];
  EXPECT_EQ(first.stage, stage::kLinear);
  EXPECT_EQ(first.precision, Precision::kFp16);
  EXPECT_EQ(first.calls, 2u);
  EXPECT_EQ(first.seconds, 1);
  EXPECT_EQ(first.cost.weight_bytes, 4u);
  EXPECT_EQ(first.cost.activation_bytes, 9u);
  EXPECT_EQ(first.cost.flops, 3u);
  EXPECT_EQ(times.all()[1].cost.kv_bytes, 7u);
  times.clear();
  EXPECT_TRUE(times.all().empty());
}

}  // namespace
}  // namespace nfp
