// Conversions between FP32 and the narrow float formats, one value at a time. Every vector path is tested
// against these. Bits are carried as unsigned integers: fp16 and bf16 in uint16_t, E4M3 in uint8_t.
//
// E4M3 is the OCP FP8 format (arXiv 2209.05433): bias 7, no infinity, S.1111.111 is NaN, largest 448.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace nfp {

inline float fp16_to_fp32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t biased = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (biased << 23) | (mantissa << 13));
}

// Round to nearest even; overflow gives infinity; NaN stays a (quiet) NaN.
inline uint16_t fp32_to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 puts fp16's subnormal unit (2^-24) at the last bit
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

inline float bf16_to_fp32(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

// Round to nearest even; NaN stays a (quiet) NaN.
inline uint16_t fp32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float e4m3_to_fp32(uint8_t code) {
  if ((code & 0x7fu) == 0x7fu) return std::bit_cast<float>(0x7fc00000u | (static_cast<uint32_t>(code & 0x80u) << 24));
  // As fp16 bits (sign, exponent and mantissa moved into place) the value is code * 2^-8, subnormals included.
  const auto half = static_cast<uint16_t>(((code & 0x80u) << 8) | ((code & 0x7fu) << 7));
  return fp16_to_fp32(half) * 256.0f;
}

// Round to nearest even; magnitudes over 448 saturate (as cvt.rn.satfinite.e4m3x2 does); NaN stays NaN.
inline uint8_t fp32_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // >= 448
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 puts E4M3's subnormal unit (2^-9) at the last bit
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u));
  }
  const uint32_t odd = (magnitude >> 20) & 1u;
  return static_cast<uint8_t>(sign | ((magnitude - 0x3c000000u + 0x7ffffu + odd) >> 20));
}

}  // namespace nfp
