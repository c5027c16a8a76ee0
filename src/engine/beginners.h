// Which sequence is the first to go on with a block, by the block's key. Filled anew for each step, with all sequences
// that there are, so it is small and keeps its memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/prefix_key.h"
#include "engine/sequence.h"

namespace nfp {

class Beginners {
 public:
  // Forgets all; at most so many come now.
  void clear(size_t most) {
    slots_.assign(std::bit_ceil(2 * std::max<size_t>(most, 8)), {});
    entries_.clear();
  }
  // Who came with this key before: the first that is exact, as it gives to all, or where none is the first of them; the
  // sequence itself where nobody did.
  const Sequence& enter(const PrefixKey& key, const Sequence& sequence, bool exact) {
    const auto tag = static_cast<uint32_t>(key.high);
    for (size_t i = PrefixKeyHash()(key);; ++i) {
      Slot& slot = slots_[i & (slots_.size() - 1)];
      if (slot.entry == 0) {
        entries_.push_back({key, &sequence, exact});
        slot = {tag, static_cast<uint32_t>(entries_.size())};
        return sequence;
      }
      if (slot.tag != tag) continue;
      Entry& entry = entries_[slot.entry - 1];
      if (entry.key != key) continue;
      const Sequence& before = *entry.sequence;
      if (exact && !entry.exact) entry.sequence = &sequence, entry.exact = true;
      return before;
    }
  }

 private:
  struct Entry {
    PrefixKey key;
    const Sequence* sequence = nullptr;
    bool exact = false;
  };
  struct Slot {
    uint32_t tag = 0;
    uint32_t entry = 0;  // index + 1; 0 = none
  };
  std::vector<Slot> slots_;  // at most half of them are taken
  std::vector<Entry> entries_;
};

}  // namespace nfp
