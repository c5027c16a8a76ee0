// Powers of two in FP32.
#pragma once

#include <bit>
#include <cstdint>

namespace nfp {

// 2^exponent, for exponents of normal numbers: -126 to 127.
constexpr float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

}  // namespace nfp
