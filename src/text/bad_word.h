// What a word that an answer may not have is in tokens.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/tokenizer.h"

namespace nfp {

// The token sequences to forbid, as vLLM chooses them: the word without white space at its left and, where that has as
// many tokens and begins with another one, the same behind a space. Errors: kInvalidInput where nothing is left of the
// word, and encode's.
Result<std::vector<std::vector<int32_t>>> bad_word_tokens(const Tokenizer& tokenizer, std::string_view word,
                                                          std::stop_token stop = {});

}  // namespace nfp
