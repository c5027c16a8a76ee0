// Tokens that are found in the text before anything else looks at it: "<|im_end|>", "<tool_call>". tokenizer.json's
// `added_tokens`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "text/normalizer.h"
#include "text/regex.h"

namespace nfp::text {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      // left out by decode(skip_special); found only with parse_special
  bool single_word = false;  // only where no word character stands beside it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // looked for in the normalized text, as its normalized content
  bool both = false;         // of a normalized one: looked for as it is written, too, before the text is normalized
};

// A part of the text: an added token, or what lies between (id -1).
struct TextPart {
  int32_t id;
  size_t begin;
  size_t end;
};

class AddedTokens {
 public:
  // Errors: two tokens of one id or one content; one that the normalizer makes longer than kMaxTokenBytes; a word
  // pattern that PCRE2 refuses.
  static Result<AddedTokens> make(std::vector<AddedToken> tokens, const Normalizer& normalizer);

  const AddedToken* find(int32_t id) const;
  const AddedToken* find(std::string_view content) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

  // Cuts `text` at the tokens that are looked for before (normalized = false) or after normalizing. At each place the
  // longest token wins. Appends to `parts`; there are none for an empty text.
  Status split(std::string_view text, bool normalized, bool parse_special, RegexSearch& search,
               std::vector<TextPart>& parts) const;

 private:
  struct Node {
    std::vector<std::pair<uint8_t, int32_t>> next;  // ascending bytes
    int32_t token = -1;                             // index into tokens_
  };
  // Finds the longest token at a place; a table of first bytes finds the places.
  struct Trie {
    std::vector<Node> nodes;
    bool begins[256] = {};
    void add(std::string_view text, int32_t token);
    // Index of the longest token at text[at], -1 for none; `end` is where it ends.
    int32_t longest(std::string_view text, size_t at, size_t& end) const;
  };

  std::vector<AddedToken> tokens_;
  std::unordered_map<int32_t, size_t> by_id_;
  std::unordered_map<std::string, size_t> by_content_;
  Trie raw_;
  Trie normalized_;
  std::vector<Regex> word_;  // one word character, when a token needs it
};

}  // namespace nfp::text
