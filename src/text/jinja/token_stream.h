// The parser's place in a template's tokens.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/lexer.h"
#include "text/jinja/runtime.h"

namespace nfp::jinja {

class TokenStream {
 public:
  explicit TokenStream(std::vector<TokenData> tokens) : tokens_(std::move(tokens)) {}

  const TokenData& current() const { return tokens_[at_]; }
  const TokenData& look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  bool at(Token kind) const { return current().kind == kind; }
  bool at_name(std::string_view name) const { return at(Token::kName) && current().text == name; }
  // The current token, stepping behind it; the last one stays.
  const TokenData& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip_if(Token kind) {
    if (!at(kind)) return false;
    take();
    return true;
  }
  bool skip_if_name(std::string_view name) {
    if (!at_name(name)) return false;
    take();
    return true;
  }
  const TokenData& expect(Token kind, std::string_view what) {
    if (!at(kind)) fail(fmt::format("expected {}, got '{}'", what, describe(current())));
    return take();
  }
  [[noreturn]] void fail(std::string message) const {
    throw Failure{ErrorCode::kInvalidInput, std::move(message), current().line};
  }

 private:
  std::vector<TokenData> tokens_;
  size_t at_ = 0;
};

}  // namespace nfp::jinja
