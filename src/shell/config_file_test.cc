#include "shell/config_file.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

namespace nfp::shell {
namespace {

std::string shown(std::string_view text) {
  const auto entries = parse_config_file(text, "f.toml", "serve");
  if (!entries.ok()) return entries.error().message;
  std::string out;
  for (const ConfigEntry& entry : *entries) {
    out += fmt::format("{}{}:{}=", out.empty() ? "" : " ", entry.line, entry.key);
    for (size_t i = 0; i < entry.values.size(); ++i) out += (i > 0 ? "|" : "") + entry.values[i];
    out += "?#b["[static_cast<size_t>(entry.kind)];
  }
  return out;
}

TEST(ConfigFile, ValuesOfEveryKind) {
  EXPECT_EQ(shown(""), "");
  EXPECT_EQ(shown("# nothing\n\n  # here\n"), "");
  EXPECT_EQ(shown("port = 8_001 # for tests\r\nhost=\"a # b\"\r\n"), "1:port=8001# 2:host=a # b?");
  EXPECT_EQ(shown("[serve]\nmax_num_seqs = 4\n\"quoted-key\" = true"), "2:max-num-seqs=4# 3:quoted-key=trueb");
  EXPECT_EQ(shown("a = 'C:\\x'\nb = \"\\u00e4\\t\\\"\\U0001F600\\\\\""),
            "1:a=C:\\x? 2:b=\xc3\xa4\t\"\xf0\x9f\x98\x80\\?");
  EXPECT_EQ(shown("a = [\"x\", 'y, z', # both\n  3,\n]\nb = []\nc = -1.5e+3"), "1:a=x|y, z|3[ 4:b=[ 5:c=-1.5e+3#");
  EXPECT_EQ(shown("a = +5\nb = false"), "1:a=5# 2:b=falseb");
  EXPECT_EQ(shown("a = 5#c\nb = [1#c\n,2#,3\n]#c\nc=true#"), "1:a=5# 2:b=1|2[ 5:c=trueb");
}

TEST(ConfigFile, WhatItIsNotIsToldWithItsLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"a = 1\nb", "f.toml:2:2: after the key 'b' there must be a '=': write b = ..."},
      {"a = hello",
       "f.toml:1:5: the value of 'a' is hello, not a number, true, false or [...]; text needs quotes: write a = "
       "\"hello\""},
      {"ab = /p a/x.gguf # c",
       "f.toml:1:6: the value of 'ab' is /p a/x.gguf, not a number, true, false or [...]; text needs quotes: "
       "write ab = \"/p a/x.gguf\""},
      {"# \u00e4\n\"\u00e4\" = x", "f.toml:2:7: the value of"},
      {"a = C:\\x", "write a = 'C:\\x'"},
      {"a = \u201cx\u201d", "write a = \"x\""},
      {"a = True", "write a = true"},
      {"a = off # c", "write a = false"},
      {"a = [x y, 1]",
       "f.toml:1:6: the value of 'a' is x y, not a number, true, false or [...]; text needs quotes: write \"x "
       "y\""},
      {"a =", "f.toml:1:4: the key 'a' has no value: write"},
      {"a = # c", "f.toml:1:5: the key 'a' has no value: write"},
      {"model: /path", "f.toml:1:8: after the key 'model' there must be a '=': write model = \"/path\""},
      {"port: 80", "write port = 80"},
      {"strict: yes", "write strict = true"},
      {"keys:\n  - x",
       "f.toml:1:6: after the key 'keys' there must be a '=': write keys = ..., or of a list [\"...\", \"...\"]"},
      {"--port 80", "f.toml:1:8: after the key '--port' there must be a '=': write port = 80"},
      {"--", "f.toml:1:3: a line is a key"},
      {"{\"port\": 80}", "f.toml:1:1: a line must begin with a key"},
      {"a = 1 2", "f.toml:1:5: the value of 'a' is 1 2, not a number"},
      {"a = \"x\" y", "f.toml:1:9: 'y': a line ends after its value; text with spaces needs quotes around all of it"},
      {"a = \"x\", \"y\"", "f.toml:1:8: ', \"y\"': a line ends after its value; several values are a list, in [...]"},
      {"a = 1,",
       "f.toml:1:5: the value of 'a' is 1,, not a number, true, false or [...]; text needs quotes: write a = 1"},
      {"a = 1\na = 2", "f.toml:2:1: the key 'a' is there twice"},
      {"a_b = 1\na-b = 2", "f.toml:2:1: the key 'a-b' is there twice"},
      {"[other]\na = 1", "f.toml:1:1: '[other]': the only table is [serve]"},
      {"[[serve]] # a list\na = 1", "f.toml:1:1: '[[serve]]': the only table is [serve]"},
      {"[serve\na = 1", "f.toml:1:1: '[serve': the only table is [serve]"},
      {"a = 1\n[serve]", "the only table is [serve], once and first"},
      {"[serve]\n[serve]", "f.toml:2:1: "},
      {"[serve\na = 1", "f.toml:1:1: "},
      {"a.b = 1", "is dotted"},
      {"a = \"x\nb = 1", "f.toml:1:5: a string does not end on its line: a \" is missing"},
      {"a = \"\"\"x\"\"\"", "several lines are not known"},
      {"a = [1, 2", "f.toml:1:5: the array of 'a' does not end: a ']' is missing"},
      {"a = [1,\n2", "f.toml:1:5: the array"},
      {"a = [\"1\" 2]", "f.toml:1:10: in the array of 'a' a comma is missing before this"},
      {"a = [1 2]", "f.toml:1:6: the value of 'a' is 1 2"},
      {"a = [[1]]", "f.toml:1:6: the value of 'a': there are no tables, nor lists in lists"},
      {"a = {b = 1}", "f.toml:1:5: the value of 'a'"},
      {"a = \"\\x\"", "an escape that TOML does not know"},
      {"a = \"\\ud800\"", "an escape that TOML does not know"},
      {"a = \"\\u12\"", "too few hexadecimal digits"},
      {"a = 0x10", "f.toml:1:5: the value of 'a' is 0x10,"},
      {"a = 1__0", "f.toml:1:5: the value of 'a'"},
      {"a = 1.", "f.toml:1:5: the value of 'a'"},
      {"= 1", "a line must begin with a key"},
  };
  for (const auto& [text, message] : cases)
    EXPECT_NE(shown(text).find(message), std::string::npos) << text << "\n" << shown(text);
}

class Apply : public ::testing::Test {
 protected:
  void SetUp() override {
    verb_ = app_.add_subcommand("serve", "");
    verb_->add_option("MODEL", model_)->required();
    verb_->add_option("--port", port_)->check(CLI::Range(0, 65535));
    verb_->add_option("--api-key", keys_);
    verb_->add_option("--size", size_)->transform(CLI::AsSizeValue(false));
    verb_->add_flag("--quiet", quiet_);
    verb_->add_flag("--loud", loud_);
    add_config_flag(*verb_);
    verb_->callback([this] { ran_ = true; });
    std::snprintf(path_, sizeof(path_), "%s", "/tmp/nfp-config-XXXXXX");
    ::close(mkstemp(path_));
  }
  void TearDown() override { std::remove(path_); }

  // Empty when it parsed.
  std::string parse(const std::string& file, std::vector<std::string> arguments = {}) {
    std::ofstream(path_) << file;
    arguments.insert(arguments.begin(), {"serve", "--config", path_});
    std::reverse(arguments.begin(), arguments.end());
    try {
      app_.parse(arguments);
    } catch (const CLI::ParseError& problem) {
      return problem.what();
    }
    return "";
  }

  CLI::App app_;
  CLI::App* verb_ = nullptr;
  std::string model_;
  int port_ = 8000;
  std::vector<std::string> keys_;
  uint64_t size_ = 0;
  bool quiet_ = false, loud_ = false, ran_ = false;
  char path_[64] = "";
};

TEST_F(Apply, FlagsComeFromTheFile) {
  EXPECT_EQ(
      parse("model = \"m\"\nport = 9\napi_key = [\"a b\", \"c,d#\"]\nsize = \"2KB\"\nquiet = true\nloud = false\n"),
      "");
  EXPECT_EQ(model_, "m");
  EXPECT_EQ(port_, 9);
  EXPECT_EQ(keys_, (std::vector<std::string>{"a b", "c,d#"}));
  EXPECT_EQ(size_, 2048u);
  EXPECT_TRUE(quiet_);
  EXPECT_FALSE(loud_);
  EXPECT_TRUE(ran_);
}

TEST_F(Apply, TheCommandLineGoesBefore) {
  EXPECT_EQ(parse("model = \"m\"\nport = 9\napi-key = \"x\"", {"--port", "10", "other"}), "");
  EXPECT_EQ(model_, "other");
  EXPECT_EQ(port_, 10);
  EXPECT_EQ(keys_, std::vector<std::string>{"x"});
}

TEST_F(Apply, UnknownKeysAndWrongValuesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"modle = \"m\"", ":1: there is no key 'modle'"},
      {"model = \"m\"\nconfig = \"x\"", ":2: there is no key 'config'"},
      {"help = true", "there is no key 'help'"},
      {"port = 70000", ":1: 'port': "},
      {"port = \"many\"", ":1: 'port': "},
      {"port = true", "'port' is not true or false"},
      {"port = [1, 2]", "'port' takes one value"},
      {"quiet = \"yes\"", "'quiet' is true or false"},
      {"quiet = 1", "'quiet' is true or false"},
      {"model = m", ":1:9: the value of 'model'"},
  };
  for (const auto& [text, message] : cases) {
    const std::string got = parse(text);
    EXPECT_NE(got.find(message), std::string::npos) << text << "\n" << got;
    EXPECT_FALSE(ran_);
  }
}

TEST_F(Apply, KeysAreCheckedAlsoWhereAFlagOverrides) {
  EXPECT_NE(parse("port = true", {"--port", "1", "m"}).find("'port' is not true or false"), std::string::npos);
  EXPECT_NE(parse("").find("MODEL"), std::string::npos) << "what is required still is";
}

}  // namespace
}  // namespace nfp::shell
