// Philox4x32-10 and Philox2x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): ten rounds
// of a bijection of a counter of 128 bits under a key of 64, and of 64 bits under a key of 32.
#pragma once

#include <array>
#include <cstdint>

namespace nfp {

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhilox2x32Factor = 0xd256d193u, kPhiloxKeyStep = 0x9e3779b9u;

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * counter[0];
    const uint64_t b = uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += kPhiloxKeyStep;
    key[1] += 0xbb67ae85u;
  }
  return counter;
}

constexpr std::array<uint32_t, 2> philox2x32(std::array<uint32_t, 2> counter, uint32_t key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product = uint64_t{kPhilox2x32Factor} * counter[0];
    counter = {static_cast<uint32_t>(product >> 32) ^ counter[1] ^ key, static_cast<uint32_t>(product)};
    key += kPhiloxKeyStep;
  }
  return counter;
}

}  // namespace nfp
