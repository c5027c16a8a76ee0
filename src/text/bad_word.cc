#include "text/bad_word.h"

#include <string>
#include <utility>

#include "text/unicode.h"

namespace nfp {

Result<std::vector<std::vector<int32_t>>> bad_word_tokens(const Tokenizer& tokenizer, std::string_view word,
                                                          std::stop_token stop) {
  const std::string text(text::strip_space(word, /*left=*/true, /*right=*/false));
  const EncodeOptions options{.add_special_tokens = false, .stop = std::move(stop)};
  NFP_ASSIGN_OR_RETURN(std::vector<int32_t> alone, tokenizer.encode(text, options));
  if (alone.empty()) return error(ErrorCode::kInvalidInput, "a word is empty, or white space only; leave it out");
  NFP_ASSIGN_OR_RETURN(std::vector<int32_t> behind, tokenizer.encode(" " + text, options));
  std::vector<std::vector<int32_t>> found;
  const bool another = behind.size() == alone.size() && behind.front() != alone.front();
  found.push_back(std::move(alone));
  if (another) found.push_back(std::move(behind));
  return found;
}

}  // namespace nfp
