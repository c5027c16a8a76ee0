#include "text/bad_word.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "text/testing/small_tokenizers.h"

namespace nfp {
namespace {

using Words = std::vector<std::vector<int32_t>>;

// In byte_level_json(): 260 "he", 261 "Ġhe", 263 "hell".
TEST(BadWord, IsForbiddenBehindASpaceTooWhereThatIsAsManyTokens) {
  const auto tokenizer = text::load(text::byte_level_json());
  const auto of = [&](std::string_view word) { return *bad_word_tokens(*tokenizer, word); };
  EXPECT_EQ(of("he"), (Words{{260}, {261}}));
  EXPECT_EQ(of(" \n\u00a0he"), (Words{{260}, {261}}));
  EXPECT_EQ(of("x"), (Words{{text::byte_id('x')}}));  // behind a space it is two
  EXPECT_EQ(of("hex"), (Words{{260, text::byte_id('x')}, {261, text::byte_id('x')}}));
  EXPECT_EQ(of("he "), (Words{{260, text::byte_id(' ')}, {261, text::byte_id(' ')}}));
  EXPECT_EQ(of("</s>"), (Words{{1}}));
}

TEST(BadWord, HasNoTokenThatBeginsATextUnlessTheWordHas) {
  const auto tokenizer = text::load(text::sentencepiece_json());
  const auto words = bad_word_tokens(*tokenizer, "ab");
  ASSERT_TRUE(words.ok());
  for (const std::vector<int32_t>& word : *words) EXPECT_EQ(std::count(word.begin(), word.end(), 1), 0);
}

TEST(BadWord, OfWhiteSpaceAloneIsAnError) {
  const auto tokenizer = text::load(text::byte_level_json());
  for (const char* word : {"", " ", "\t\n "}) {
    const auto tokens = bad_word_tokens(*tokenizer, word);
    ASSERT_FALSE(tokens.ok());
    EXPECT_EQ(tokens.error().code, ErrorCode::kInvalidInput);
  }
}

}  // namespace
}  // namespace nfp
