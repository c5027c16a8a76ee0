// Logits as keys: unsigned integers in the logits' order.
#pragma once

#include <cstdint>

namespace nfp::cuda {

inline constexpr uint32_t kPaddingKey = 0;  // past the vocabulary
inline constexpr uint32_t kNaNKey = 1;
inline constexpr uint32_t kMinusInfinityKey = 0x007fffffu;
inline constexpr uint32_t kLowestKey = kMinusInfinityKey + 1;  // of tokens with a weight

__device__ __forceinline__ uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 = 0
  const uint32_t key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return logit != logit ? kNaNKey : key;
}
__device__ __forceinline__ bool is_finite_key(uint32_t key) {
  return key > kMinusInfinityKey && key < 0xff800000u;  // +infinity's
}
// NaN for NaN and padding.
__device__ __forceinline__ float logit_of(uint32_t key) {
  // key ^ ~(sign & 0x7fffffff) in one operation, which compilers do not find.
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, 0x7fffffff, 0x87;" : "=r"(bits) : "r"(key), "r"(static_cast<int32_t>(key) >> 31));
  return __uint_as_float(bits);
}

// A token with its logit's key, of which the first of the likeliest is the largest.
__device__ __forceinline__ uint64_t candidate(uint32_t key, int32_t token) {
  return uint64_t{key} << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ uint32_t candidate_key(uint64_t candidate) { return static_cast<uint32_t>(candidate >> 32); }
__device__ __forceinline__ int32_t candidate_token(uint64_t candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

}  // namespace nfp::cuda
