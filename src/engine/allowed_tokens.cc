#include "engine/allowed_tokens.h"

#include <algorithm>
#include <functional>

namespace nfp {
namespace {

void forbid(std::span<uint32_t> mask, int32_t token) {
  const auto bit = static_cast<uint32_t>(token);
  mask[bit / 32] &= ~(1u << (bit % 32));
}

int32_t before_last(const std::vector<int32_t>& word) { return word[word.size() - 2]; }

}  // namespace

AllowedTokens::AllowedTokens(const SamplingParams& sampling, int32_t vocab) {
  if (sampling.allowed_token_ids.empty() && sampling.bad_words.empty()) return;
  const auto size = static_cast<uint32_t>(vocab);
  mask_.resize((size + 31) / 32);
  if (sampling.allowed_token_ids.empty()) {
    std::fill(mask_.begin(), mask_.end(), ~0u);
    if (size % 32 != 0) mask_.back() = (1u << (size % 32)) - 1;
  }
  for (const int32_t token : sampling.allowed_token_ids) {
    const auto bit = static_cast<uint32_t>(token);
    mask_[bit / 32] |= 1u << (bit % 32);
  }
  for (const std::vector<int32_t>& word : sampling.bad_words) {
    if (word.size() == 1) {
      forbid(mask_, word.front());
    } else {
      words_.push_back(word);
    }
  }
  std::ranges::sort(words_, {}, before_last);
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

}  // namespace nfp
