// What happens to the text before it is cut into pieces: tokenizer.json's `normalizer`.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.h"
#include "text/regex.h"

namespace nfp::text {

enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };  // Unicode Standard Annex 15

// `text` is valid UTF-8, as is the result.
std::string unicode_normalize(std::string_view text, UnicodeForm form);

class Normalizer {
 public:
  struct Prepend {
    std::string text;  // nothing is put before an empty text
  };
  struct Replace {
    std::string from;  // used when `pattern` is empty
    std::vector<Regex> pattern;
    std::string to;
  };
  struct Strip {
    bool left;
    bool right;
  };
  using Step = std::variant<UnicodeForm, Prepend, Replace, Strip>;

  void add(Step step) { steps_.push_back(std::move(step)); }
  bool empty() const { return steps_.empty(); }
  size_t size() const { return steps_.size(); }

  // The normalized text: `text` itself where nothing changes, else `storage`. Errors: a Replace pattern's
  // (regex.h); kResource when replacements blow the text up.
  Result<std::string_view> apply(std::string_view text, std::string& storage, RegexSearch& search) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace nfp::text
