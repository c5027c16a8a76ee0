// The regular expressions inside a tokenizer.json. They are written for Oniguruma (Ruby's syntax, which the
// `tokenizers` package uses) and run here on PCRE2's JIT. Where the two differ in meaning the pattern is rewritten
// (\s, \w, \h, \v, {,n}); what cannot be said in PCRE2 is refused.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp::text {

// Immutable; any number of threads may search with it, each with its own RegexSearch.
class Regex {
 public:
  // Errors: kUnsupported (syntax that PCRE2 would read otherwise), kInvalidInput (not a regular expression). The
  // message says where; the caller adds which field.
  static Result<Regex> compile(std::string_view pattern);
  // Matches exactly this text.
  static Result<Regex> literal(std::string_view text);

  struct Code;  // holds the PCRE2 objects
  const Code& code() const { return *code_; }

 private:
  explicit Regex(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  std::shared_ptr<const Code> code_;
};

// The pattern as PCRE2 gets it. Exposed for the tests.
Result<std::string> pattern_for_pcre2(std::string_view pattern);

// Working memory of searches: one per thread at a time, for any number of patterns and texts.
class RegexSearch {
 public:
  RegexSearch();
  ~RegexSearch();
  RegexSearch(RegexSearch&&) noexcept;
  RegexSearch& operator=(RegexSearch&&) noexcept;

  struct Match {
    bool found;
    size_t begin;  // bytes into the text
    size_t end;
  };
  // The leftmost match that begins at `from` or later. `text` is valid UTF-8 and `from` is on a code point.
  // Error kResource: the pattern needs too many steps or too much stack on this text.
  Result<Match> next(const Regex& regex, std::string_view text, size_t from);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nfp::text
