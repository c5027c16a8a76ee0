#include "server/grammar/grammar.h"

#include <gtest/gtest.h>

#include "server/testing/byte_tokenizer.h"

namespace nfp::server {
namespace {

GrammarSpec spec(GrammarSpec::Kind kind, std::string text) {
  GrammarSpec s;
  s.kind = kind;
  s.text = std::move(text);
  s.param = "guided";
  return s;
}

class GrammarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = make_byte_tokenizer();
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
    const int32_t end[] = {kByteEnd};
    compiler_ = make_grammar_compiler(*tokenizer, kByteVocab, end);
  }
  // Whether the whole text is allowed byte by byte, and may end there.
  bool allows(const GrammarSpec& s, std::string_view text) {
    auto compiled = compiler_->compile(s);
    if (!compiled.ok()) ADD_FAILURE() << compiled.error().message;
    if (!compiled.ok()) return false;
    auto constraint = (*compiled)->instantiate();
    std::vector<int32_t> tokens(text.begin(), text.end());
    for (int32_t& token : tokens) token &= 0xFF;
    tokens.push_back(kByteEnd);
    for (const int32_t token : tokens) {
      std::vector<uint32_t> mask((kByteVocab + 31) / 32, 0);
      const auto id = static_cast<uint32_t>(token);
      if (constraint->fill(mask) && (mask[id / 32] >> (id % 32) & 1u) == 0) return false;
      if (!constraint->accept(token)) return false;
    }
    return true;
  }
  std::unique_ptr<GrammarCompiler> compiler_;
};

using Kind = GrammarSpec::Kind;

TEST_F(GrammarTest, AllowsWhatTheGrammarAllows) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
  EXPECT_FALSE(allows(spec(Kind::kRegex, "[a-c]+"), "abd"));
  EXPECT_FALSE(allows(spec(Kind::kRegex, "[a-c]+"), ""));
  EXPECT_TRUE(allows(spec(Kind::kJsonObject, ""), R"({"a": [1, null]})"));
  EXPECT_FALSE(allows(spec(Kind::kJsonObject, ""), "[1]"));
  const auto schema =
      spec(Kind::kJsonSchema, R"({"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]})");
  EXPECT_TRUE(allows(schema, R"({"n": 5})"));
  EXPECT_FALSE(allows(schema, R"({"n": "5"})"));
  EXPECT_TRUE(allows(spec(Kind::kEbnf, "root ::= \"x\" | \"y\" root"), "yyx"));
  EXPECT_FALSE(allows(spec(Kind::kEbnf, "root ::= \"x\" | \"y\" root"), "yy"));
  GrammarSpec choice = spec(Kind::kChoice, "");
  choice.choices = {"a\"b\\", "new\nline", "é"};
  for (const std::string& text : choice.choices) EXPECT_TRUE(allows(choice, text)) << text;
  EXPECT_FALSE(allows(choice, "a"));
}

TEST_F(GrammarTest, NamesTheFieldOfABadGrammar) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const auto& bad : {spec(Kind::kRegex, "(["), spec(Kind::kEbnf, "root ::= missing"), spec(Kind::kEbnf, "%%%"),
                          spec(Kind::kJsonSchema, R"({"type":"nonsense"})")}) {
    const auto compiled = compiler_->compile(bad);
    ASSERT_FALSE(compiled.ok()) << bad.text;
    EXPECT_NE(compiled.error().message.find("'guided'"), std::string::npos);
    EXPECT_EQ(compiled.error().message.find(".cc"), std::string::npos) << compiled.error().message;
  }
}

TEST_F(GrammarTest, SaysSoWhereThereAreNone) {
  if (grammars_available()) GTEST_SKIP() << "built with xgrammar";
  const auto compiled = compiler_->compile(spec(Kind::kRegex, "a"));
  ASSERT_FALSE(compiled.ok());
  EXPECT_EQ(compiled.error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace nfp::server
