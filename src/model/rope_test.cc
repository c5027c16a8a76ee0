#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

namespace nfp {
namespace {

ModelConfig config() {
  ModelConfig c;
  c.head_dim = 8;
  c.rope_theta = 10000.0f;
  return c;
}

TEST(Rope, FrequenciesFallGeometrically) {
  const auto f = rope_frequencies(config(), {});
  ASSERT_EQ(f.size(), 4u);
  EXPECT_DOUBLE_EQ(f[0], 1.0);
  EXPECT_NEAR(f[1], 0.1, 1e-15);
  EXPECT_NEAR(f[3], 1e-3, 1e-17);
}

TEST(Rope, Llama3KeepsShortWavesAndStretchesLongOnes) {
  ModelConfig c = config();
  c.rope_scaling = {RopeScaling::Kind::kLlama3, 8.0f, 1.0f, 4.0f, 1024};
  const auto plain = rope_frequencies(config(), {});
  const auto f = rope_frequencies(c, {});
  EXPECT_DOUBLE_EQ(f[0], plain[0]);        // wavelength 6.28 < 256
  EXPECT_DOUBLE_EQ(f[3], plain[3] / 8.0);  // wavelength 6283 > 1024
  // wavelength 628.3 lies between: the rule's own interpolation.
  const double smooth = (1024 / (2 * M_PI / plain[2]) - 1.0) / 3.0;
  EXPECT_DOUBLE_EQ(f[2], (1 - smooth) * plain[2] / 8.0 + smooth * plain[2]);
}

TEST(Rope, FactorsDivide) {
  const float factors[] = {1, 2, 4, 8};
  const auto f = rope_frequencies(config(), factors);
  const auto plain = rope_frequencies(config(), {});
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(f[i], plain[i] / factors[i]);
}

TEST(Rope, TableHoldsCosinesThenSines) {
  const auto f = rope_frequencies(config(), {});
  const auto table = rope_table(f, 5);
  ASSERT_EQ(table.size(), 40u);
  for (size_t p = 0; p < 5; ++p) {
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_FLOAT_EQ(table[p * 8 + i], static_cast<float>(std::cos(static_cast<double>(p) * f[i])));
      EXPECT_FLOAT_EQ(table[p * 8 + 4 + i], static_cast<float>(std::sin(static_cast<double>(p) * f[i])));
    }
  }
}

}  // namespace
}  // namespace nfp
