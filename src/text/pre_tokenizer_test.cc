#include "text/pre_tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace nfp::text {
namespace {

using Strings = std::vector<std::string>;

class Collect : public PieceSink {
 public:
  void piece(std::string_view piece) override { pieces.emplace_back(piece); }
  Strings pieces;
};

Strings pieces(const PreTokenizer& pre_tokenizer, std::string_view text, bool first = true) {
  RegexSearch search;
  Collect sink;
  const Status status = pre_tokenizer.run(text, first, search, sink);
  if (!status.ok()) return {"error: " + status.error().message};
  return sink.pieces;
}

PreTokenizer split(std::string_view pattern, SplitBehavior behavior, bool invert = false) {
  PreTokenizer pre_tokenizer;
  auto regex = Regex::compile(pattern);
  EXPECT_TRUE(regex.ok());
  pre_tokenizer.add(PreTokenizer::Split{*regex, behavior, invert});
  return pre_tokenizer;
}

TEST(PreTokenizer, Gpt2Pattern) {
  const PreTokenizer gpt2 = split(kGpt2Pattern, SplitBehavior::kIsolated);
  EXPECT_EQ(pieces(gpt2, "I'm  here,\n\n it's 42!"),
            (Strings{"I", "'m", " ", " here", ",", "\n\n", " it", "'s", " 42", "!"}));
  EXPECT_EQ(pieces(gpt2, "   "), (Strings{"   "}));
  EXPECT_EQ(pieces(gpt2, ""), Strings{});
}

// The examples in the documentation of `tokenizers`' SplitDelimiterBehavior.
TEST(PreTokenizer, SplitBehaviors) {
  const std::string text = "the-final--countdown";
  EXPECT_EQ(pieces(split("-", SplitBehavior::kRemoved), text), (Strings{"the", "final", "countdown"}));
  EXPECT_EQ(pieces(split("-", SplitBehavior::kIsolated), text), (Strings{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(pieces(split("-", SplitBehavior::kMergedWithPrevious), text),
            (Strings{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(pieces(split("-", SplitBehavior::kMergedWithNext), text), (Strings{"the", "-final", "-", "-countdown"}));
  EXPECT_EQ(pieces(split("-", SplitBehavior::kContiguous), text), (Strings{"the", "-", "final", "--", "countdown"}));
  EXPECT_EQ(pieces(split("[a-z]+", SplitBehavior::kRemoved, true), text), (Strings{"the", "final", "countdown"}));
}

TEST(PreTokenizer, EmptyMatchesCutBetweenCharacters) {
  EXPECT_EQ(pieces(split("x*", SplitBehavior::kIsolated), "a\xC3\xA9xxb"), (Strings{"a", "\xC3\xA9", "xx", "b"}));
  const auto joined = [](SplitBehavior behavior, bool invert) {
    return pieces(split("x*", behavior, invert), "abxxcd");
  };
  EXPECT_EQ(joined(SplitBehavior::kContiguous, false), (Strings{"a", "b", "xx", "c", "d"}));
  EXPECT_EQ(joined(SplitBehavior::kContiguous, true), (Strings{"a", "b", "xx", "c", "d"}));
}

TEST(PreTokenizer, StagesFollowEachOther) {
  PreTokenizer smollm = split(R"(\p{N})", SplitBehavior::kIsolated);
  smollm.add(PreTokenizer::Split{*Regex::compile(kGpt2Pattern), SplitBehavior::kIsolated, false});
  EXPECT_EQ(pieces(smollm, "in 2024 "), (Strings{"in", " ", "2", "0", "2", "4", " "}));
}

TEST(PreTokenizer, PrependSpace) {
  PreTokenizer prefix;
  prefix.add(PreTokenizer::PrependSpace{});
  EXPECT_EQ(pieces(prefix, "a b"), (Strings{" a b"}));
  EXPECT_EQ(pieces(prefix, " a"), (Strings{" a"}));
}

TEST(PreTokenizer, Metaspace) {
  const auto run = [](PreTokenizer::Metaspace::Prepend prepend, bool cut, std::string_view text, bool first) {
    PreTokenizer pre_tokenizer;
    pre_tokenizer.add(PreTokenizer::Metaspace{"_", prepend, cut});
    return pieces(pre_tokenizer, text, first);
  };
  using Metaspace = PreTokenizer::Metaspace;
  EXPECT_EQ(run(Metaspace::kAlways, true, "a  b", false), (Strings{"_a", "_", "_b"}));
  EXPECT_EQ(run(Metaspace::kAlways, false, " a b", true), (Strings{"_a_b"}));
  EXPECT_EQ(run(Metaspace::kFirst, false, "a b", true), (Strings{"_a_b"}));
  EXPECT_EQ(run(Metaspace::kFirst, false, "a b", false), (Strings{"a_b"}));
  EXPECT_EQ(run(Metaspace::kNever, true, "a b", true), (Strings{"a", "_b"}));
}

}  // namespace
}  // namespace nfp::text
