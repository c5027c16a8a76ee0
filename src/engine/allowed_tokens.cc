#include "engine/allowed_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>

namespace nfp {
namespace {

using Word = std::vector<int32_t>;

// Words of several tokens, in order of their last token but one.
struct ByTokenBeforeLast {
  static int32_t of(const Word& word) { return word[word.size() - 2]; }
  bool operator()(const Word& a, const Word& b) const { return of(a) < of(b); }
  bool operator()(const Word& word, int32_t token) const { return of(word) < token; }
  bool operator()(int32_t token, const Word& word) const { return token < of(word); }
};

}  // namespace

std::optional<RequestError> AllowedTokens::make(std::span<const int32_t> ids, std::vector<Word> bad_words,
                                                int32_t vocab, std::shared_ptr<const AllowedTokens>* out) {
  const auto size = static_cast<uint32_t>(vocab);
  if (ids.size() > size) {
    return RequestError{
        "allowed_token_ids",
        fmt::format("allowed_token_ids has {} entries; the vocabulary has {} tokens", ids.size(), size)};
  }
  auto made = std::make_shared<AllowedTokens>();
  made->has_ids_ = !ids.empty();
  made->mask_.resize((size + 31) / 32);
  if (ids.empty()) {
    std::fill(made->mask_.begin(), made->mask_.end(), ~0u);
    if (size % 32 != 0) made->mask_.back() = (1u << (size % 32)) - 1;
  }
  for (const int32_t token : ids) {
    if (auto bad = check_token("allowed_token_ids", token, vocab)) return bad;
    const auto bit = static_cast<uint32_t>(token);
    made->mask_[bit / 32] |= 1u << (bit % 32);
  }
  for (Word& word : bad_words) {
    if (word.empty()) return RequestError{"bad_words", "bad_words: a word has no tokens; leave it out"};
    for (const int32_t token : word) {
      if (auto bad = check_token("bad_words", token, vocab)) return bad;
    }
    if (word.size() == 1) {
      forbid_token(made->mask_, word.front());
    } else {
      made->words_.push_back(std::move(word));
    }
  }
  std::sort(made->words_.begin(), made->words_.end(), ByTokenBeforeLast());
  *out = std::move(made);
  return std::nullopt;
}

void AllowedTokens::restrict(std::span<uint32_t> mask, std::span<const int32_t> output) const {
  std::transform(mask.begin(), mask.end(), mask_.begin(), mask.begin(), std::bit_and<>());
  if (words_.empty() || output.empty()) return;
  const auto [begin, end] = std::equal_range(words_.begin(), words_.end(), output.back(), ByTokenBeforeLast());
  for (auto word = begin; word != end; ++word) {
    const size_t before = word->size() - 1;
    if (before > output.size()) continue;
    if (std::equal(word->begin(), word->end() - 1, output.end() - static_cast<ptrdiff_t>(before))) {
      forbid_token(mask, word->back());
    }
  }
}

size_t AllowedTokens::bytes() const {
  size_t bytes = mask_.size() * sizeof(uint32_t);
  for (const Word& word : words_) bytes += sizeof(Word) + word.size() * sizeof(int32_t);
  return bytes;
}

}  // namespace nfp
