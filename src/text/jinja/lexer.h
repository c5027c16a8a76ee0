// Cuts a template into tokens, white space control included, as jinja2's lexer does with trim_blocks and lstrip_blocks:
// the newline behind a block tag goes, as do the blanks before a block tag that begins its line; `-` strips all white
// space on its side, `+` switches the automatic stripping off. One newline at the end of the template goes too.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace nfp::jinja {

enum class Token : uint8_t {
  kText,  // between tags
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,  // also brackets and punctuation
  kEnd,
};

struct TokenData {
  Token kind = Token::kEnd;
  int line = 1;
  std::string text;  // as it stands in the template; of kString, without quotes and escapes
  Int integer = 0;
  double real = 0;
};

// Ends with a kEnd token. Throws Failure for what jinja2 calls a syntax error. Precondition: valid UTF-8.
std::vector<TokenData> tokenize(std::string_view source);

}  // namespace nfp::jinja
