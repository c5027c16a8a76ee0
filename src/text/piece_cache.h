// Remembers the tokens of short pieces, since the same words come again and again. One per thread; a slot holds the
// latest piece that fell on it, so the cache never grows.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

#include "text/vocabulary.h"

namespace nfp::text {

class PieceCache {
 public:
  static constexpr size_t kMaxBytes = 26;
  static constexpr size_t kMaxTokens = 8;

  // Makes the cache empty unless it already serves `owner` (never 0).
  void serve(uint64_t owner) {
    if (owner_ == owner) return;
    if (slots_ == nullptr) {
      slots_ = std::make_unique<Slot[]>(kSlots);
    } else {
      std::memset(static_cast<void*>(slots_.get()), 0, sizeof(Slot) * kSlots);
    }
    owner_ = owner;
  }

  // A place for a piece of 1 to kMaxBytes bytes; use find or put on it before the next slot().
  struct Place {
    size_t slot;
    uint32_t tag;
  };
  static Place place(std::string_view piece) {
    const uint64_t hash = hash_bytes(piece);
    return {static_cast<size_t>(hash % kSlots), static_cast<uint32_t>(hash >> 32)};
  }
  bool find(Place place, std::string_view piece, std::span<const int32_t>& tokens) const {
    const Slot& slot = slots_[place.slot];
    if (slot.tag != place.tag || slot.bytes != piece.size() ||
        std::memcmp(slot.text, piece.data(), piece.size()) != 0) {
      return false;
    }
    tokens = {slot.tokens, slot.count};
    return true;
  }
  // Ignores more than kMaxTokens.
  void put(Place place, std::string_view piece, std::span<const int32_t> tokens) {
    if (tokens.size() > kMaxTokens) return;
    Slot& slot = slots_[place.slot];
    slot.tag = place.tag;
    slot.bytes = static_cast<uint8_t>(piece.size());
    slot.count = static_cast<uint8_t>(tokens.size());
    std::memcpy(slot.text, piece.data(), piece.size());
    if (!tokens.empty()) std::memcpy(slot.tokens, tokens.data(), tokens.size_bytes());
  }

 private:
  static constexpr size_t kSlots = 1 << 14;  // 1 MiB
  struct Slot {                              // one cache line
    uint32_t tag;
    uint8_t bytes;  // 0: free
    uint8_t count;
    char text[kMaxBytes];
    int32_t tokens[kMaxTokens];
  };
  static_assert(sizeof(Slot) == 64);

  std::unique_ptr<Slot[]> slots_;
  uint64_t owner_ = 0;
};

}  // namespace nfp::text
