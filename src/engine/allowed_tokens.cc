#include "engine/allowed_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace nfp {
namespace {

void forbid(std::span<uint32_t> mask, int32_t token) {
  const auto bit = static_cast<uint32_t>(token);
  mask[bit / 32] &= ~(1u << (bit % 32));
}

int32_t before_last(const std::vector<int32_t>& word) { return word[word.size() - 2]; }

}  // namespace

std::optional<RequestError> AllowedTokens::make(std::span<const int32_t> ids,
                                                std::vector<std::vector<int32_t>> bad_words, int32_t vocab,
                                                std::shared_ptr<const AllowedTokens>* out) {
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
  for (std::vector<int32_t>& word : bad_words) {
    if (word.empty()) return RequestError{"bad_words", "bad_words: a word has no tokens; leave it out"};
    for (const int32_t token : word) {
      if (auto bad = check_token("bad_words", token, vocab)) return bad;
    }
    if (word.size() == 1) {
      forbid(made->mask_, word.front());
    } else {
      made->words_.push_back(std::move(word));
    }
  }
  std::ranges::sort(made->words_, {}, before_last);
  *out = std::move(made);
  return std::nullopt;
}

void AllowedTokens::restrict(std::span<uint32_t> mask, std::span<const int32_t> output) const {
  std::transform(mask.begin(), mask.end(), mask_.begin(), mask.begin(), std::bit_and<>());
  if (words_.empty() || output.empty()) return;
  for (const std::vector<int32_t>& word : std::ranges::equal_range(words_, output.back(), {}, before_last)) {
    const std::span<const int32_t> before = std::span(word).first(word.size() - 1);
    if (before.size() > output.size()) continue;
    if (std::ranges::equal(before, output.last(before.size()))) forbid(mask, word.back());
  }
}

size_t AllowedTokens::bytes() const {
  size_t bytes = mask_.size() * sizeof(uint32_t);
  for (const std::vector<int32_t>& word : words_) bytes += sizeof(word) + word.size() * sizeof(int32_t);
  return bytes;
}

}  // namespace nfp
