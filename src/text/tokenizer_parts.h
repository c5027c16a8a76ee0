// What a Tokenizer is made of. The loaders (tokenizer_json.cc, tokenizer_gguf.cc) fill it in.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"
#include "text/tokenizer.h"

namespace nfp::text {

// tokenizer.json's `decoder`: how the text of a token becomes bytes of output.
struct Decoder {
  bool byte_level = false;                                    // as byte_level.h says
  std::vector<std::pair<std::string, std::string>> replaces;  // "▁" by " "
  bool byte_fallback = false;                                 // "<0x0A>" is a byte
  Tokenizer::LeadingSpace leading_space = Tokenizer::LeadingSpace::kKeep;
};

// Tokens by their role. kNone where there is none.
struct SpecialIds {
  int32_t bos = Vocabulary::kNone;
  int32_t eos = Vocabulary::kNone;
  int32_t pad = Vocabulary::kNone;
  int32_t unk = Vocabulary::kNone;
  std::vector<int32_t> eog;
};

struct TokenizerSpec {
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  AddedTokens added;
  std::unique_ptr<const TokenModel> model;
  Decoder decoder;
  std::vector<int32_t> prefix;  // the post-processor's tokens before the text
  std::vector<int32_t> suffix;  // and after it
  SpecialIds special;
  std::vector<std::pair<std::string, std::string>> named_tokens;  // name and text
  std::vector<std::string> additional_special_tokens;
};

// Checks what the parts say of each other (ids of prefix and suffix exist) and makes the Tokenizer.
Result<std::shared_ptr<const Tokenizer>> make_tokenizer(TokenizerSpec spec);

// Adds to `eog` the tokens that end a turn or a text in well-known models, by their names.
void add_known_eog(const AddedTokens& added, std::vector<int32_t>& eog);
// The first of `names` that is an added token.
int32_t first_known(const AddedTokens& added, std::initializer_list<std::string_view> names);

// SentencePiece models without a pre-tokenizer give BPE the whole text. Where no token crosses the beginning of a run
// of spaces (U+2581), cutting there changes nothing and lets the piece cache work.
void cut_at_marks(PreTokenizer& pre_tokenizer, const Bpe& bpe);

// "NAME: MESSAGE".
Error in_file(const std::string& name, Error err);

// Ids of a vocabulary stay below this (the largest known vocabulary has 262,208).
inline constexpr int64_t kMaxTokenId = 1 << 22;

}  // namespace nfp::text
