// What a request's `allowed_token_ids` and `bad_words` leave of the vocabulary. Made once, and shared by its answers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"

namespace nfp {

// Of a mask, bit v % 32 of word v / 32; a token that it has not is none.
inline void forbid_token(std::span<uint32_t> mask, int32_t token) {
  const auto bit = static_cast<uint32_t>(token);
  if (bit / 32 < mask.size()) mask[bit / 32] &= ~(1u << (bit % 32));
}

class AllowedTokens {
 public:
  // The lists as tokens: `ids` empty = all tokens; the last token of a bad word may not follow its others. Error: an id
  // that is not in the vocabulary, more ids than it has, a word without tokens.
  static std::optional<RequestError> make(std::span<const int32_t> ids, std::vector<std::vector<int32_t>> bad_words,
                                          int32_t vocab, std::shared_ptr<const AllowedTokens>* out);

  bool has_ids() const { return has_ids_; }
  // Whether what may come depends on the tokens before: there are bad words of several tokens.
  bool reads_output() const { return !words_.empty(); }
  // What may come wherever no word of several tokens forbids it: bit v % 32 of word v / 32.
  std::span<const uint32_t> mask() const { return mask_; }
  // Takes out of a mask of as many words what may not follow `output`, the answer so far.
  void restrict(std::span<uint32_t> mask, std::span<const int32_t> output) const;
  size_t bytes() const;

 private:
  bool has_ids_ = false;
  std::vector<uint32_t> mask_;
  std::vector<std::vector<int32_t>> words_;  // of several tokens, in order of their last token but one
};

}  // namespace nfp
