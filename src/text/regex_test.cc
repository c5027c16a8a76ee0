#include "text/regex.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace nfp::text {
namespace {

std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  const auto regex = Regex::compile(pattern);
  if (!regex.ok()) return {"error: " + regex.error().message};
  RegexSearch search;
  std::vector<std::string> found;
  for (size_t from = 0; from < text.size();) {
    const auto match = search.next(*regex, text, from);
    if (!match.ok()) return {"error: " + match.error().message};
    if (!match->found || match->end == match->begin) break;
    found.emplace_back(text.substr(match->begin, match->end - match->begin));
    from = match->end;
  }
  return found;
}

using Strings = std::vector<std::string>;

TEST(Regex, MatchesUnicodeProperties) {
  EXPECT_EQ(matches(R"(\p{L}+)", "ab1\xC3\xA9\xE4\xB8\xAD 2"), (Strings{"ab", "\xC3\xA9\xE4\xB8\xAD"}));
  EXPECT_EQ(matches(R"(\p{N})", "1\xC2\xBD\xD9\xA3"), (Strings{"1", "\xC2\xBD", "\xD9\xA3"}));
  EXPECT_EQ(matches(R"((?i:'s))", "'s'S'\xC5\xBF"), (Strings{"'s", "'S", "'\xC5\xBF"}));
}

// What Oniguruma means by these, where PCRE2 by itself means something else.
TEST(Regex, ReadsRubySyntax) {
  EXPECT_EQ(matches(R"(\s)", "\xE1\xA0\x8E"), Strings{});      // U+180E is no white space
  EXPECT_EQ(matches(R"([^\s]+)", "a\xC2\x85"), Strings{"a"});  // U+0085 is
  EXPECT_EQ(matches(R"(\w+)", "a\xCC\x81\xE2\x80\xBF"), (Strings{"a\xCC\x81\xE2\x80\xBF"}));  // marks and Pc
  // Raised digits and fractions of Latin-1 are in \w, but in no class, and none beyond Latin-1.
  EXPECT_EQ(matches(R"(\w+)", "a\xC2\xB2\xC2\xBD.\xE2\x81\xB4"), (Strings{"a\xC2\xB2\xC2\xBD"}));
  EXPECT_EQ(matches(R"([\w]+)", "a\xC2\xB2\xC2\xBD"), (Strings{"a"}));
  EXPECT_EQ(matches(R"(\W+)", "\xC2\xB9.\xE2\x81\xB4"), (Strings{".\xE2\x81\xB4"}));
  EXPECT_EQ(matches(R"(\h+)", "xfg09"), (Strings{"f", "09"}));  // hexadecimal digits
  EXPECT_EQ(matches(R"(\v)", "\n\v"), Strings{"\v"});           // one character
  EXPECT_EQ(matches(R"(a{,2}b)", "aaab"), Strings{"aab"});      // from 0
  EXPECT_EQ(matches(R"(a{x})", "a{x}"), Strings{"a{x}"});
  EXPECT_EQ(matches(R"(^a$)", "b\na\nb"), Strings{"a"});  // anchors hold at every line
  EXPECT_EQ(matches(R"(\u4e2D|\x41)", "A\xE4\xB8\xAD"), (Strings{"A", "\xE4\xB8\xAD"}));
  EXPECT_EQ(matches("\\\xC3\xA9", "\xC3\xA9"), Strings{"\xC3\xA9"});  // a needless backslash
  // A class in a class is a part of it.
  EXPECT_EQ(matches(R"([^(\s|[.,\]z]|)]+)", "ab.c],d|e z(f)"), (Strings{"ab", "c", "d", "e", "f"}));
  EXPECT_EQ(matches("[a[b-d]-]+", "a-dbe"), (Strings{"error: regular expression has a '-' beside a class in a "
                                                     "character class at byte 6, which we do not support"}));
  // A script is what is written in it alone: no U+3001, which others use too, and no U+30FC.
  EXPECT_EQ(matches(R"(\p{Han}+)", "\xE4\xB8\xAD\xE3\x80\x81\xE4\xB8\xAD"), (Strings{"\xE4\xB8\xAD", "\xE4\xB8\xAD"}));
  EXPECT_EQ(matches(R"([\p{Katakana}\p{Lu}]+)", "\xE3\x82\xAB\x41\xE3\x83\xBC"), Strings{"\xE3\x82\xAB\x41"});
  EXPECT_EQ(matches(R"(\p{^Han}+|\P{Han}+)", "\xE4\xB8\xAD\xE3\x80\x81"), Strings{"\xE3\x80\x81"});
}

TEST(Regex, RefusesWhatItCannotSay) {
  for (const char* pattern : {"[a&&b]",  "[a[^bc]]", "[a[b[c]]]", "[a[b&&c]]",   "[a-[b]]", "[[a]-b]", "[a[b-]c]",
                              "[a[-b]]", "[a[]b]]",  "[a[b",      "[[:alpha:]]", R"(\b)",   R"(\1)",   R"(\Qa\E)",
                              R"(\R)",   "(*FAIL)",  "(?R)",      "(?<name>a)",  "(?m:a)",  "(?#x)",   "a{2,3}+",
                              "a{2}?",   "[]a]",     R"([\W])",   R"(\p)",       R"(\xFF)", "[a",      "\\"}) {
    const auto regex = Regex::compile(pattern);
    ASSERT_FALSE(regex.ok()) << pattern;
    EXPECT_EQ(regex.error().code, ErrorCode::kUnsupported) << pattern << ": " << regex.error().message;
  }
  for (const char* pattern : {"(", "a)", "*", R"(\p{Nonsense})", R"(\x{110000})", "(?<=a+)"}) {
    EXPECT_FALSE(Regex::compile(pattern).ok()) << pattern;
  }
  EXPECT_FALSE(Regex::compile("").ok());
  EXPECT_FALSE(Regex::compile(std::string(1 << 15, 'a')).ok());
  EXPECT_FALSE(Regex::compile(std::string(200, '(') + std::string(200, ')')).ok());
}

TEST(Regex, LiteralsAreTakenAsTheyAre) {
  const std::string text = "a.b*[c]\\(?{}^$|\xC3\xA9 #";
  const auto regex = Regex::literal(text);
  ASSERT_TRUE(regex.ok()) << regex.error().message;
  RegexSearch search;
  const auto match = search.next(*regex, "x" + text, 0);
  ASSERT_TRUE(match.ok());
  EXPECT_TRUE(match->found);
  EXPECT_EQ(match->begin, 1u);
  EXPECT_EQ(match->end, 1 + text.size());
}

TEST(Regex, GivesUpOnExponentialPatterns) {
  const auto regex = Regex::compile("(a+)+b|(a|a)+c");
  ASSERT_TRUE(regex.ok());
  RegexSearch search;
  const auto match = search.next(*regex, std::string(200, 'a'), 0);
  ASSERT_FALSE(match.ok());
  EXPECT_EQ(match.error().code, ErrorCode::kResource);
  const auto after = search.next(*regex, "aab", 0);  // and works on
  ASSERT_TRUE(after.ok());
  EXPECT_TRUE(after->found);
}

// A real pattern may walk over all of a long run; that is no reason to give up.
TEST(Regex, LongRunsAreFine) {
  const auto regex = Regex::compile(R"(\s*[\r\n]+|\s+(?!\S)|\s+|\S+)");
  ASSERT_TRUE(regex.ok());
  RegexSearch search;
  const std::string text = std::string(1 << 20, ' ') + "x";
  const auto match = search.next(*regex, text, 0);
  ASSERT_TRUE(match.ok()) << match.error().message;
  EXPECT_EQ(match->end, text.size() - 2);
  // This one needs a stack that grows with the run.
  const auto deep = Regex::compile(R"((?:\s|x)+y)");
  ASSERT_TRUE(deep.ok());
  const auto none = search.next(*deep, std::string(5000, ' '), 0);
  ASSERT_FALSE(none.ok() && none->found);
}

}  // namespace
}  // namespace nfp::text
