// Token texts by id and ids by text. Made for fast loading: the texts lie in one buffer, the hash table holds ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nfp::text {

// Mixes 8 bytes at a time; not for keys that an enemy may choose without bound (tables here are bounded by a file).
uint64_t hash_bytes(std::string_view bytes);

// Both readers refuse longer tokens: deriving merges is quadratic in a token's length, and looking for added tokens may
// take a token's length for each byte of a text. Real vocabularies stay below 1 KB: the longest are runs of spaces.
inline constexpr size_t kMaxTokenBytes = 4096;

class Vocabulary {
 public:
  static constexpr int32_t kNone = -1;

  // Room for `tokens` entries of `bytes` bytes in all; a hint.
  void reserve(size_t tokens, size_t bytes);
  enum class Added { kYes, kIdTaken, kTextTaken };
  // Ids need not be contiguous nor come in order. 0 <= id < 2^30.
  Added add(int32_t id, std::string_view text);

  int32_t find(std::string_view text) const;  // kNone when absent
  bool has(int32_t id) const { return id >= 0 && id < id_limit() && entries_[static_cast<size_t>(id)].present; }
  std::string_view text(int32_t id) const {  // empty when absent
    if (!has(id)) return {};
    const Entry& entry = entries_[static_cast<size_t>(id)];
    return {bytes_.data() + entry.offset, entry.length};
  }
  int32_t id_limit() const { return static_cast<int32_t>(entries_.size()); }  // largest id + 1
  size_t size() const { return size_; }

 private:
  struct Entry {
    uint64_t offset = 0;
    uint32_t length = 0;
    bool present = false;
  };
  struct Slot {
    int32_t id = kNone;
    uint32_t tag = 0;  // upper half of the hash
  };
  void rehash(size_t slots);

  std::string bytes_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;  // linear probing; a power of two, at most half full
  size_t size_ = 0;
};

}  // namespace nfp::text
