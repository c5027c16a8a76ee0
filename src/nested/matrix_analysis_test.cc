#include "nested/matrix_analysis.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <vector>

#include "base/float_types.h"
#include "nested/format.h"

namespace nfp {
namespace {

struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<uint16_t> bits;

  MatrixSource source(WeightType type) const {
    return {"m",
            rows,
            cols,
            type,
            [this](int64_t first, int64_t count, uint16_t* out) {
              std::copy_n(bits.begin() + first * cols, count * cols, out);
              return ok_status();
            },
            {}};
  }
};

Matrix random_matrix(int64_t rows, int64_t cols, double sigma, uint32_t seed, WeightType type) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, static_cast<float>(sigma));
  Matrix matrix{rows, cols, std::vector<uint16_t>(rows * cols)};
  for (uint16_t& w : matrix.bits) {
    const float value = normal(random);
    w = type == WeightType::kF16 ? fp32_to_fp16(value) : fp32_to_bf16(value);
  }
  return matrix;
}

struct Planes {
  std::vector<uint8_t> upper, lower;
  std::vector<int8_t> exponents;
};

Planes read_all(const MatrixReader& reader, int64_t step) {
  Planes out{std::vector<uint8_t>(reader.rows() * reader.cols()), std::vector<uint8_t>(reader.rows() * reader.cols()),
             std::vector<int8_t>(reader.rows())};
  for (int64_t r = 0; r < reader.rows(); r += step) {
    const int64_t n = std::min(step, reader.rows() - r);
    EXPECT_TRUE(reader
                    .read_nested(r, n, out.upper.data() + r * reader.cols(), out.lower.data() + r * reader.cols(),
                                 out.exponents.data() + r)
                    .ok());
  }
  return out;
}

TEST(MatrixAnalysis, NestedFp16MatricesComeBackBitForBit) {
  ThreadPool pool(3);
  EXPECT_TRUE(rc::check([&] {
    const auto rows = *rc::gen::inRange<int64_t>(1, 40);
    const auto cols = *rc::gen::inRange<int64_t>(1, 70);
    const auto sigma = *rc::gen::element(0.02, 0.5, 3.0, 3000.0);
    const Matrix matrix = random_matrix(rows, cols, sigma, *rc::gen::arbitrary<uint32_t>(), WeightType::kF16);
    auto analysis = analyse_matrix(matrix.source(WeightType::kF16), pool);
    RC_ASSERT(analysis.ok());
    float largest = 0;
    for (uint16_t w : matrix.bits) largest = std::max(largest, std::abs(fp16_to_fp32(w)));
    RC_ASSERT(analysis->largest == largest);
    RC_ASSERT(analysis->nests_by_paper == (largest <= 1.75f));
    const auto reader = make_matrix_reader(matrix.source(WeightType::kF16), *analysis);
    std::vector<uint16_t> plain(matrix.bits.size());
    RC_ASSERT(reader->read_fp16(0, rows, plain.data()).ok());
    RC_ASSERT(plain == matrix.bits);
    bool all_rows = true;
    for (int64_t r = 0; r < rows; ++r) {
      all_rows &= analyse_row(std::span(matrix.bits).subspan(r * cols, cols), WeightType::kF16).nests;
    }
    RC_ASSERT((analysis->storage == Storage::kNested) == all_rows);
    RC_ASSERT(analysis->reason.empty() == all_rows);
    if (!all_rows) {
      uint8_t upper = 0, lower = 0;
      int8_t exponent = 0;
      RC_ASSERT(!reader->read_nested(0, 0, &upper, &lower, &exponent).ok());
      return;
    }
    const Planes planes = read_all(*reader, *rc::gen::inRange<int64_t>(1, 41));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const size_t i = r * cols + c;
        const float back = std::ldexp(fp16_to_fp32(join(planes.upper[i], planes.lower[i])), planes.exponents[r]);
        RC_ASSERT(fp32_to_fp16(back) == matrix.bits[i]);
      }
    }
  }));
}

TEST(MatrixAnalysis, Bf16IsAtLeastAsExactAsPlainFp16) {
  ThreadPool pool(2);
  const Matrix matrix = random_matrix(64, 4096, 0.02, 7, WeightType::kBF16);
  auto analysis = analyse_matrix(matrix.source(WeightType::kBF16), pool);
  ASSERT_TRUE(analysis.ok());
  EXPECT_EQ(analysis->storage, Storage::kNested);
  EXPECT_GT(analysis->inexact_fp16, 0);
  EXPECT_LT(analysis->inexact_nested, analysis->inexact_fp16);
  const auto reader = make_matrix_reader(matrix.source(WeightType::kBF16), *analysis);
  const Planes planes = read_all(*reader, 5);
  std::vector<uint16_t> plain(matrix.bits.size());
  ASSERT_TRUE(reader->read_fp16(0, 64, plain.data()).ok());
  int64_t inexact = 0;
  for (size_t i = 0; i < matrix.bits.size(); ++i) {
    const float w = bf16_to_fp32(matrix.bits[i]);
    const float back = std::ldexp(fp16_to_fp32(join(planes.upper[i], planes.lower[i])), planes.exponents[i / 4096]);
    inexact += back != w ? 1 : 0;
    ASSERT_EQ(plain[i], fp32_to_fp16(w));
    ASSERT_LE(std::abs(back - w), std::abs(fp16_to_fp32(plain[i]) - w));
  }
  EXPECT_EQ(inexact, analysis->inexact_nested);
}

TEST(MatrixAnalysis, TheReasonNamesTheFirstBreakingRow) {
  Matrix matrix = random_matrix(100, 16, 0.02, 1, WeightType::kF16);
  for (int64_t r : {90, 41, 60}) {
    matrix.bits[r * 16 + 3] = 0x48a0;  // 9.25
    matrix.bits[r * 16 + 9] = 0x8001;
  }
  for (int threads : {1, 4}) {
    ThreadPool pool(threads);
    auto analysis = analyse_matrix(matrix.source(WeightType::kF16), pool);
    ASSERT_TRUE(analysis.ok());
    EXPECT_EQ(analysis->storage, Storage::kDenseF16);
    EXPECT_TRUE(analysis->exponents.empty());
    EXPECT_NE(analysis->reason.find("row 41: largest |w| 9.25 needs exponent 3"), std::string::npos)
        << analysis->reason;
    EXPECT_NE(analysis->reason.find("column 9"), std::string::npos) << analysis->reason;
    EXPECT_EQ(analysis->largest, 9.25f);
    EXPECT_EQ(analysis->largest_row, 41);
  }
}

TEST(MatrixAnalysis, NotFiniteWeightsAreRefusedByName) {
  ThreadPool pool(2);
  for (uint16_t bad : {0x7c00, 0xfc00, 0x7e01, 0xffff}) {
    Matrix matrix = random_matrix(50, 16, 0.02, 1, WeightType::kF16);
    matrix.bits[33 * 16 + 5] = bad;
    matrix.bits[40 * 16 + 5] = bad;
    auto analysis = analyse_matrix(matrix.source(WeightType::kF16), pool);
    ASSERT_FALSE(analysis.ok());
    EXPECT_EQ(analysis.error().code, ErrorCode::kInvalidInput);
    EXPECT_NE(analysis.error().message.find("m: weight at row 33, column 5"), std::string::npos)
        << analysis.error().message;
  }
}

TEST(MatrixAnalysis, ABf16WeightBeyondFp16NestsOrIsRefused) {
  ThreadPool pool(1);
  const uint16_t million = fp32_to_bf16(1048576.0f);
  const Matrix alone{2, 2, {million, 0, 0, 0}};
  auto nested = analyse_matrix(alone.source(WeightType::kBF16), pool);
  ASSERT_TRUE(nested.ok());
  EXPECT_EQ(nested->storage, Storage::kNested);
  const auto reader = make_matrix_reader(alone.source(WeightType::kBF16), *nested);
  uint16_t plain[4];
  EXPECT_FALSE(reader->read_fp16(0, 2, plain).ok());
  const Matrix beside{2, 2, {0, 0, million, fp32_to_bf16(0x1.02p-10f)}};
  auto refused = analyse_matrix(beside.source(WeightType::kBF16), pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("m: row 1, column 0 (1048576)"), std::string::npos) << refused.error().message;
}

TEST(MatrixAnalysis, ReadErrorsComeThroughAndDoneIsCalledOnce) {
  ThreadPool pool(3);
  MatrixSource failing{
      "m", 9, 4, WeightType::kF16, [](int64_t, int64_t, uint16_t*) -> Status { return error(ErrorCode::kIo, "gone"); },
      {}};
  auto analysis = analyse_matrix(failing, pool);
  ASSERT_FALSE(analysis.ok());
  EXPECT_EQ(analysis.error().message, "gone");
  int done = 0;
  failing.done = [&] { ++done; };
  make_matrix_reader(failing, {}).reset();
  EXPECT_EQ(done, 1);
}

}  // namespace
}  // namespace nfp
