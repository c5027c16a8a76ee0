#include "base/float_types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace nfp {
namespace {

TEST(Fp16, EveryPatternRoundTrips) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = fp16_to_fp32(half);
    if ((bits & 0x7fffu) > 0x7c00u) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(std::isnan(fp16_to_fp32(fp32_to_fp16(value))));
    } else {
      EXPECT_EQ(fp32_to_fp16(value), half);
    }
  }
}

// The definition of round to nearest even: no other finite fp16 is nearer, and on a tie the mantissa is even.
TEST(Fp16, RoundsMidpointsToEven) {
  for (uint32_t bits = 0; bits < 0x7bffu; ++bits) {
    const float low = fp16_to_fp32(static_cast<uint16_t>(bits));
    const float high = fp16_to_fp32(static_cast<uint16_t>(bits + 1));
    const float middle = 0.5f * (low + high);  // exact in fp32
    const auto even = static_cast<uint16_t>((bits & 1u) ? bits + 1 : bits);
    EXPECT_EQ(fp32_to_fp16(middle), even);
    EXPECT_EQ(fp32_to_fp16(std::nextafter(middle, low)), bits);
    EXPECT_EQ(fp32_to_fp16(std::nextafter(middle, high)), bits + 1);
  }
  EXPECT_EQ(fp32_to_fp16(65519.0f), 0x7bffu);
  EXPECT_EQ(fp32_to_fp16(65520.0f), 0x7c00u);
  EXPECT_EQ(fp32_to_fp16(-std::numeric_limits<float>::infinity()), 0xfc00u);
}

TEST(Bf16, EveryPatternRoundTripsAndRoundsToEven) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = bf16_to_fp32(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_to_fp32(fp32_to_bf16(value))));
    } else {
      EXPECT_EQ(fp32_to_bf16(value), bits);
    }
  }
  EXPECT_EQ(fp32_to_bf16(std::bit_cast<float>(0x3f808000u)), 0x3f80u);
  EXPECT_EQ(fp32_to_bf16(std::bit_cast<float>(0x3f818000u)), 0x3f82u);
  EXPECT_EQ(fp32_to_bf16(std::bit_cast<float>(0x3f808001u)), 0x3f81u);
}

TEST(E4m3, EveryCodeRoundTripsAndMidpointsGoToEven) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = e4m3_to_fp32(static_cast<uint8_t>(code));
    if ((code & 0x7fu) == 0x7fu) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(fp32_to_e4m3(value) & 0x7f, 0x7f);
    } else {
      EXPECT_EQ(fp32_to_e4m3(value), code);
    }
  }
  for (uint32_t code = 0; code < 0x7eu; ++code) {
    const float low = e4m3_to_fp32(static_cast<uint8_t>(code));
    const float high = e4m3_to_fp32(static_cast<uint8_t>(code + 1));
    const float middle = 0.5f * (low + high);
    EXPECT_EQ(fp32_to_e4m3(middle), (code & 1u) ? code + 1 : code);
    EXPECT_EQ(fp32_to_e4m3(std::nextafter(middle, low)), code);
    EXPECT_EQ(fp32_to_e4m3(std::nextafter(middle, high)), code + 1);
  }
  EXPECT_EQ(e4m3_to_fp32(0x7e), 448.0f);
  EXPECT_EQ(e4m3_to_fp32(0x01), 0x1p-9f);
  EXPECT_EQ(fp32_to_e4m3(1e30f), 0x7e);
  EXPECT_EQ(fp32_to_e4m3(-std::numeric_limits<float>::infinity()), 0xfe);
}

}  // namespace
}  // namespace nfp
