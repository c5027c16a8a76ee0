#include "calibrate/activations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "base/float_types.h"
#include "calibrate/estimate.h"

namespace nfp {
namespace {

TEST(Activations, RoundAsE4m3Does) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float scale : {0.01f, 0.5f, 3.0f}) {
    std::vector<float> x(5000), y;
    for (size_t i = 0; i < x.size(); ++i) x[i] = normal(random) * std::exp2(static_cast<float>(i % 24) - 14.0f);
    x[0] = 0.0f, x[1] = 448.0f * scale, x[2] = -1000.0f * scale, x[3] = 1e-6f * scale;
    y = x;
    round_to_e4m3(y.data(), static_cast<int64_t>(y.size()), scale);
    for (size_t i = 0; i < x.size(); ++i) {
      const float clipped = std::clamp(x[i] * (1.0f / scale), -448.0f, 448.0f);
      EXPECT_EQ(y[i], e4m3_to_fp32(fp32_to_e4m3(clipped)) * scale) << x[i] << " by " << scale;
    }
  }
}

TEST(Activations, QuantilesAreWithinASixteenthOfAPowerOfTwo) {
  std::vector<float> x(100000);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& value : x) value = 7.0f * normal(random);
  MagnitudeHistogram histogram;
  histogram.add(x.data(), 60000);
  histogram.add(x.data() + 60000, 40000);
  std::vector<float> sorted(x);
  for (float& value : sorted) value = std::abs(value);
  std::sort(sorted.begin(), sorted.end());
  for (double share : {0.01, 0.5, 0.99, 0.9999}) {
    const float exact = sorted[static_cast<size_t>(share * 100000) - 1];
    EXPECT_GE(histogram.quantile(share), exact);
    EXPECT_LE(histogram.quantile(share), exact * (1 + 1.0f / 16));
  }
  EXPECT_EQ(histogram.quantile(1.0), sorted.back());
  EXPECT_EQ(MagnitudeHistogram().quantile(0.5), 0.0f);
}

TEST(Estimate, GrowsWithTheModelAndTheText) {
  ModelConfig config;
  config.hidden = 64, config.layers = 2, config.heads = 4, config.kv_heads = 2, config.head_dim = 16;
  config.intermediate = 128, config.vocab = 500;
  CalibrationOptions options;
  options.tokens = 1024;
  const double once = calibration_flops(config, options);
  // By hand, without the order: writing and running the weights, H, factors, choices.
  options.measure_sensitivity = false;
  const double weights = 2.0 * (128 * 64 + 64 * 64 + 3 * 64 * 128), inputs = 2.0 * (3 * 64 * 64 + 128 * 128);
  const double cubes = 2.0 * (3.0 * 64 * 64 * 64 + 128.0 * 128 * 128);
  const double choices = 2.0 * 3 * (128.0 * 64 * 64 + 64.0 * 64 * 64 + 2 * 128.0 * 64 * 64 + 64.0 * 128 * 128);
  EXPECT_DOUBLE_EQ(calibration_flops(config, options),
                   1024 * (4 * weights + 2 * 500 * 64 + inputs) + cubes * 4 / 3 + choices);
  EXPECT_LT(calibration_flops(config, options), once);
  options.compensate = true;
  EXPECT_GT(calibration_flops(config, options), 2 * once);
  options.compensate.reset();
  config.layers = 4;
  options.measure_sensitivity = true;
  EXPECT_GT(calibration_flops(config, options), 1.5 * once);
  // All experts of a layer have their own H, choices and probes, though a token goes through few of them.
  ModelConfig sparse = config;
  sparse.experts.count = 32, sparse.experts.top = 1, sparse.experts.intermediate = config.intermediate;
  sparse.experts.layers.assign(4, true);
  options.measure_sensitivity = false;
  const double dense = calibration_flops(config, options), mlp_cubes = 4 * (64.0 * 64 * 64 + 128.0 * 128 * 128);
  const double mlp_choices = 4 * 3 * (2 * 128.0 * 64 * 64 + 64.0 * 128 * 128);
  EXPECT_DOUBLE_EQ(calibration_flops(sparse, options), dense + 31 * (mlp_cubes * 4 / 3 + mlp_choices));
  options.measure_sensitivity = true;
  EXPECT_GT(calibration_flops(sparse, options), 5 * calibration_flops(config, options));
  ThreadPool threads(1);
  const double seconds = estimate_calibration(config, options, threads);
  EXPECT_GT(seconds, 0.0);
  EXPECT_LT(seconds, 10.0);
}

}  // namespace
}  // namespace nfp
