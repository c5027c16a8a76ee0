#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

namespace nfp {
namespace {

Rope rope() { return {8, 10000.0f, {}}; }

TEST(Rope, FrequenciesFallGeometrically) {
  const auto f = rope_frequencies(rope(), 5);
  ASSERT_EQ(f.size(), 4u);
  EXPECT_DOUBLE_EQ(f[0], 1.0);
  EXPECT_NEAR(f[1], 0.1, 1e-15);
  EXPECT_NEAR(f[3], 1e-3, 1e-17);
}

TEST(Rope, Llama3KeepsShortWavesAndStretchesLongOnes) {
  Rope c = rope();
  c.scaling.kind = RopeScaling::Kind::kLlama3;
  c.scaling.factor = 8.0f;
  c.scaling.original_context = 1024;
  const auto plain = rope_frequencies(rope(), 5);
  const auto f = rope_frequencies(c, 5);
  EXPECT_DOUBLE_EQ(f[0], plain[0]);        // wavelength 6.28 < 256
  EXPECT_DOUBLE_EQ(f[3], plain[3] / 8.0);  // wavelength 6283 > 1024
  // wavelength 628.3 lies between: the rule's own interpolation.
  const double smooth = (1024 / (2 * M_PI / plain[2]) - 1.0) / 3.0;
  EXPECT_DOUBLE_EQ(f[2], (1 - smooth) * plain[2] / 8.0 + smooth * plain[2]);
}

TEST(Rope, TableHoldsCosinesThenSines) {
  const auto f = rope_frequencies(rope(), 5);
  const auto table = rope_table(rope(), 5);
  ASSERT_EQ(table.size(), 40u);
  for (size_t p = 0; p < 5; ++p) {
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_FLOAT_EQ(table[p * 8 + i], static_cast<float>(std::cos(static_cast<double>(p) * f[i])));
      EXPECT_FLOAT_EQ(table[p * 8 + 4 + i], static_cast<float>(std::sin(static_cast<double>(p) * f[i])));
    }
  }
}

// By hand: dim 8, theta 10000, original context 1000. A pair turns 1000 / wavelength times: 159, 15.9, 1.6, 0.16; the
// borders 32 and 1 turns lie at pairs 0.70 and 2.20, rounded 0 and 3.
TEST(Rope, YarnStretchesPairsThatTurnSeldom) {
  Rope c = rope();
  c.scaling.kind = RopeScaling::Kind::kYarn;
  c.scaling.factor = 4.0f;
  c.scaling.original_context = 1000;
  const auto plain = rope_frequencies(rope(), 5), f = rope_frequencies(c, 5);
  EXPECT_DOUBLE_EQ(f[0], plain[0]);
  EXPECT_NEAR(f[1], plain[1] * (2.0 / 3 + 1.0 / 3 / 4), 1e-15);
  EXPECT_NEAR(f[2], plain[2] * (1.0 / 3 + 2.0 / 3 / 4), 1e-16);
  EXPECT_DOUBLE_EQ(f[3], plain[3] / 4);
  c.scaling.truncate = false;
  const double low = std::log(1000 / (32 * 2 * M_PI)) / std::log(10.0),
               high = std::log(1000 / (2 * M_PI)) / std::log(10.0);
  const double stretched = (1 - low) / (high - low);
  EXPECT_NEAR(rope_frequencies(c, 5)[1], plain[1] * (1 - stretched + stretched / 4), 1e-15);
}

TEST(Rope, LongropeDividesByItsFactorsBeyondTheOriginalContext) {
  Rope c = rope();
  c.scaling.kind = RopeScaling::Kind::kLongrope;
  c.scaling.original_context = 100;
  c.scaling.short_factors = {1, 2, 4, 8};
  c.scaling.long_factors = {3, 5, 7, 9};
  c.scaling.attention_factor = 1.5f;
  const auto plain = rope_frequencies(rope(), 5);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(rope_frequencies(c, 100)[i], plain[i] / c.scaling.short_factors[i]);
    EXPECT_DOUBLE_EQ(rope_frequencies(c, 101)[i], plain[i] / c.scaling.long_factors[i]);
  }
  const auto table = rope_table(c, 3);
  EXPECT_FLOAT_EQ(table[0], 1.5f);
  EXPECT_FLOAT_EQ(table[8 + 4 + 1], 1.5f * static_cast<float>(std::sin(plain[1] / 2)));
}

}  // namespace
}  // namespace nfp
