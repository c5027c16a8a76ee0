#include "text/normalizer.h"

#include <gtest/gtest.h>

#include <string>

#include "text/utf8.h"

namespace nfp::text {
namespace {

std::string apply(const Normalizer& normalizer, std::string_view text) {
  RegexSearch search;
  std::string storage;
  const auto result = normalizer.apply(text, storage, search);
  return result.ok() ? std::string(*result) : "error: " + result.error().message;
}

TEST(Normalizer, Forms) {
  const std::string decomposed = "e\xCC\x81";  // e + U+0301
  const std::string composed = "\xC3\xA9";
  EXPECT_EQ(unicode_normalize(decomposed, UnicodeForm::kNfc), composed);
  EXPECT_EQ(unicode_normalize(composed, UnicodeForm::kNfd), decomposed);
  EXPECT_EQ(unicode_normalize("\xEF\xAC\x81", UnicodeForm::kNfc), "\xEF\xAC\x81");  // a ligature stays
  EXPECT_EQ(unicode_normalize("\xEF\xAC\x81", UnicodeForm::kNfkc), "fi");
  EXPECT_EQ(unicode_normalize("\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", UnicodeForm::kNfc), "\xEA\xB0\x81");  // Hangul
  EXPECT_EQ(unicode_normalize("a\xCC\x81\xCC\xA3", UnicodeForm::kNfd), "a\xCC\xA3\xCC\x81");    // marks in order
  EXPECT_EQ(unicode_normalize("\xE0\xA5\x98", UnicodeForm::kNfc), "\xE0\xA4\x95\xE0\xA4\xBC");  // excluded
  EXPECT_EQ(unicode_normalize("\xEF\xB7\xBA", UnicodeForm::kNfkd).size(), 33u);                 // U+FDFA, 18 characters
}

TEST(Normalizer, EveryCharacterNormalizesToAFixedPoint) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    for (const UnicodeForm form : {UnicodeForm::kNfc, UnicodeForm::kNfkd}) {
      const std::string once = unicode_normalize(text, form);
      ASSERT_EQ(unicode_normalize(once, form), once) << static_cast<uint32_t>(c);
    }
  }
}

// A million marks in the worst order: the library's own sorting would take hours.
TEST(Normalizer, LongRunsOfMarks) {
  std::string text = "a";
  for (int i = 0; i < 200'000; ++i) text += i % 2 == 0 ? "\xCC\x81" : "\xCC\xA3";
  const std::string normal = unicode_normalize(text, UnicodeForm::kNfc);
  EXPECT_TRUE(normal.starts_with("\xE1\xBA\xA1\xCC\xA3"));  // U+1EA1, then the marks below
  EXPECT_TRUE(normal.ends_with("\xCC\x81\xCC\x81"));
}

TEST(Normalizer, Steps) {
  Normalizer llama;
  llama.add(Normalizer::Prepend{"_"});
  llama.add(Normalizer::Replace{" ", {}, "_"});
  EXPECT_EQ(apply(llama, "a  b"), "_a__b");
  EXPECT_EQ(apply(llama, ""), "");

  Normalizer pattern;
  auto digits = Regex::compile(R"(\d+)");
  ASSERT_TRUE(digits.ok());
  pattern.add(Normalizer::Replace{"", {*digits}, "#"});
  EXPECT_EQ(apply(pattern, "a12b3"), "a#b#");
  for (const auto& [regex, expected] :
       {std::pair{"^", "#baab"}, {"$", "baab#"}, {"a*", "#b#b#"}, {"(?=b)", "#baa#b"}}) {
    auto empty = Regex::compile(regex);
    ASSERT_TRUE(empty.ok());
    Normalizer inserts;
    inserts.add(Normalizer::Replace{"", {*empty}, "#"});
    EXPECT_EQ(apply(inserts, "baab"), expected) << regex;
    EXPECT_EQ(apply(inserts, ""), "") << regex;
  }

  Normalizer strip;
  strip.add(Normalizer::Strip{true, false});
  EXPECT_EQ(apply(strip, "\t\xC2\xA0 x "), "x ");
  EXPECT_EQ(apply(Normalizer(), "as it is "), "as it is ");
}

TEST(Normalizer, StopsReplacementsThatBlowUp) {
  Normalizer bomb;
  for (int i = 0; i < 60; ++i) bomb.add(Normalizer::Replace{"a", {}, "aaaa"});
  const std::string result = apply(bomb, "aaaa");
  EXPECT_TRUE(result.starts_with("error: ")) << result.substr(0, 100);
}

}  // namespace
}  // namespace nfp::text
