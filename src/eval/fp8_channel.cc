#include "eval/fp8_channel.h"

#include <algorithm>
#include <cmath>

#include "base/float_types.h"

namespace nfp {

float quantise_fp8_channel(std::span<const uint16_t> fp16_row, uint8_t* codes) {
  float largest = 0;
  for (uint16_t w : fp16_row) largest = std::max(largest, std::abs(fp16_to_fp32(w)));
  constexpr float kSmallestNormal = 0x1p-14f;
  float scale = largest > 0 ? largest / 448.0f : 1.0f;
  if (scale >= kSmallestNormal) scale = fp16_to_fp32(fp32_to_fp16(scale));
  for (size_t i = 0; i < fp16_row.size(); ++i) codes[i] = fp32_to_e4m3(fp16_to_fp32(fp16_row[i]) / scale);
  return scale;
}

}  // namespace nfp
