// Identifies a run of tokens from the start of a sequence to a block's end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace nfp {

struct PrefixKey {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const PrefixKey&, const PrefixKey&) = default;
};

struct PrefixKeyHash {
  size_t operator()(const PrefixKey& key) const { return static_cast<size_t>(key.low); }
};

// Key of `tokens` (one block) after `parent` (at the start of a sequence: its request's scope).
PrefixKey extend(const PrefixKey& parent, std::span<const int32_t> tokens);

}  // namespace nfp
