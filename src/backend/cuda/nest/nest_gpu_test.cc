// Nesting on the device against the host's analysis, split and layout. Needs a Hopper GPU; skips elsewhere.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "backend/cuda/gemm/plan/pack.h"
#include "backend/cuda/nest/nest.h"
#include "backend/cuda/testing/device.h"
#include "base/float_types.h"
#include "base/thread_pool.h"
#include "nested/format.h"

namespace nfp::cuda {
namespace {

struct Case {
  int64_t n, k;
  WeightType type;
  float sigma;
  int outliers;  // of 64 rows, with a weight far larger
};

std::vector<uint16_t> random_weights(const Case& c, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, c.sigma);
  std::vector<uint16_t> out;
  for (int64_t r = 0; r < c.n; ++r) {
    const bool large = static_cast<int>(random() % 64) < c.outliers;
    for (int64_t i = 0; i < c.k; ++i) {
      float v = normal(random);
      if (large && i == r % c.k) v = std::ldexp(v, static_cast<int>(random() % 9));
      if (random() % 97 == 0) v = 0.0f;
      if (random() % 101 == 0) v = std::ldexp(v, -static_cast<int>(random() % 14));
      out.push_back(c.type == WeightType::kBF16 ? fp32_to_bf16(v) : fp32_to_fp16(v));
    }
  }
  return out;
}

std::vector<uint8_t> packed(const PlaneShape& shape, Plane plane, Join join, const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> out(shape.bytes());
  for (int64_t block = 0; block < shape.row_blocks(); ++block) {
    const int64_t first = block * kBlockRows;
    pack_slab(shape, plane, join, std::span(bytes).subspan(static_cast<size_t>(first * shape.k)),
              static_cast<int>(std::min<int64_t>(kBlockRows, shape.n - first)),
              out.data() + static_cast<size_t>(block) * shape.slab_bytes());
  }
  return out;
}

class Nest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  }
};

TEST_P(Nest, IsTheHostsRowByRow) {
  const Case c = GetParam();
  std::mt19937 random(static_cast<uint32_t>(c.n * 131 + c.k * 7 + static_cast<int>(c.type)));
  const std::vector<uint16_t> weights = random_weights(c, random);
  ThreadPool threads(2);
  const auto row = [&](int64_t r) {
    return std::span(weights).subspan(static_cast<size_t>(r * c.k), static_cast<size_t>(c.k));
  };
  const PlaneShape shape{c.n, c.k};
  for (const Join join : {Join::kBiased, Join::kFree}) {
    const int64_t ldw = c.k + 3;  // rows apart: a slice of a larger matrix
    std::vector<uint16_t> wide(static_cast<size_t>(c.n * ldw), 0x7e00);
    for (int64_t r = 0; r < c.n; ++r) std::copy(row(r).begin(), row(r).end(), wide.begin() + r * ldw);
    const DeviceVector<uint16_t> device(wide);
    const DeviceVector<uint8_t> upper(shape.bytes()), lower(shape.bytes());
    const DeviceVector<float> scale(static_cast<size_t>(c.n));
    const DeviceVector<NestReport> report(1);
    const Status status = nest_matrix(
        {shape, device.get(), ldw, c.type, join, upper.get(), lower.get(), scale.get(), report.get()}, nullptr);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<float> scales = scale.host();
    NestReport expected;
    expected.first_bad_row = static_cast<int32_t>(c.n);
    std::vector<uint8_t> uppers(weights.size()), lowers(weights.size());
    for (int64_t r = 0; r < c.n; ++r) {
      const RowAnalysis found = analyse_row(row(r), c.type);
      if (!found.nests) {
        ++expected.bad_rows;
        expected.first_bad_row = std::min(expected.first_bad_row, static_cast<int32_t>(r));
        continue;
      }
      EXPECT_EQ(scales[static_cast<size_t>(r)], std::ldexp(1.0f, found.exponent)) << "row " << r;
      expected.rows_shifted += found.exponent != 0 ? 1 : 0;
      expected.inexact += found.inexact_nested;
      std::vector<uint16_t> shifted(static_cast<size_t>(c.k));
      shift_row(row(r), c.type, found.exponent, shifted.data());
      for (const uint16_t bits : shifted)
        expected.inexact_bf16 += (std::bit_cast<uint32_t>(fp16_to_fp32(bits)) & 0xffffu) != 0 ? 1 : 0;
      split(shifted, uppers.data() + r * c.k, lowers.data() + r * c.k);
    }
    const NestReport got = report.host()[0];
    EXPECT_EQ(got.bad_rows, expected.bad_rows);
    EXPECT_EQ(got.first_bad_row, expected.first_bad_row);
    EXPECT_EQ(got.not_finite_rows, 0);
    EXPECT_EQ(got.rows_shifted, expected.rows_shifted);
    EXPECT_EQ(got.inexact, expected.inexact);
    EXPECT_EQ(got.inexact_bf16, expected.inexact_bf16);
    if (expected.bad_rows != 0) continue;  // planes without meaning
    EXPECT_TRUE(upper.host() == packed(shape, Plane::kUpper, join, uppers));
    EXPECT_TRUE(lower.host() == packed(shape, Plane::kLower, join, lowers));

    // From bytes that are there already, and back.
    const DeviceVector<uint8_t> device_uppers(uppers), device_lowers(lowers);
    const DeviceVector<uint8_t> upper2(shape.bytes()), lower2(shape.bytes());
    ASSERT_TRUE(pack_plane(shape, Plane::kUpper, join, device_uppers.get(), c.k, upper2.get(), nullptr).ok());
    ASSERT_TRUE(pack_plane(shape, Plane::kLower, join, device_lowers.get(), c.k, lower2.get(), nullptr).ok());
    EXPECT_TRUE(upper2.host() == upper.host());
    EXPECT_TRUE(lower2.host() == lower.host());
    const DeviceVector<uint16_t> back(weights.size());
    ASSERT_TRUE(
        unnest_matrix(shape, join, upper.get(), lower.get(), scale.get(), c.type, back.get(), c.k, nullptr).ok());
    if (got.inexact == 0) {
      EXPECT_TRUE(back.host() == weights);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Nest,
    ::testing::Values(Case{64, 128, WeightType::kF16, 0.02f, 0}, Case{1, 1, WeightType::kF16, 0.02f, 0},
                      Case{65, 127, WeightType::kF16, 0.2f, 8}, Case{130, 320, WeightType::kF16, 0.5f, 64},
                      Case{96, 4096, WeightType::kF16, 0.02f, 1}, Case{64, 128, WeightType::kBF16, 0.02f, 0},
                      Case{77, 200, WeightType::kBF16, 0.02f, 8}, Case{128, 1024, WeightType::kBF16, 0.0005f, 0},
                      Case{33, 640, WeightType::kBF16, 1.0f, 64}));

TEST_F(Nest, NotFiniteRowsAreCounted) {
  const PlaneShape shape{3, 64};
  std::vector<uint16_t> weights(size_t{3} * 64, 0x2c00);
  weights[64 + 5] = 0x7c00;
  weights[128 + 9] = 0x7e01;
  const DeviceVector<uint16_t> device(weights);
  const DeviceVector<uint8_t> upper(shape.bytes()), lower(shape.bytes());
  const DeviceVector<float> scale(3);
  const DeviceVector<NestReport> report(1);
  ASSERT_TRUE(nest_matrix({shape, device.get(), 64, WeightType::kF16, Join::kBiased, upper.get(), lower.get(),
                           scale.get(), report.get()},
                          nullptr)
                  .ok());
  const NestReport got = report.host()[0];
  EXPECT_EQ(got.not_finite_rows, 2);
  EXPECT_EQ(got.bad_rows, 2);
  EXPECT_EQ(got.first_bad_row, 1);
}

}  // namespace
}  // namespace nfp::cuda
