// What a request's `allowed_token_ids` and `bad_words` leave of the vocabulary.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"

namespace nfp {

class AllowedTokens {
 public:
  AllowedTokens() = default;  // all of it
  // Every id is in the vocabulary.
  AllowedTokens(const SamplingParams& sampling, int32_t vocab);

  bool all() const { return mask_.empty(); }
  // Whether what may come depends on the tokens before: there are bad words of several tokens.
  bool reads_output() const { return !words_.empty(); }
  // What may come wherever no word of several tokens forbids it: bit v % 32 of word v / 32. Empty where all() holds.
  std::span<const uint32_t> mask() const { return mask_; }
  // Takes out of a mask of as many words what may not follow `output`, the answer so far.
  void restrict(std::span<uint32_t> mask, std::span<const int32_t> output) const;

 private:
  std::vector<uint32_t> mask_;
  std::vector<std::vector<int32_t>> words_;  // of several tokens, in order of their last token but one
};

}  // namespace nfp
