#include "text/vocabulary.h"

#include <bit>
#include <cstring>

namespace nfp::text {
namespace {

__extension__ using Wide = unsigned __int128;

uint64_t mix(uint64_t a, uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

template <typename T>
uint64_t load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Odd constants with about half their bits set (digits of the golden ratio and of sqrt 2).
constexpr uint64_t kA = 0x9E3779B97F4A7C15;
constexpr uint64_t kB = 0x6A09E667F3BCC909;

}  // namespace

uint64_t hash_bytes(std::string_view bytes) {
  const char* data = bytes.data();
  const size_t size = bytes.size();
  if (size <= 16) {
    uint64_t a = 0;
    uint64_t b = 0;
    if (size >= 8) {
      a = load<uint64_t>(data);
      b = load<uint64_t>(data + size - 8);
    } else if (size >= 4) {
      a = load<uint32_t>(data);
      b = load<uint32_t>(data + size - 4);
    } else if (size > 0) {
      a = load<uint8_t>(data) << 16 | load<uint8_t>(data + size / 2) << 8 | load<uint8_t>(data + size - 1);
    }
    return mix(mix(a ^ kA, b ^ kB) ^ kB, size ^ kA);
  }
  uint64_t hash = kA ^ size;
  for (size_t i = 0; i + 16 < size; i += 16) {
    hash = mix(load<uint64_t>(data + i) ^ kB, load<uint64_t>(data + i + 8) ^ hash);
  }
  return mix(mix(load<uint64_t>(data + size - 16) ^ kA, load<uint64_t>(data + size - 8) ^ hash) ^ kB, size ^ kA);
}

void Vocabulary::reserve(size_t tokens, size_t bytes) {
  entries_.reserve(tokens);
  bytes_.reserve(bytes);
  if (const size_t slots = std::bit_ceil(tokens * 2 + 16); slots > slots_.size()) rehash(slots);
}

Vocabulary::Added Vocabulary::add(int32_t id, std::string_view text) {
  if (has(id)) return Added::kIdTaken;
  if (slots_.size() < (size_ + 1) * 2) rehash(slots_.empty() ? 64 : slots_.size() * 2);
  const uint64_t hash = hash_bytes(text);
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t slot = hash & (slots_.size() - 1);
  for (; slots_[slot].id != kNone; slot = (slot + 1) & (slots_.size() - 1)) {
    if (slots_[slot].tag == tag && this->text(slots_[slot].id) == text) return Added::kTextTaken;
  }
  slots_[slot] = {id, tag};
  if (id >= id_limit()) entries_.resize(static_cast<size_t>(id) + 1);
  entries_[static_cast<size_t>(id)] = {bytes_.size(), static_cast<uint32_t>(text.size()), true};
  bytes_ += text;
  ++size_;
  return Added::kYes;
}

int32_t Vocabulary::find(std::string_view text) const {
  if (slots_.empty()) return kNone;
  const uint64_t hash = hash_bytes(text);
  const auto tag = static_cast<uint32_t>(hash >> 32);
  for (size_t slot = hash & (slots_.size() - 1); slots_[slot].id != kNone; slot = (slot + 1) & (slots_.size() - 1)) {
    if (slots_[slot].tag == tag && this->text(slots_[slot].id) == text) return slots_[slot].id;
  }
  return kNone;
}

void Vocabulary::rehash(size_t slots) {
  const std::vector<Slot> old = std::move(slots_);
  slots_.assign(slots, Slot{});
  for (const Slot& entry : old) {
    if (entry.id == kNone) continue;
    size_t slot = hash_bytes(text(entry.id)) & (slots - 1);
    while (slots_[slot].id != kNone) slot = (slot + 1) & (slots - 1);
    slots_[slot] = entry;
  }
}

}  // namespace nfp::text
