#include "calibrate/smoothing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "base/float_types.h"
#include "nested/format.h"

namespace nfp {
namespace {

// Tensors in memory, of FP16, BF16 or FP32 values.
class MemorySource final : public ModelSource {
 public:
  MemorySource() : ModelSource(SourceKind::kHuggingFace, "memory") {}
  void add(const std::string& name, DType dtype, Shape shape, const std::vector<float>& values) {
    TensorInfo tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = shape;
    std::vector<std::byte>& out = bytes_[name];
    for (float value : values) {
      const size_t at = out.size();
      out.resize(at + size_of(dtype));
      if (dtype == DType::kF32) {
        std::memcpy(out.data() + at, &value, 4);
        continue;
      }
      const uint16_t bits = dtype == DType::kF16 ? fp32_to_fp16(value) : fp32_to_bf16(value);
      std::memcpy(out.data() + at, &bits, 2);
    }
    add_tensor(std::move(tensor));
  }
  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const auto row = static_cast<size_t>(tensor.row_elements()) * size_of(tensor.dtype);
    std::memcpy(out, bytes_.find(tensor.name)->second.data() + static_cast<size_t>(first) * row,
                static_cast<size_t>(count) * row);
    return ok_status();
  }
  void release(const TensorInfo&) const override {}

 private:
  std::map<std::string, std::vector<std::byte>, std::less<>> bytes_;
};

struct Limits {
  int lowest, highest;
  bool operator==(const Limits&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Limits& l) { return out << l.lowest << ".." << l.highest; }

Limits of_column(DType dtype, const std::vector<float>& column) {
  MemorySource source;
  source.add("w", dtype, {static_cast<int64_t>(column.size()), 1}, column);
  ThreadPool threads(1);
  const auto limits = column_limits(source, "w", threads);
  EXPECT_TRUE(limits.ok());
  return {limits->lowest[0], limits->highest[0]};
}

Limits of_row(DType dtype, Shape shape, const std::vector<float>& values) {
  MemorySource source;
  source.add("w", dtype, shape, values);
  ThreadPool threads(1);
  const auto limits = row_limits(source, "w", threads);
  EXPECT_TRUE(limits.ok());
  return {limits->lowest[0], limits->highest[0]};
}

TEST(Smoothing, ColumnsStayWithinWhatNestsExactly) {
  EXPECT_EQ(of_column(DType::kF16, {1.0f}), (Limits{-6, 0}));                // 2 is over 1.75; the floor of 2^-6
  EXPECT_EQ(of_column(DType::kF16, {0.875f}), (Limits{-5, 1}));              // up to 1.75
  EXPECT_EQ(of_column(DType::kF16, {0.9375f}), (Limits{-5, 0}));             // 1.875 is over it
  EXPECT_EQ(of_column(DType::kF16, {-0.25f}), (Limits{-4, 2}));              // the sign does not matter
  EXPECT_EQ(of_column(DType::kF16, {1.0f, 0x1.004p-12f}), (Limits{-2, 0}));  // 2^-22 as its lowest bit
  EXPECT_EQ(of_column(DType::kF16, {1.0f, 0x1p-24f}), (Limits{0, 0}));
  EXPECT_EQ(of_column(DType::kF16, {0.0f}), (Limits{-16, 16}));
  EXPECT_EQ(of_column(DType::kF16, {6.0f}), (Limits{-6, 0}));  // nests as 1.5 with exponent 2, which must not rise
  EXPECT_EQ(of_column(DType::kBF16, {0.5f, 0x1.02p-20f}), (Limits{-6, 0}));  // the second nests as 0x1.02 already
}

TEST(Smoothing, RowsStayWithinTheirDtype) {
  // e multiplies by 2^-e: lowest is how far the row may grow.
  EXPECT_EQ(of_row(DType::kF16, {1, 2}, {1.0f, 0x1p-20f}), (Limits{-15, 4}));
  EXPECT_EQ(of_row(DType::kF16, {1, 2}, {60000.0f, 0.0f}), (Limits{0, 16}));
  EXPECT_EQ(of_row(DType::kF16, {1}, {0x1.ffcp-14f}), (Limits{-16, 0}));
  EXPECT_EQ(of_row(DType::kF32, {1}, {0x1.fffffep-14f}), (Limits{-16, 16}));
  EXPECT_EQ(of_row(DType::kBF16, {1}, {0x1p-120f}), (Limits{-16, 6}));
  EXPECT_EQ(of_row(DType::kBF16, {1, 1}, {0.5f}), (Limits{-1, 16}));  // not past 1.75
}

TEST(Smoothing, ExponentsBringChannelsTogetherAsFarAsTheyMay) {
  ExponentLimits free(5);
  EXPECT_EQ(choose_exponents({1.0f, 8.0f, 0.125f, 1.0f, 0.0f}, free), (std::vector<int8_t>{0, 3, -3, 0, 0}));
  ExponentLimits bound(4);
  bound.highest = {0, 1, 0, 0};
  bound.lowest = {0, 0, -1, 0};
  // The largest comes down to 4 only, so no other need be smaller.
  EXPECT_EQ(choose_exponents({1.0f, 8.0f, 0.125f, 2.0f}, bound), (std::vector<int8_t>{0, 1, -1, 0}));
  EXPECT_EQ(choose_exponents({0.0f, 0.0f}, ExponentLimits(2)), (std::vector<int8_t>{0, 0}));
}

// Numbers as checkpoints have them and as they do not: rows over 1.75, a row near FP16's largest, subnormals, zeros.
std::vector<float> odd_matrix(int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = r == 1 ? 15000.0f : r == 2 ? 1e-6f : r % 5 == 3 ? 2.0f : 0.05f;
    for (int64_t c = 0; c < cols; ++c) {
      const float value = std::clamp(normal(random), -4.0f, 4.0f) * scale;
      values[static_cast<size_t>(r * cols + c)] = c % 7 == 3 ? std::round(value * 64.0f) / 64.0f : value;
    }
  }
  return values;
}

struct Read {
  Storage storage;
  std::vector<int8_t> exponents;
  std::vector<float> values;
};
Read read(const ModelSource& source, const std::string& name, ThreadPool& threads) {
  MatrixAnalysis analysis;
  const auto reader = source.matrix(name, threads, &analysis);
  EXPECT_TRUE(reader.ok()) << reader.error().message;
  const int64_t rows = (*reader)->rows(), cols = (*reader)->cols();
  const auto count = static_cast<size_t>(rows * cols);
  Read out{(*reader)->storage(), analysis.exponents, std::vector<float>(count)};
  if (out.storage == Storage::kNested) {
    std::vector<uint8_t> upper(count), lower(count);
    std::vector<int8_t> exponents(static_cast<size_t>(rows));
    EXPECT_TRUE((*reader)->read_nested(0, rows, upper.data(), lower.data(), exponents.data()).ok());
    for (size_t i = 0; i < count; ++i) {
      out.values[i] = std::ldexp(fp16_to_fp32(join(upper[i], lower[i])), exponents[i / static_cast<size_t>(cols)]);
    }
  } else {
    std::vector<uint16_t> bits(count);
    EXPECT_TRUE((*reader)->read_fp16(0, rows, bits.data()).ok());
    std::transform(bits.begin(), bits.end(), out.values.begin(), fp16_to_fp32);
  }
  return out;
}

TEST(Smoothing, WithinTheLimitsEveryWeightIsTheSameNumberTimesItsPower) {
  constexpr int64_t kRows = 24, kCols = 40;
  ThreadPool threads(2);
  int moved = 0;
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (uint32_t seed = 0; seed < 40; ++seed) {
      auto source = std::make_shared<MemorySource>();
      auto values = odd_matrix(kRows, kCols, seed);
      if (seed % 2 == 1) {  // few bits, as small models' weights have; then columns may shrink too
        for (float& v : values) v = e4m3_to_fp32(fp32_to_e4m3(v));
      }
      source->add("w", dtype, {kRows, kCols}, values);
      const Read before = read(*source, "w", threads);
      std::mt19937 random(seed);
      const auto within = [&](const ExponentLimits& limits, size_t i) {
        const int e = std::uniform_int_distribution<int>(limits.lowest[i], limits.highest[i])(random);
        moved += e != 0 ? 1 : 0;
        return static_cast<int8_t>(e);
      };
      const auto columns = column_limits(*source, "w", threads);
      const auto rows = row_limits(*source, "w", threads);
      ASSERT_TRUE(columns.ok() && rows.ok());
      for (bool by_row : {false, true}) {
        TensorScaling scaling;
        if (by_row) {
          for (size_t r = 0; r < kRows; ++r) scaling.rows.push_back(static_cast<int8_t>(-within(*rows, r)));
        } else {
          for (size_t c = 0; c < kCols; ++c) scaling.columns.push_back(within(*columns, c));
        }
        const auto scaled = scale_source(source, {{"w", scaling}});
        ASSERT_TRUE(scaled.ok());
        const Read after = read(**scaled, "w", threads);
        if (before.storage == Storage::kNested) {
          ASSERT_EQ(after.storage, Storage::kNested);
        }
        for (size_t i = 0; i < after.values.size(); ++i) {
          const size_t r = i / kCols, c = i % kCols;
          const auto e = static_cast<int>(by_row ? scaling.rows[r] : scaling.columns[c]);
          const float source_value = dtype == DType::kBF16 ? bf16_to_fp32(fp32_to_bf16(values[i])) : before.values[i];
          if (source_value == before.values[i]) {
            ASSERT_EQ(std::ldexp(before.values[i], e), after.values[i]) << "row " << r << " column " << c << " e " << e;
          } else {  // BF16 that FP16 rounds: never farther away
            ASSERT_LE(std::abs(std::ldexp(source_value, e) - after.values[i]),
                      std::ldexp(std::abs(source_value - before.values[i]), e))
                << "row " << r << " column " << c << " e " << e;
          }
          if (!by_row && after.storage == Storage::kNested && before.storage == Storage::kNested) {
            ASSERT_LE(after.exponents[r], before.exponents[r]);
          }
        }
      }
    }
  }
  EXPECT_GT(moved, 1000);
}

TEST(Smoothing, ScalingThatWouldLoseBitsOrFitsNoTensorIsAnError) {
  auto source = std::make_shared<MemorySource>();
  source->add("w", DType::kF16, {1, 2}, {40000.0f, 0x1p-24f});
  source->add("tokens", DType::kI32, {2}, {});
  uint16_t out[2];
  for (int8_t e : {int8_t{1}, int8_t{-1}}) {
    const auto scaled = scale_source(source, {{"w", {{}, {e, e}}}});
    ASSERT_TRUE(scaled.ok());
    const Status read = (*scaled)->read_rows(*(*scaled)->find("w"), 0, 1, reinterpret_cast<std::byte*>(out));
    ASSERT_FALSE(read.ok());
    EXPECT_NE(read.error().message.find("'w', row 0"), std::string::npos) << read.error().message;
  }
  const std::pair<TensorScalings, const char*> bad[] = {{{{"v", {{1}, {}}}}, "missing"},
                                                        {{{"tokens", {{1, 1}, {}}}}, "no float tensor"},
                                                        {{{"w", {{}, {1}}}}, "size"},
                                                        {{{"w", {{1, 1}, {}}}}, "size"},
                                                        {{{"w", {{100}, {}}}}, "2^60"}};
  for (const auto& [scalings, part] : bad) {
    const auto scaled = scale_source(source, scalings);
    ASSERT_FALSE(scaled.ok());
    EXPECT_NE(scaled.error().message.find(part), std::string::npos) << scaled.error().message;
  }
}

TEST(Smoothing, ScalingsReadBackAsWrittenAndRefuseAnythingElse) {
  const TensorScalings scalings = {{"a", {{1, -2}, {}}}, {"b", {{}, {3}}}, {"c", {{-1}, {16}}}};
  const auto back = scalings_from_json(scalings_to_json(scalings), "file");
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(*back, scalings);
  for (const char* bad : {"", "[]", "{\"a\":1}", "{\"a\":{\"rows\":[]}}", "{\"a\":{\"rows\":[1.5],\"columns\":[]}}",
                          "{\"a\":{\"rows\":[99],\"columns\":[]}}"}) {
    const auto wrong = scalings_from_json(bad, "file");
    ASSERT_FALSE(wrong.ok()) << bad;
    EXPECT_NE(wrong.error().message.find("file"), std::string::npos);
  }
}

}  // namespace
}  // namespace nfp
