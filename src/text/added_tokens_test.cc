#include "text/added_tokens.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace nfp::text {
namespace {

AddedToken token(int32_t id, std::string content, bool special = false) {
  AddedToken added;
  added.id = id;
  added.content = std::move(content);
  added.special = special;
  return added;
}

// "id:text" for tokens, "text" for what lies between.
std::vector<std::string> split(const std::vector<AddedToken>& tokens, std::string_view text, bool parse_special = true,
                               bool normalized = false, const Normalizer& normalizer = {}) {
  const auto added = AddedTokens::make(tokens, normalizer);
  if (!added.ok()) return {"error: " + added.error().message};
  RegexSearch search;
  std::vector<TextPart> parts;
  const Status status = added->split(text, normalized, parse_special, search, parts);
  EXPECT_TRUE(status.ok());
  std::vector<std::string> shown;
  for (const TextPart& part : parts) {
    const std::string content(text.substr(part.begin, part.end - part.begin));
    shown.push_back(part.id < 0 ? content : std::to_string(part.id) + ":" + content);
  }
  return shown;
}

using Strings = std::vector<std::string>;

TEST(AddedTokens, TheLongestTokenAtTheLeftmostPlaceWins) {
  const std::vector<AddedToken> tokens = {token(1, "<a>"), token(2, "<a><b>"), token(3, "<b><c>")};
  EXPECT_EQ(split(tokens, "x<a><b><c>y"), (Strings{"x", "2:<a><b>", "<c>y"}));
  EXPECT_EQ(split(tokens, "<a><c><b><c>"), (Strings{"1:<a>", "<c>", "3:<b><c>"}));
  EXPECT_EQ(split(tokens, ""), Strings{});
  EXPECT_EQ(split(tokens, "<a"), Strings{"<a"});
}

TEST(AddedTokens, SpecialTokensCanBeOrdinaryText) {
  const std::vector<AddedToken> tokens = {token(1, "<s>", true), token(2, "<t>")};
  EXPECT_EQ(split(tokens, "<s><t>"), (Strings{"1:<s>", "2:<t>"}));
  EXPECT_EQ(split(tokens, "<s><t>", false), (Strings{"<s>", "2:<t>"}));
}

TEST(AddedTokens, OfTwoThatAreNormalizedAlikeTheSpecialOneWins) {
  std::vector<AddedToken> tokens = {token(1, "<a>"), token(2, "<b>", true), token(3, "<c>", true)};
  for (AddedToken& each : tokens) each.normalized = true;
  Normalizer normalizer;
  for (const char* from : {"b", "c"}) normalizer.add(Normalizer::Replace{from, {}, "a"});
  EXPECT_EQ(split(tokens, "x<a>", true, true, normalizer), (Strings{"x", "2:<a>"}));
}

TEST(AddedTokens, WholeWordsOnly) {
  std::vector<AddedToken> tokens = {token(1, "ing")};
  tokens[0].single_word = true;
  EXPECT_EQ(split(tokens, "ing-sing ing. \xC3\xA9ing _ing"),
            (Strings{"1:ing", "-sing ", "1:ing", ". \xC3\xA9ing _ing"}));
  EXPECT_EQ(split(tokens, "\xC2\xB2ing"), (Strings{"\xC2\xB2", "1:ing"}));  // no word in Rust
}

TEST(AddedTokens, WhiteSpaceAround) {
  std::vector<AddedToken> tokens = {token(1, "<m>"), token(2, "<n>")};
  tokens[0].lstrip = tokens[0].rstrip = true;
  tokens[1].lstrip = true;
  EXPECT_EQ(split(tokens, "a \n<m> \xC2\xA0 b"), (Strings{"a", "1: \n<m> \xC2\xA0 ", "b"}));
  EXPECT_EQ(split(tokens, "<m>  <n>"), (Strings{"1:<m>  ", "2:<n>"}));  // the first takes the spaces
  tokens.push_back(token(3, "  "));
  tokens[2].lstrip = true;
  EXPECT_EQ(split(tokens, "a    b"), (Strings{"a", "3:  ", "3:  ", "b"}));
  EXPECT_EQ(split(tokens, "<m>    b"), (Strings{"1:<m>    ", "b"}));  // also those of another token
}

// Each would look at all of the white space again: minutes.
TEST(AddedTokens, OnesOfWhiteSpaceDoNotLookAtEachOther) {
  constexpr size_t kMany = 1 << 20;
  const std::string blanks(kMany, ' ');
  std::vector<AddedToken> tokens = {token(1, " "), token(2, "\t")};
  tokens[0].lstrip = true;
  EXPECT_EQ(split(tokens, blanks).size(), kMany);
  tokens[0].lstrip = false;
  tokens[0].rstrip = true;
  const auto parts = [&](std::string_view text) {
    const auto added = AddedTokens::make(tokens, {});
    RegexSearch search;
    std::vector<TextPart> found;
    EXPECT_TRUE(added->split(text, false, true, search, found).ok());
    return found;
  };
  EXPECT_EQ(parts(blanks).size(), kMany);
  EXPECT_EQ(parts(blanks).back().end, kMany);
  std::string both;
  for (size_t i = 0; i < kMany / 2; ++i) both += " \t";
  EXPECT_EQ(parts(both).size(), kMany);
  EXPECT_EQ(parts(both + "x").back().begin, kMany);
  tokens[0].lstrip = true;
  EXPECT_EQ(split(tokens, blanks), Strings{"1:" + blanks});
}

TEST(AddedTokens, NormalizedTokensAreLookedForAfterwards) {
  Normalizer normalizer;
  normalizer.add(Normalizer::Replace{" ", {}, "_"});
  std::vector<AddedToken> tokens = {token(1, "a b")};
  tokens[0].normalized = true;
  EXPECT_EQ(split(tokens, "xa_by", true, true, normalizer), (Strings{"x", "1:a_b", "y"}));
  EXPECT_EQ(split(tokens, "xa_by", true, false, normalizer), Strings{"xa_by"});
}

TEST(AddedTokens, RefusesDoubles) {
  EXPECT_NE(split({token(1, "a"), token(1, "b")}, "")[0].find("id 1 twice"), std::string::npos);
  EXPECT_NE(split({token(1, "a"), token(2, "a")}, "")[0].find("'a' twice"), std::string::npos);
}

TEST(AddedTokens, RefusesWhatTheNormalizerMakesTooLong) {
  Normalizer normalizer;
  normalizer.add(Normalizer::Replace{"a", {}, "aa"});
  const auto split_at = [&](size_t size) {
    AddedToken doubled = token(7, std::string(size, 'a'));
    doubled.normalized = true;
    return split({doubled}, std::string(4096, 'a'), true, true, normalizer);
  };
  EXPECT_EQ(split_at(2048), Strings{"7:" + std::string(4096, 'a')});
  EXPECT_EQ(split_at(2049),
            Strings{"error: the added token with id 7 has 4098 bytes when normalized; at most 4096 are supported"});
}

}  // namespace
}  // namespace nfp::text
