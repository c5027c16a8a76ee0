// How a row draws its token: the tokens race. Token i, of weight w, arrives at E / w, where E is exponential with mean
// 1, and whoever arrives first is drawn: each with a probability of its weight's share (the Gumbel-max trick on another
// scale: Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014, section 2).
//
// Each token has an E of its own, which depends on the request's seed, the draw and the token alone. So a limit (top-k,
// top-p, min-p) takes runners away and changes nothing for the others; and two rows of logits that nearly agree draw
// the same token with a probability of at least (1 - d) / (1 + d), d their distance in total variation (Daliri, Musco
// and Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024, with this use of it),
// however large the vocabulary is. Drafts live on that: where a number between 0 and 1 picks a place in the running sum
// of weights instead, all small differences before that place add up.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "backend/philox.h"

#ifdef __CUDACC__
#define NFP_HOST_AND_DEVICE __host__ __device__
#else
#define NFP_HOST_AND_DEVICE
#endif

namespace nfp {

// All that a row's random numbers depend on, but for the token.
struct RaceKey {
  uint32_t key;
  uint32_t high;
};
constexpr RaceKey race_key(uint64_t seed, uint64_t draw) {
  const auto words = philox4x32({static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32), 0, 0},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return {words[0], words[1]};
}

// A token's 32 random bits are 16 coarse ones, which show of nearly all tokens that they are late, and 16 fine ones.
// Four tokens' lie in two words, 16 bits after 16 bits: of 4 * four and the three after it.
constexpr std::array<uint32_t, 2> coarse_words(RaceKey k, uint32_t four) { return philox2x32({four, k.high}, k.key); }
inline constexpr uint32_t kFineBit = 0x80000000u;  // of the counter
constexpr std::array<uint32_t, 2> fine_words(RaceKey k, uint32_t four) {
  return philox2x32({four, k.high ^ kFineBit}, k.key);
}
constexpr uint32_t race_word(RaceKey k, int32_t id) {
  const uint32_t four = static_cast<uint32_t>(id) / 4, at = static_cast<uint32_t>(id) % 4;
  const auto coarse = coarse_words(k, four), fine = fine_words(k, four);
  const uint32_t c = at < 2 ? coarse[0] : coarse[1], f = at < 2 ? fine[0] : fine[1];
  return at % 2 == 0 ? c << 16 | (f & 0xffffu) : (c & 0xffff0000u) | f >> 16;
}

// A token's E: between 2^-33 and 23, where the word is spread evenly over (0, 1).
inline constexpr float kLeastLog2OfExponential = -33.0f;
NFP_HOST_AND_DEVICE inline double exponential_of(uint32_t word) {
  return -std::log1p(-(static_cast<double>(word) + 0.5) * 0x1p-32);
}

// When a token arrives whose weight is exp((logit - maximum) * factor).
NFP_HOST_AND_DEVICE inline double arrival_of(uint32_t word, float logit, float maximum, float factor) {
  return exponential_of(word) *
         std::exp((static_cast<double>(maximum) - static_cast<double>(logit)) * static_cast<double>(factor));
}

}  // namespace nfp

#undef NFP_HOST_AND_DEVICE
