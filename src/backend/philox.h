// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds of a bijection of
// a 128-bit counter under a 64-bit key. A row's random number depends on its seed and draw only.
#pragma once

#include <array>
#include <cstdint>

namespace nfp {

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * counter[0];
    const uint64_t b = uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits.
constexpr double uniform(uint64_t seed, uint64_t draw) {
  const auto words = philox4x32({static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32), 0, 0},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{words[0]} << 32) | words[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace nfp
