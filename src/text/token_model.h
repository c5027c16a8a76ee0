// How a piece of text becomes tokens: bpe.h, unigram.h.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "text/vocabulary.h"

namespace nfp::text {

// Working memory of encode, to be used again.
struct ModelScratch {
  std::vector<int32_t> symbols;
  std::vector<uint32_t> ranks;
  std::vector<int32_t> next;
  std::vector<int32_t> previous;
  std::vector<uint64_t> heap;
  std::vector<double> scores;
};

class TokenModel {
 public:
  explicit TokenModel(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  virtual ~TokenModel() = default;
  TokenModel(TokenModel&&) = default;
  TokenModel& operator=(TokenModel&&) = default;

  // Appends the tokens of `piece`, which is valid UTF-8.
  virtual void encode(std::string_view piece, ModelScratch& scratch, std::vector<int32_t>& out) const = 0;

  const Vocabulary& vocabulary() const { return vocabulary_; }

 protected:
  Vocabulary vocabulary_;
};

}  // namespace nfp::text
