#include "engine/block_manager.h"

#include <algorithm>
#include <cassert>

namespace nfp {
namespace {

// The finaliser of SplitMix64: every input bit changes every output bit with probability about 1/2.
uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
  return x;
}

}  // namespace

PrefixKey extend(const PrefixKey& parent, std::span<const int32_t> tokens) {
  PrefixKey key = {mix(parent.high + 0x9e3779b97f4a7c15ull), mix(parent.low + 0xd1b54a32d192ed03ull)};
  for (int32_t token : tokens) {
    const auto value = static_cast<uint64_t>(static_cast<uint32_t>(token));
    key.high = mix(key.high ^ (value + 0x9e3779b97f4a7c15ull));
    key.low = mix((key.low + value) * 0xff51afd7ed558ccdull + 0x2545f4914f6cdd1dull);
  }
  return key;
}

BlockManager::BlockManager(int32_t blocks, int32_t block_size, bool prefix_caching)
    : block_size_(block_size), caching_(prefix_caching), available_(blocks) {
  blocks_.resize(static_cast<size_t>(blocks));
  for (int32_t i = 0; i < blocks; ++i) at(i).free_place = free_.insert(free_.end(), i);
}

std::optional<int32_t> BlockManager::allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t block = free_.front();
  if (at(block).published) unpublish(block);
  acquire(block);
  return block;
}

void BlockManager::acquire(int32_t block) {
  Block& b = at(block);
  if (b.owners++ == 0) {
    free_.erase(b.free_place);
    --available_;
  }
}

void BlockManager::release(int32_t block) {
  Block& b = at(block);
  assert(b.owners > 0);
  if (--b.owners > 0) return;
  ++available_;
  b.free_place = free_.insert(b.published ? free_.end() : free_.begin(), block);
}

void BlockManager::unpublish(int32_t block) {
  Block& b = at(block);
  changed_.set(place_of(b.key));
  published_.erase(b.key);
  b.published = false;
  b.tokens.clear();
}

PrefixMatch BlockManager::match(std::span<const int32_t> tokens, int64_t max_tokens, bool exact_only,
                                const PrefixKey& scope) {
  PrefixMatch found;
  if (!caching_) return found;
  PrefixKey key = scope;
  const auto size = static_cast<size_t>(block_size_);
  const size_t limit = std::min(tokens.size(), static_cast<size_t>(std::max<int64_t>(0, max_tokens)));
  for (size_t first = 0; first + size <= limit; first += size) {
    const auto part = tokens.subspan(first, size);
    key = extend(key, part);
    const auto place = published_.find(key);
    if (place == published_.end()) break;
    const Block& b = at(place->second);
    if (exact_only && !b.exact) break;
    if (!std::equal(part.begin(), part.end(), b.tokens.begin(), b.tokens.end())) break;
    acquire(place->second);
    found.blocks.push_back(place->second);
    found.exact.push_back(b.exact);
    found.fp16_tokens.push_back(b.fp16_tokens);
  }
  return found;
}

void BlockManager::publish(int32_t block, const PrefixKey& key, std::span<const int32_t> tokens, bool exact,
                           int32_t fp16_tokens) {
  Block& b = at(block);
  if (!caching_ || b.published) return;
  if (const auto place = published_.find(key); place != published_.end()) {
    const int32_t other = place->second;
    if (at(other).exact || !exact) return;
    unpublish(other);
    // A free block that no longer holds anything findable is the first to be reused.
    if (at(other).owners == 0) free_.splice(free_.begin(), free_, at(other).free_place);
  }
  b.published = true;
  b.exact = exact;
  b.fp16_tokens = fp16_tokens;
  b.key = key;
  b.tokens.assign(tokens.begin(), tokens.end());
  published_.emplace(key, block);
  changed_.set(place_of(key));
}

}  // namespace nfp
