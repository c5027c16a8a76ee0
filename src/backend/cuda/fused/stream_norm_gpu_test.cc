// The norm over an FP32 stream against float64. Needs a Hopper GPU; skips elsewhere.
#include <cmath>
#include <limits>
#include <random>

#include "backend/cuda/fused/stream_norm.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/testing/device.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

class StreamNormGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
  std::vector<float> numbers(int64_t count, float sigma) {
    std::normal_distribution<float> normal(0.0f, sigma);
    std::vector<float> out(static_cast<size_t>(count));
    for (float& v : out) v = normal(random_);
    return out;
  }
  std::mt19937 random_{11};
};

enum class Form { kF32, kF16, kE4m3, kNone };

TEST_F(StreamNormGpu, MatchesFloat64) {
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 64}, {3, 640}, {7, 1152}, {2, 5376}, {130, 2304}, {4, 20}, {1, 30000}}) {
    for (const Form form : {Form::kF32, Form::kF16, Form::kE4m3, Form::kNone}) {
      for (const bool residual : {false, true}) {
        if (form == Form::kNone && !residual) continue;
        // Beyond FP16's range.
        const auto x = numbers(rows * columns, 1e5f), before = numbers(rows * columns, 3e5f);
        const auto weight = numbers(columns, 2.0f);
        const int64_t padded = PlaneShape{0, columns}.padded_k();
        const DeviceVector<float> d_x(x), d_residual(before), d_weight(weight), f32(x.size()),
            scales(static_cast<size_t>(rows));
        const DeviceVector<uint16_t> f16(x.size());
        const DeviceVector<uint8_t> codes(static_cast<size_t>(rows * padded));
        StreamNormCall call;
        call.rows = rows;
        call.columns = columns;
        call.x = d_x.get();
        call.residual = residual ? d_residual.get() : nullptr;
        call.weight = form == Form::kNone ? nullptr : d_weight.get();
        call.epsilon = 1e-6f;
        call.y_f32 = form == Form::kF32 ? f32.get() : nullptr;
        call.y_f16 = form == Form::kF16 ? f16.get() : nullptr;
        call.y_e4m3 = form == Form::kE4m3 ? codes.get() : nullptr;
        call.scales = scales.get();
        const Status status = run_stream_norm(call, nullptr);
        ASSERT_TRUE(status.ok()) << status.error().message;
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const auto after = d_residual.host(), got_f32 = f32.host(), got_scales = scales.host();
        const auto got_f16 = f16.host();
        const auto got_codes = codes.host();
        for (int64_t r = 0; r < rows; ++r) {
          std::vector<double> want;
          double squares = 0, largest = 0;
          for (int64_t i = 0; i < columns; ++i) {
            const auto at = static_cast<size_t>(r * columns + i);
            const float h = residual ? x[at] + before[at] : x[at];
            if (residual) {
              ASSERT_EQ(after[at], h) << r << " " << i;
            }
            want.push_back(double{h});
            squares += double{h} * double{h};
          }
          if (form == Form::kNone) continue;
          for (int64_t i = 0; i < columns; ++i) {
            double& v = want[static_cast<size_t>(i)];
            v *= double{weight[static_cast<size_t>(i)]} / std::sqrt(squares / static_cast<double>(columns) + 1e-6);
            largest = std::max(largest, std::abs(v));
          }
          // A sum of `columns` squares, some fifty of them one after the other, and three roundings after it.
          const double relative = 1e-5;
          if (form == Form::kE4m3) {
            ASSERT_NEAR(got_scales[static_cast<size_t>(r)], largest / 448, largest / 448 * relative);
          }
          for (int64_t i = 0; i < padded; ++i) {
            const auto at = static_cast<size_t>(r * columns + i);
            const double v = i < columns ? want[static_cast<size_t>(i)] : 0.0;
            if (form == Form::kE4m3) {
              const uint8_t code = got_codes[static_cast<size_t>(r * padded + activation_byte(i))];
              const double scale = got_scales[static_cast<size_t>(r)];
              if (i >= columns) {
                ASSERT_EQ(code & 0x7f, 0) << r << " " << i;
              } else {
                // Half a step of E4M3, or of its subnormals.
                ASSERT_LE(std::abs(e4m3_to_fp32(code) * scale - v),
                          std::max(std::abs(v) * 0x1p-4, scale * 0x1p-10) * 1.001)
                    << r << " " << i;
              }
            } else if (i < columns) {
              const double got = form == Form::kF32 ? got_f32[at] : fp16_to_fp32(got_f16[at]);
              const double slack = std::abs(v) * (relative + (form == Form::kF16 ? 0x1p-11 : 0)) + 0x1p-25;
              ASSERT_LE(std::abs(got - v), slack) << r << " " << i;
            }
          }
        }
      }
    }
  }
}

TEST_F(StreamNormGpu, RefusesWhatDoesNotFit) {
  const DeviceVector<float> memory(64);
  StreamNormCall call;
  call.rows = 1;
  call.columns = 16;
  call.x = memory.get();
  call.weight = memory.get();
  EXPECT_FALSE(run_stream_norm(call, nullptr).ok());  // makes nothing
  call.y_f32 = memory.get();
  EXPECT_TRUE(run_stream_norm(call, nullptr).ok());
  call.columns = 18;
  EXPECT_FALSE(run_stream_norm(call, nullptr).ok());
  call.columns = 16;
  call.y_e4m3 = reinterpret_cast<uint8_t*>(memory.get());
  EXPECT_FALSE(run_stream_norm(call, nullptr).ok());  // two outputs
  call.y_f32 = nullptr;
  EXPECT_FALSE(run_stream_norm(call, nullptr).ok());  // no scales
  cudaDeviceSynchronize();
}

// Squares that FP32 does not hold would make zeros of the row.
TEST_F(StreamNormGpu, SquaresThatOverflowMakeNoNumbers) {
  constexpr int64_t kColumns = 640;
  for (const float large : {1e20f, std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(2 * kColumns, 1.0f);
    x[3] = large;  // of the first row
    const DeviceVector<float> d_x(x), d_weight(std::vector<float>(kColumns, 1.0f)), y(x.size());
    StreamNormCall call;
    call.rows = 2;
    call.columns = kColumns;
    call.x = d_x.get();
    call.weight = d_weight.get();
    call.epsilon = 1e-6f;
    call.y_f32 = y.get();
    ASSERT_TRUE(run_stream_norm(call, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto got = y.host();
    for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(std::isnan(got[i]), i < kColumns) << i;
  }
}

}  // namespace
}  // namespace nfp::cuda
