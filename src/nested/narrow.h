// FP32 -> FP16 without branches, so that loops over rows vectorise. Equal to fp32_to_fp16 of base/float_types.h on
// everything but NaN (whose callers have refused it before).
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace nfp {

// A number whose addition moves FP16's rounding position, for a magnitude in the binade of `bits`, to FP32's last bit:
// FP32 then rounds to nearest even exactly where FP16 would, subnormals (unit 2^-24) included.
inline uint32_t fp16_rounding_magic(uint32_t magnitude_bits) {
  const uint32_t binade = magnitude_bits & 0x7f800000u;
  const uint32_t normal = binade < 0x38800000u ? 0x38800000u : binade;
  return normal + (13u << 23);
}

// |x| rounded to FP16's grid, for 0 <= x <= 2^16.
inline float round_to_fp16(float x) {
  const float magic = std::bit_cast<float>(fp16_rounding_magic(std::bit_cast<uint32_t>(x)));
  return (x + magic) - magic;
}

inline uint16_t narrow_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t clamped = magnitude > 0x47800000u ? 0x47800000u : magnitude;  // 2^16 becomes infinity below
  const uint32_t magic = fp16_rounding_magic(clamped);
  const uint32_t units = std::bit_cast<uint32_t>(std::bit_cast<float>(clamped) + std::bit_cast<float>(magic)) - magic;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | ((((magic >> 23) - 126u) << 10) + units));
}

void narrow_to_fp16(std::span<const float> values, uint16_t* out);

}  // namespace nfp
