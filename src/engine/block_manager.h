// Hands out KV blocks and remembers what full ones hold, so that equal prefixes are computed once. Pure bookkeeping: no
// tensor, no device. Block ids index the backend's KvCache.
//
// A block that is full is published under a key of all tokens up to its end. It stays findable after its last owner
// freed it, until its place is needed (least recently freed first). Keys and values written by an FP8 step differ from
// exact ones, so a published block carries whether everything up to its end was computed in FP16, and exact requests
// match only such blocks.
#pragma once

#include <bitset>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/prefix_key.h"

namespace nfp {

struct PrefixMatch {
  std::vector<int32_t> blocks;  // each acquired for the caller
  // Of each block: whether everything up to its end is exact, and how many of its own tokens FP16 steps computed.
  std::vector<bool> exact;
  std::vector<int32_t> fp16_tokens;
};

class BlockManager {
 public:
  BlockManager(int32_t blocks, int32_t block_size, bool prefix_caching);

  int32_t block_size() const { return block_size_; }
  int32_t total() const { return static_cast<int32_t>(blocks_.size()); }
  // Blocks that allocate() can give: never used ones and cached ones that nobody owns.
  int32_t available() const { return available_; }
  int32_t in_use() const { return total() - available_; }
  bool caching() const { return caching_; }

  // A block of unspecified contents with one owner, or nothing when all are owned.
  std::optional<int32_t> allocate();
  // One owner less.
  void release(int32_t block);

  // The longest published prefix of `tokens` in whole blocks, at most `max_tokens` long; its blocks get one owner more.
  // `scope` is the key of nothing: what was published under another one is not found.
  PrefixMatch match(std::span<const int32_t> tokens, int64_t max_tokens, bool exact_only, const PrefixKey& scope = {});
  // Whether match() would take the block of this key next.
  bool findable(const PrefixKey& key, bool exact_only) const {
    const auto place = published_.find(key);
    return place != published_.end() && (!exact_only || at(place->second).exact);
  }
  // Whether findable() may answer otherwise for this key than it did before the last forget_changes(). Now and then
  // also where it does not.
  bool changed(const PrefixKey& key) const { return changed_[place_of(key)]; }
  void forget_changes() { changed_.reset(); }
  // Makes an owned, full block findable. `tokens` are the block's own; `exact` and `fp16_tokens` as above. Where an
  // equal block is published already, that one stays (unless this one is exact and that one is not).
  void publish(int32_t block, const PrefixKey& key, std::span<const int32_t> tokens, bool exact, int32_t fp16_tokens);

 private:
  struct Block {
    int32_t owners = 0;
    bool published = false;
    bool exact = false;
    int32_t fp16_tokens = 0;
    PrefixKey key;
    std::vector<int32_t> tokens;  // guards against a key collision
    std::list<int32_t>::iterator free_place;
  };
  void acquire(int32_t block);
  void unpublish(int32_t block);
  static size_t place_of(const PrefixKey& key) { return key.high % kChanged; }
  const Block& at(int32_t block) const { return blocks_[static_cast<size_t>(block)]; }
  Block& at(int32_t block) { return blocks_[static_cast<size_t>(block)]; }

  const int32_t block_size_;
  const bool caching_;
  int32_t available_ = 0;
  std::vector<Block> blocks_;
  std::list<int32_t> free_;  // front is reused first: unpublished ones, then the longest unused
  std::unordered_map<PrefixKey, int32_t, PrefixKeyHash> published_;
  // By place_of() of what was published or unpublished: a step changes some hundreds of keys, and fixed memory is
  // enough where nobody asks.
  static constexpr size_t kChanged = 1 << 15;
  std::bitset<kChanged> changed_;
};

}  // namespace nfp
