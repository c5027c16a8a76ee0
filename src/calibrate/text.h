// The tokens that calibration runs a model on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "model/model.h"
#include "text/tokenizer.h"

namespace nfp {

using TokenSequences = std::vector<std::vector<int32_t>>;

int64_t count_tokens(const TokenSequences& text);
int32_t longest_sequence(const TokenSequences& text);  // tokens; at least 1

struct SelfTextOptions {
  int32_t sequences = 32;
  int32_t length = 128;        // tokens of each, its start included
  uint64_t seed = 0;           // of starts and of sampling: the same text each time
  std::optional<int32_t> bos;  // before every start, where the tokenizer adds one
};

// Text by the model itself, so that no data is needed (as LLM-QAT did for training, arXiv 2305.17888): every sequence
// starts with a random token of the vocabulary and goes on at temperature 1, exact FP16, until it is full. A sequence
// that comes to an end-of-generation token goes on past it.
Result<TokenSequences> write_self_text(Model& model, const SelfTextOptions& options, const ProgressCallback& progress);

// `text` cut into sequences of `length` tokens; where they are more than `most` tokens in all, that many, evenly
// spread. Errors name `file`: not UTF-8, empty, or shorter than one sequence.
Result<TokenSequences> cut_text(const Tokenizer& tokenizer, const std::string& text, const std::string& file,
                                int32_t length, int64_t most);

}  // namespace nfp
