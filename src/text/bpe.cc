#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>

#include "text/byte_level.h"
#include "text/utf8.h"

namespace nfp::text {
namespace {

// Up to this many symbols, looking for the lowest rank in an array beats a heap.
constexpr size_t kShort = 48;

uint64_t slot_hash(uint64_t key) {
  key *= 0x9E3779B97F4A7C15;
  return key ^ key >> 32;
}

}  // namespace

Bpe::Bpe(Vocabulary vocabulary, const BpeOptions& options) : TokenModel(std::move(vocabulary)), options_(options) {
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string character;
    append_utf8(character, options_.byte_level ? byte_level_code_point(static_cast<uint8_t>(byte)) : byte);
    byte_ids_[byte] = vocabulary_.find(character);
    fallback_ids_[byte] = vocabulary_.find(fmt::format("<0x{:02X}>", byte));
  }
  if (options_.byte_level && options_.ignore_merges) {
    raw_.reserve(vocabulary_.size(), 8 * vocabulary_.size());
    for (int32_t id = 0; id < vocabulary_.id_limit(); ++id) {
      if (!vocabulary_.has(id)) continue;
      if (const auto bytes = byte_level_decode(vocabulary_.text(id))) raw_.add(id, *bytes);
    }
  }
}

void Bpe::reserve_merges(size_t count) {
  if (const size_t slots = std::bit_ceil(count * 2 + 16); slots > pairs_.size()) rehash(slots);
}

Status Bpe::add_merge(std::string_view left, std::string_view right, uint32_t rank) {
  const auto id_of = [&](std::string_view text) -> Result<int32_t> {
    const int32_t id = vocabulary_.find(text);
    if (id == Vocabulary::kNone) return error(ErrorCode::kInvalidInput, "'{}' is not in the vocabulary", text);
    return id;
  };
  NFP_ASSIGN_OR_RETURN(const int32_t left_id, id_of(left));
  NFP_ASSIGN_OR_RETURN(const int32_t right_id, id_of(right));
  std::string joined(left);
  joined += right;
  NFP_ASSIGN_OR_RETURN(const int32_t joined_id, id_of(joined));
  put_pair(left_id, right_id, rank, joined_id);
  return ok_status();
}

void Bpe::derive_merges(std::span<const float> scores, const std::vector<bool>& apart) {
  std::vector<int32_t> by_score;
  for (int32_t id = 0; id < vocabulary_.id_limit(); ++id) {
    const auto index = static_cast<size_t>(id);
    if (vocabulary_.has(id) && !(index < apart.size() && apart[index])) by_score.push_back(id);
  }
  const auto score = [&](int32_t id) {
    const auto index = static_cast<size_t>(id);
    return index < scores.size() && scores[index] == scores[index] ? scores[index] : -std::numeric_limits<float>::max();
  };
  std::stable_sort(by_score.begin(), by_score.end(), [&](int32_t a, int32_t b) { return score(a) > score(b); });
  uint32_t rank = 0;
  for (size_t i = 0; i < by_score.size(); ++i) {
    const int32_t id = by_score[i];
    if (i > 0 && score(id) != score(by_score[i - 1])) rank = static_cast<uint32_t>(i);
    const std::string_view text = vocabulary_.text(id);
    for (size_t cut = 1; cut < text.size(); ++cut) {
      if (is_utf8_continuation(text[cut])) continue;
      const int32_t left = vocabulary_.find(text.substr(0, cut));
      if (left == Vocabulary::kNone) continue;
      const int32_t right = vocabulary_.find(text.substr(cut));
      if (right != Vocabulary::kNone) put_pair(left, right, rank, id);
    }
  }
}

const Bpe::Pair* Bpe::find_pair(int32_t left, int32_t right) const {
  if (pairs_.empty()) return nullptr;
  const uint64_t key = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  const size_t mask = pairs_.size() - 1;
  for (size_t slot = slot_hash(key) & mask; pairs_[slot].key != kNoKey; slot = (slot + 1) & mask) {
    if (pairs_[slot].key == key) return &pairs_[slot];
  }
  return nullptr;
}

void Bpe::put_pair(int32_t left, int32_t right, uint32_t rank, int32_t id) {
  if (pairs_.size() < (pair_count_ + 1) * 2) rehash(pairs_.empty() ? 64 : pairs_.size() * 2);
  const uint64_t key = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  const size_t mask = pairs_.size() - 1;
  size_t slot = slot_hash(key) & mask;
  while (pairs_[slot].key != kNoKey && pairs_[slot].key != key) slot = (slot + 1) & mask;
  if (pairs_[slot].key == kNoKey) ++pair_count_;
  pairs_[slot] = {key, rank, id};
}

void Bpe::rehash(size_t slots) {
  const std::vector<Pair> old = std::move(pairs_);
  pairs_.assign(slots, Pair{});
  for (const Pair& pair : old) {
    if (pair.key == kNoKey) continue;
    size_t slot = slot_hash(pair.key) & (slots - 1);
    while (pairs_[slot].key != kNoKey) slot = (slot + 1) & (slots - 1);
    pairs_[slot] = pair;
  }
}

bool Bpe::may_cut_before(std::string_view mark) const {
  if (options_.byte_level || options_.ignore_merges || vocabulary_.find(mark) == Vocabulary::kNone) return false;
  // Characters without a token or an unknown one vanish, and what is around them may be merged.
  const auto none = [](int32_t id) { return id == Vocabulary::kNone; };
  if (none(options_.unk) &&
      (!options_.byte_fallback || std::any_of(std::begin(fallback_ids_), std::end(fallback_ids_), none))) {
    return false;
  }
  for (const Pair& pair : pairs_) {
    if (pair.key == kNoKey) continue;
    const std::string_view text = vocabulary_.text(pair.id);
    for (size_t at = text.find(mark, 1); at != std::string_view::npos; at = text.find(mark, at + 1)) {
      if (!text.substr(0, at).ends_with(mark)) return false;
    }
  }
  return true;
}

void Bpe::encode(std::string_view piece, ModelScratch& scratch, std::vector<int32_t>& out) const {
  if (options_.ignore_merges) {
    if (const int32_t id = (options_.byte_level ? raw_ : vocabulary_).find(piece); id != Vocabulary::kNone) {
      out.push_back(id);
      return;
    }
  }
  scratch.symbols.clear();
  split_into_symbols(piece, scratch.symbols);
  if (scratch.symbols.size() <= kShort) {
    merge_short(scratch, out);
  } else {
    merge_long(scratch, out);
  }
}

void Bpe::split_into_symbols(std::string_view piece, std::vector<int32_t>& symbols) const {
  bool unknown = false;  // an unknown token waits for more characters to be fused with, or for the next known one
  for (size_t at = 0; at < piece.size();) {
    const size_t length = options_.byte_level ? 1 : utf8_length(piece[at]);
    const std::string_view character = piece.substr(at, length);
    at += length;
    const int32_t id = length == 1 ? byte_ids_[static_cast<unsigned char>(character[0])] : vocabulary_.find(character);
    if (id != Vocabulary::kNone) {
      if (unknown) symbols.push_back(options_.unk);
      unknown = false;
      symbols.push_back(id);
      continue;
    }
    if (options_.byte_fallback) {
      const auto fallback = [&](char byte) { return fallback_ids_[static_cast<unsigned char>(byte)]; };
      if (std::all_of(character.begin(), character.end(),
                      [&](char byte) { return fallback(byte) != Vocabulary::kNone; })) {
        for (const char byte : character) symbols.push_back(fallback(byte));
        continue;
      }
    }
    if (options_.unk == Vocabulary::kNone) continue;
    if (unknown && !options_.fuse_unk) symbols.push_back(options_.unk);
    unknown = true;
  }
  if (unknown) symbols.push_back(options_.unk);
}

void Bpe::merge_short(ModelScratch& scratch, std::vector<int32_t>& out) const {
  std::vector<int32_t>& symbols = scratch.symbols;
  std::vector<uint32_t>& ranks = scratch.ranks;  // ranks[i]: of the pair (i, i + 1)
  const auto rank_at = [&](size_t i) { return i + 1 < symbols.size() ? rank_of(symbols[i], symbols[i + 1]) : kNoRank; };
  ranks.resize(symbols.size());
  for (size_t i = 0; i < symbols.size(); ++i) ranks[i] = rank_at(i);
  while (symbols.size() > 1) {
    const auto lowest = std::min_element(ranks.begin(), ranks.end());
    if (*lowest == kNoRank) break;
    const auto i = static_cast<size_t>(lowest - ranks.begin());
    symbols[i] = find_pair(symbols[i], symbols[i + 1])->id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    ranks[i] = rank_at(i);
    if (i > 0) ranks[i - 1] = rank_at(i - 1);
  }
  out.insert(out.end(), symbols.begin(), symbols.end());
}

// The same with a linked list and a heap of rank << 32 | position: n log n.
void Bpe::merge_long(ModelScratch& scratch, std::vector<int32_t>& out) const {
  std::vector<int32_t>& symbols = scratch.symbols;
  std::vector<uint32_t>& ranks =
      scratch.ranks;  // of the pair that begins here; an entry of the heap that differs is old
  std::vector<int32_t>& next = scratch.next;
  std::vector<int32_t>& previous = scratch.previous;
  std::vector<uint64_t>& heap = scratch.heap;
  const auto count = static_cast<int32_t>(symbols.size());
  const auto at = [](int32_t i) { return static_cast<size_t>(i); };

  next.resize(at(count));
  previous.resize(at(count));
  std::iota(next.begin(), next.end(), 1);
  std::iota(previous.begin(), previous.end(), -1);
  ranks.resize(at(count));
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    ranks[at(i)] = i + 1 < count ? rank_of(symbols[at(i)], symbols[at(i) + 1]) : kNoRank;
    if (ranks[at(i)] != kNoRank) heap.push_back(static_cast<uint64_t>(ranks[at(i)]) << 32 | static_cast<uint32_t>(i));
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());

  const auto update = [&](int32_t i) {
    const int32_t right = next[at(i)];
    const uint32_t rank = right < count ? rank_of(symbols[at(i)], symbols[at(right)]) : kNoRank;
    ranks[at(i)] = rank;
    if (rank == kNoRank) return;
    heap.push_back(static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(i));
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto i = static_cast<int32_t>(top & 0xFFFFFFFF);
    if (ranks[at(i)] != static_cast<uint32_t>(top >> 32)) continue;
    const int32_t right = next[at(i)];
    symbols[at(i)] = find_pair(symbols[at(i)], symbols[at(right)])->id;
    ranks[at(right)] = kNoRank;
    next[at(i)] = next[at(right)];
    if (next[at(i)] < count) previous[at(next[at(i)])] = i;
    update(i);
    if (previous[at(i)] >= 0) update(previous[at(i)]);
  }
  for (int32_t i = 0; i < count; i = next[at(i)]) out.push_back(symbols[at(i)]);
}

}  // namespace nfp::text
