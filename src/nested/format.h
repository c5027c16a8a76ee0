// One weight of the nested format: FP16 bits <-> an upper byte (a complete E4M3 number) and a lower byte
// (docs/format.md).
//
//   upper  E4M3 of w * 2^8, rounded to nearest even (or, for a calibrated weight, to the other neighbour)
//   lower  the low byte of w; its top bit is also in upper, and tells join whether upper was rounded up
//
// Source: NestedFP (arXiv 2506.02024), Algorithm 1. Exact for the 32,258 FP16 patterns with |w| <= 1.75.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace nfp {

inline constexpr uint16_t kNestableMaxBits = 0x3f00;  // FP16 of 1.75; 1.75 * 2^8 = 448 is E4M3's largest number
inline constexpr float kNestableMax = 1.75f;

struct NestedWeight {
  uint8_t upper = 0;
  uint8_t lower = 0;
  friend constexpr bool operator==(const NestedWeight&, const NestedWeight&) = default;
};

// |w| <= 1.75; false for infinities and NaN.
constexpr bool is_nestable(uint16_t w) { return (w & 0x7fffu) <= kNestableMaxBits; }

// Precondition: is_nestable(w).
constexpr NestedWeight split(uint16_t w) {
  const uint32_t magnitude = w & 0x7fffu;
  const uint32_t rounded = (magnitude + 0x3fu + ((magnitude >> 7) & 1u)) >> 7;
  return {static_cast<uint8_t>(((w >> 8) & 0x80u) | rounded), static_cast<uint8_t>(w & 0xffu)};
}

// The E4M3 number on the other side of w * 2^8, or the same one where w * 2^8 is itself an E4M3 number.
// Precondition: is_nestable(w).
constexpr uint8_t other_neighbour(uint16_t w) {
  if ((w & 0x7fu) == 0) return split(w).upper;
  const uint32_t down = ((w & 0x7fffu) >> 7) | ((w >> 8) & 0x80u);
  return static_cast<uint8_t>(split(w).upper == down ? down + 1 : down);
}

// The FP16 bits, exactly, for upper = split(w).upper as well as upper = other_neighbour(w).
constexpr uint16_t join(uint8_t upper, uint8_t lower) {
  const uint32_t truncated = upper - ((upper ^ (lower >> 7)) & 1u);
  return static_cast<uint16_t>(((truncated & 0x80u) << 8) | ((truncated & 0x7eu) << 7) | lower);
}

// The same over arrays of `count`; no two arrays overlap.
void split(std::span<const uint16_t> weights, uint8_t* upper, uint8_t* lower);
void join(const uint8_t* upper, const uint8_t* lower, size_t count, uint16_t* weights);

}  // namespace nfp
