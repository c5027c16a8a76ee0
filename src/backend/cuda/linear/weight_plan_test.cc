#include "backend/cuda/linear/weight_plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "backend/cuda/linear/activations.h"
#include "backend/cuda/testing/matrix.h"

namespace nfp::cuda {
namespace {

using testing::Kind;
using testing::TestMatrix;

struct Part {
  Kind kind;
  int64_t rows;
};

struct Built {
  std::vector<std::unique_ptr<TestMatrix>> parts;
  LinearSpec spec;
};
Built build(const std::vector<Part>& parts, int64_t k, RowOrder order, bool bias) {
  Built built;
  built.spec.order = order;
  float next = 1.0f;
  for (const Part& part : parts) {
    built.parts.push_back(
        std::make_unique<TestMatrix>(part.kind, part.rows, k, static_cast<uint32_t>(built.parts.size() + 1)));
    built.spec.parts.push_back(built.parts.back().get());
    for (int64_t r = 0; bias && r < part.rows; ++r) built.spec.bias.push_back(next++);
  }
  return built;
}

// The part and its row that stand in row `row` of the weight.
std::pair<const TestMatrix*, int64_t> source_of(const Built& built, int64_t row) {
  if (built.spec.order == RowOrder::kInterleave) {
    for (const auto& [part, place] : {std::pair{0, &swiglu_gate_row}, std::pair{1, &swiglu_up_row}}) {
      for (int64_t i = 0; i < built.parts[0]->rows(); ++i) {
        if (place(i) == row) return {built.parts[static_cast<size_t>(part)].get(), i};
      }
    }
  }
  for (const auto& part : built.parts) {
    if (row < part->rows()) return {part.get(), row};
    row -= part->rows();
  }
  return {nullptr, 0};
}

// Fills every piece and checks every byte of every segment.
void check_all(const Built& built, const std::vector<SegmentPlan>& want) {
  const auto made = WeightPlan::make(built.spec);
  ASSERT_TRUE(made.ok()) << made.error().message;
  const WeightPlan& plan = *made;
  ASSERT_EQ(plan.segments().size(), want.size());
  WeightPlan::Staging staging;
  for (size_t s = 0; s < want.size(); ++s) {
    const SegmentPlan& segment = plan.segments()[s];
    ASSERT_EQ(segment.nested, want[s].nested);
    ASSERT_EQ(segment.join, want[s].join);
    ASSERT_EQ(segment.first_column, want[s].first_column);
    ASSERT_EQ(segment.rows, want[s].rows);
    const size_t bytes = segment.matrix_bytes(plan.k());
    std::vector<uint8_t> upper(bytes, 0xaa), lower(bytes, 0xaa);
    std::vector<float> scales(static_cast<size_t>(segment.rows));
    size_t filled = 0;
    for (const WeightPiece& piece : plan.pieces()) {
      if (piece.segment != static_cast<int>(s)) continue;
      const size_t at = plan.piece_offset(piece), size = plan.piece_bytes(piece);
      ASSERT_EQ(at, filled);
      ASSERT_LE(at + size, bytes);
      ASSERT_TRUE(
          plan.fill(piece, upper.data() + at, lower.data() + at, scales.data() + piece.first_row, staging).ok());
      filled += size;
    }
    ASSERT_EQ(filled, bytes);
    const PlaneShape shape{segment.rows, plan.k()};
    std::vector<bool> used(bytes);
    for (int64_t row = 0; row < segment.rows; ++row) {
      const auto [source, source_row] = source_of(built, segment.first_column + row);
      for (int64_t col = 0; col < plan.k(); ++col) {
        if (!segment.nested) {
          uint16_t bits = 0;
          std::memcpy(&bits, upper.data() + 2 * (row * plan.k() + col), 2);
          ASSERT_EQ(bits, source->bits(source_row, col)) << row << " " << col;
          continue;
        }
        const size_t at = plane_offset(shape, row, col);
        used[at] = true;
        const float scale = scales[static_cast<size_t>(row)];
        ASSERT_EQ(scale, std::ldexp(source->factor(source_row), source->exponent(source_row)));
        ASSERT_EQ(fp16_to_fp32(join_fp16(segment.join, upper[at], lower[at])) * scale, source->exact(source_row, col));
        ASSERT_EQ(e4m3_to_fp32(upper[at]) * scale / 256.0f, source->fp8(source_row, col));
      }
    }
    for (size_t i = 0; segment.nested && i < bytes; ++i) {
      if (used[i]) continue;
      ASSERT_EQ(join_fp16(segment.join, upper[i], lower[i]), 0);
    }
  }
  const std::vector<float> bias = plan.bias();
  ASSERT_EQ(bias.size(), built.spec.bias.size());
  int64_t before = 0;
  for (const auto& part : built.parts) {
    for (int64_t row = 0; row < plan.n() && !bias.empty(); ++row) {
      const auto [source, source_row] = source_of(built, row);
      if (source == part.get()) {
        ASSERT_EQ(bias[static_cast<size_t>(row)], built.spec.bias[static_cast<size_t>(before + source_row)]);
      }
    }
    before += part->rows();
  }
}

TEST(WeightPlan, PartsThatNestAreOneSegment) {
  check_all(build({{Kind::kPlain, 100}, {Kind::kShifted, 37}, {Kind::kRestricted, 1}}, 200, RowOrder::kConcat, true),
            {{true, Join::kBiased, 0, 138}});
  check_all(build({{Kind::kPlain, 70}, {Kind::kFree, 70}}, 64, RowOrder::kConcat, false),
            {{true, Join::kFree, 0, 140}});
}

TEST(WeightPlan, DensePartsStandApart) {
  check_all(build({{Kind::kPlain, 65}, {Kind::kDense, 30}, {Kind::kDense, 9}, {Kind::kFree, 64}}, 136,
                  RowOrder::kConcat, true),
            {{true, Join::kBiased, 0, 65}, {false, Join::kBiased, 65, 39}, {true, Join::kFree, 104, 64}});
}

TEST(WeightPlan, GateAndUpAlternateByEight) {
  check_all(build({{Kind::kPlain, 88}, {Kind::kShifted, 88}}, 72, RowOrder::kInterleave, true),
            {{true, Join::kBiased, 0, 176}});
  check_all(build({{Kind::kFree, 32}, {Kind::kPlain, 32}}, 128, RowOrder::kInterleave, false),
            {{true, Join::kFree, 0, 64}});
  check_all(build({{Kind::kShifted, 40}, {Kind::kDense, 40}}, 72, RowOrder::kInterleave, true),
            {{false, Join::kBiased, 0, 80}});
}

TEST(WeightPlan, ColumnsThatTheCopyEngineCannotFetchAreDense) {
  check_all(build({{Kind::kPlain, 20}, {Kind::kShifted, 5}}, 33, RowOrder::kConcat, true),
            {{false, Join::kBiased, 0, 25}});
}

TEST(WeightPlan, LongDenseRowsGoInPieces) {
  const Built built = build({{Kind::kDense, 200}}, 4096, RowOrder::kConcat, false);
  const auto plan = WeightPlan::make(built.spec);
  ASSERT_TRUE(plan.ok());
  EXPECT_GT(plan->pieces().size(), 2u);
  check_all(built, {{false, Join::kBiased, 0, 200}});
}

TEST(WeightPlan, RefusesWhatHasNoKernel) {
  const Built odd = build({{Kind::kPlain, 12}, {Kind::kPlain, 12}}, 64, RowOrder::kInterleave, false);
  const auto refused = WeightPlan::make(odd.spec);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("matrix 1"), std::string::npos);
}

TEST(WeightPlan, ErrorsOfReadersComeThrough) {
  Built built = build({{Kind::kPlain, 64}, {Kind::kPlain, 64}}, 64, RowOrder::kConcat, false);
  built.parts[1]->fail_at = 20;
  const auto plan = WeightPlan::make(built.spec);
  ASSERT_TRUE(plan.ok());
  std::vector<uint8_t> upper(plan->piece_bytes(plan->pieces()[1])), lower(upper.size());
  std::vector<float> scales(64);
  WeightPlan::Staging staging;
  EXPECT_TRUE(plan->fill(plan->pieces()[0], upper.data(), lower.data(), scales.data(), staging).ok());
  const Status failed = plan->fill(plan->pieces()[1], upper.data(), lower.data(), scales.data(), staging);
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(failed.error().message.find("row 20"), std::string::npos);
}

TEST(Activations, BothFormsFitAndScalesDoNotOverlapCodes) {
  for (const int64_t rows : {1, 3, 2048}) {
    for (const int64_t features : {8, 40, 4096, 4104, 14336}) {
      const size_t bytes = activation_bytes(rows, features);
      EXPECT_GE(bytes, static_cast<size_t>(rows * features) * 2);
      EXPECT_GE(e4m3_scale_offset(rows, features), static_cast<size_t>(rows * e4m3_row_bytes(features)));
      EXPECT_EQ(e4m3_scale_offset(rows, features) % kActivationAlignment, 0u);
      EXPECT_LE(e4m3_scale_offset(rows, features) + static_cast<size_t>(rows) * 4, bytes);
    }
  }
}

}  // namespace
}  // namespace nfp::cuda
