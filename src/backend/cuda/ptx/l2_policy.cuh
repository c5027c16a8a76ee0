// L2 priorities for one copy (the 64-bit encodings that createpolicy.fractional yields for a fraction of 1).
#pragma once

#include <cstdint>

namespace nfp::cuda::ptx {

inline constexpr uint64_t kEvictFirst = 0x12f0000000000000ull;
inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14f0000000000000ull;

}  // namespace nfp::cuda::ptx
