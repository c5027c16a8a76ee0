#include "eval/fp8_channel.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <vector>

#include "base/float_types.h"

namespace nfp {
namespace {

TEST(Fp8Channel, TheLargestWeightBecomes448AndTheScaleIsFp16) {
  EXPECT_TRUE(rc::check([](const std::vector<int16_t>& bits) {
    std::vector<uint16_t> row;
    for (int16_t b : bits) row.push_back(static_cast<uint16_t>(b) & 0xfbffu);  // finite
    std::vector<uint8_t> out(row.size());
    const float scale = quantise_fp8_channel(row, out.data());
    RC_ASSERT(scale > 0.0f);
    float largest = 0;
    for (uint16_t w : row) largest = std::max(largest, std::abs(fp16_to_fp32(w)));
    for (size_t i = 0; i < row.size(); ++i) {
      const float w = fp16_to_fp32(row[i]);
      const float back = e4m3_to_fp32(out[i]) * scale;
      // Half an ulp of E4M3: 2^-4 relative for normal numbers, 2^-10 of the scale for subnormal ones. A scale rounded
      // down by 2^-11 saturates what is less than that above 448.
      RC_ASSERT(std::abs(back - w) <= std::max(std::abs(w) * 0.0626f, scale * 0x1.01p-10f));
      if (std::abs(w) == largest && largest > 0) RC_ASSERT((out[i] & 0x7f) == 0x7e);
      if (scale >= 0x1p-14f) RC_ASSERT(fp16_to_fp32(fp32_to_fp16(scale)) == scale);
    }
  }));
}

TEST(Fp8Channel, ARowOfZerosHasScaleOne) {
  const std::vector<uint16_t> row = {0x0000, 0x8000};
  uint8_t out[2];
  EXPECT_EQ(quantise_fp8_channel(row, out), 1.0f);
  EXPECT_EQ(out[0], 0x00);
  EXPECT_EQ(out[1], 0x80);
}

}  // namespace
}  // namespace nfp
