// How one step of the engine computes its linear layers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nfp {

enum class Precision : uint8_t {
  kFp16,     // both bytes: exact FP16 weights, 16/32-bit activations
  kFp8,      // upper bytes only, 16/32-bit activations (what a CPU wants: half the traffic)
  kFp8W8A8,  // upper bytes and E4M3 activations with one scale a token (what Hopper's FP8 tensor cores compute)
};

inline constexpr size_t kPrecisionCount = 3;
inline constexpr std::array<std::string_view, kPrecisionCount> kPrecisionNames = {"fp16", "fp8", "fp8-w8a8"};

constexpr std::string_view name_of(Precision precision) { return kPrecisionNames[static_cast<size_t>(precision)]; }

constexpr std::optional<Precision> precision_from_name(std::string_view name) {
  for (size_t i = 0; i < kPrecisionCount; ++i) {
    if (kPrecisionNames[i] == name) return static_cast<Precision>(i);
  }
  return std::nullopt;
}

// What FP8 means where nobody says which, by device: what is the faster one there.
inline constexpr Precision kFp8OnCpu = Precision::kFp8, kFp8OnGpu = Precision::kFp8W8A8;

constexpr bool is_exact(Precision precision) { return precision == Precision::kFp16; }

}  // namespace nfp
