#include "server/grammar/grammar.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <thread>

#include "server/api/json_schema.h"
#include "server/testing/byte_tokenizer.h"

namespace nfp::server {
namespace {

using Kind = GrammarSpec::Kind;

GrammarSpec spec(Kind kind, std::string text) {
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
    tokenizer_ = *tokenizer;
    compiler_ = make_grammar_compiler(*tokenizer, kByteVocab, end);
  }
  void limit(GrammarLimits limits) {
    const int32_t end[] = {kByteEnd};
    compiler_ = make_grammar_compiler(tokenizer_, kByteVocab, end, nullptr, limits);
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
  // Schemas that are followed whole, each with a text that it allows and one that it does not.
  void expect_followed(std::initializer_list<std::tuple<const char*, const char*, const char*>> cases) {
    for (const auto& [schema, good, bad] : cases) {
      EXPECT_TRUE(unenforced_keywords(Json::parse(schema)).empty()) << schema;
      EXPECT_TRUE(allows(spec(Kind::kJsonSchema, schema), good)) << schema;
      EXPECT_FALSE(allows(spec(Kind::kJsonSchema, schema), bad)) << schema;
    }
  }
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<GrammarCompiler> compiler_;
};

// An object of 6000 optional properties: several seconds to compile. `name` makes others of it.
GrammarSpec slow_to_compile(const std::string& name = "p") {
  std::string text = R"({"type":"object","properties":{)";
  for (int i = 0; i < 6000; ++i) text += fmt::format("{}\"{}{}\":{{\"type\":\"integer\"}}", i > 0 ? "," : "", name, i);
  return spec(GrammarSpec::Kind::kJsonSchema, text + "}}");
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A thread of a process, of which /proc/PID/task/TID/stat tells.
struct Thread {
  pid_t process = 0, parent = 0, id = 0;
  int nice = 0;
};

// Of all processes that this one has forked, and those that these have.
std::vector<Thread> threads_below(pid_t root) {
  std::vector<Thread> all;
  std::error_code gone;  // processes come and go meanwhile
  for (const auto& process : std::filesystem::directory_iterator("/proc", gone)) {
    const pid_t pid = std::atoi(process.path().filename().c_str());
    if (pid <= 0) continue;
    for (auto it = std::filesystem::directory_iterator(process.path() / "task", gone);
         !gone && it != std::filesystem::directory_iterator(); it.increment(gone)) {
      std::ifstream file(it->path() / "stat");
      std::string line;
      std::getline(file, line);
      const size_t name_end = line.rfind(')');
      if (name_end == std::string::npos) continue;
      std::istringstream fields(line.substr(name_end + 1));
      std::vector<std::string> field(17);  // from the third, state, to the nineteenth, nice
      for (std::string& f : field) fields >> f;
      if (field[0] == "Z") continue;
      all.push_back(
          {pid, std::atoi(field[1].c_str()), std::atoi(it->path().filename().c_str()), std::atoi(field[16].c_str())});
    }
  }
  std::vector<Thread> below;
  std::vector<pid_t> known{root};
  for (size_t i = 0; i < known.size(); ++i) {
    for (const Thread& thread : all) {
      if (thread.parent != known[i]) continue;
      below.push_back(thread);
      if (std::find(known.begin(), known.end(), thread.process) == known.end()) known.push_back(thread.process);
    }
  }
  return below;
}

pid_t child_of(pid_t parent) {
  for (const Thread& thread : threads_below(parent)) {
    if (thread.parent == parent) return thread.process;
  }
  return -1;
}

void end_process(pid_t process) {
  kill(process, SIGKILL);
  // Nobody waits for it but its parent, so it is gone once it has no threads.
  const auto lives = [&] {
    for (const Thread& thread : threads_below(getpid())) {
      if (thread.process == process) return true;
    }
    return false;
  };
  while (lives()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Accepts the text of an answer that follows a grammar.
::testing::AssertionResult goes_on(TokenConstraint& constraint, std::string_view text) {
  std::vector<uint32_t> mask((kByteVocab + 31) / 32, 0);
  for (const char c : text) {
    constraint.fill(mask);
    if (!constraint.accept(c)) return ::testing::AssertionFailure() << constraint.failure();
  }
  return ::testing::AssertionSuccess();
}

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

// llama.cpp's, which xgrammar's EBNF is but for empty alternatives and the dot.
TEST_F(GrammarTest, ReadsGbnf) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const auto json = spec(Kind::kEbnf, R"gbnf(# grammars/json.gbnf of llama.cpp
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
)gbnf");
  EXPECT_TRUE(allows(json, R"({"a|": [1.5, "|)(", "é\n"],
  "b": {}})"));
  EXPECT_FALSE(allows(json, "[1]"));
  for (const char* nothing : {"a |", "a | # nothing", "| a", "| | a", "(a | )", "( | a)", "(|a) #", "(a|)", "() | a"}) {
    const auto maybe = spec(Kind::kEbnf, fmt::format("root ::= \"x\" y\na ::= \"|)\" [|)]\ny ::= {}", nothing));
    EXPECT_TRUE(allows(maybe, "x")) << nothing;
    EXPECT_TRUE(allows(maybe, "x|))")) << nothing;
    EXPECT_FALSE(allows(maybe, "xx")) << nothing;
  }
  const auto any = spec(Kind::kEbnf, R"(root ::= "a.".[.] (.)? # .)");
  EXPECT_TRUE(allows(any, "a.é."));
  EXPECT_TRUE(allows(any, "a.\n.x"));
  EXPECT_FALSE(allows(any, "a..x"));
}

TEST_F(GrammarTest, ADotIsNoLineBreak) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const char* text : {"a\nb", "a\rb", "a\u2028b", "a\u2029b"}) {
    EXPECT_FALSE(allows(spec(Kind::kRegex, "a.b"), text)) << text;
    EXPECT_FALSE(allows(spec(Kind::kRegex, R"((\\.)+.{1,2})"), std::string("\\") + text)) << text;
    EXPECT_TRUE(allows(spec(Kind::kRegex, R"(a[^.]b|[\s\S])"), text)) << text;
  }
  for (const char* text : {"a.b", "a b", "aéb", "a😀b"}) EXPECT_TRUE(allows(spec(Kind::kRegex, "a.b"), text)) << text;
  EXPECT_TRUE(allows(spec(Kind::kRegex, R"(a\.[.])"), "a.."));
  EXPECT_FALSE(allows(spec(Kind::kRegex, R"(a\.[.\]])"), "axx"));
  EXPECT_FALSE(allows(spec(Kind::kRegex, "(xa+)?"), "a"));
  EXPECT_FALSE(allows(spec(Kind::kRegex, "(xa{0,2}){2,}"), "xxaaa"));
}

// xgrammar would take the escaped "^" for a negation, and the letter behind \x61 for a digit.
TEST_F(GrammarTest, EscapesInARegexMeanOneCharacter) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {R"([\^a])", "^", "b"},         {R"([\^a])", "a", "b"},       {R"([\^])", "^", "a"},
      {R"([\x5Ea]{2})", "^a", "bb"},  {R"([\u005e\^b])", "b", "a"}, {R"([\^-z])", "_", "A"},
      {R"([\^-])", "-", "_"},         {R"([\^^])", "^", "a"},       {R"([^\^a])", "b", "^"},
      {R"([\^^\x5e\^-`])", "_", "a"}, {R"(\x61b)", "ab", "\u061b"}, {R"([\x61bc])", "a", "d"},
      {R"([.\]]\[[a])", ".[a", "b[a"}};
  for (const auto& [regex, good, bad] : cases) {
    EXPECT_TRUE(allows(spec(Kind::kRegex, regex), good)) << regex;
    EXPECT_FALSE(allows(spec(Kind::kRegex, regex), bad)) << regex;
  }
}

// What JavaScript's expressions mean, as a whole answer and as a schema's pattern. xgrammar would pass over the
// anchors, and read other characters into the classes.
TEST_F(GrammarTest, RegularExpressionsMeanWhatTheyDoInJavaScript) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::tuple<const char*, std::vector<const char*>, std::vector<const char*>> cases[] = {
      {"^a$|^b$", {"a", "b"}, {"ab", ""}},
      {"a|^b$", {"a", "b"}, {"ab"}},
      {"(^a|b$)", {"a", "b"}, {"ab"}},
      {"(^a|b$)c", {"ac"}, {"bc", "c"}},
      {"c(^a|b$|d)", {"cb", "cd"}, {"ca", "c"}},
      {"(^|,)a(,|$)", {"a", ",a", "a,"}, {""}},
      {"x(^|,)a", {"x,a"}, {"xa"}},
      {"(^a)?b", {"ab", "b"}, {"a"}},
      {"a(b$)?", {"a", "ab"}, {"b"}},
      {"(a$b)*c", {"c"}, {"abc"}},
      {"^^a$$", {"a"}, {""}},
      {"a\\s", {"a ", "a\u00a0", "a\ufeff", "a\u2003", "a\u2028"}, {"aa", "a\u200b"}},
      {"a\\S", {"aé", "a\u200b", "a😀"}, {"a ", "a\u00a0", "a\ufeff", "a\u2028"}},
      {"a[^\\S]", {"a\u3000"}, {"ab"}},
      {"a.", {"aé", "a\u00a0"}, {"a\u2028", "a\u2029"}},
      {"\\w\\d", {"_9"}, {"é9", "_٣"}},
      {"[^]", {"é"}, {""}},
      {"a|[]", {"a"}, {""}},
      {"\\ud83d\\ude00", {"😀"}, {"?"}},
      {"\\u{1f600}{2}", {"😀😀"}, {"😀"}},
      {"{a}]", {"{a}]"}, {"a"}},
      {"a{0}b", {"b"}, {"ab"}},
      {"(?<name_1>a)(?P<n>b)", {"ab"}, {"a"}},
      {"(?i)a[b-c]", {"aB", "Ac"}, {"Ad"}},
      {"(?:ab?){200,}", {}, {"ab"}},
  };
  for (const auto& [regex, good, bad] : cases) {
    const auto pattern = spec(Kind::kJsonSchema, dump(Json{{"type", "string"}, {"pattern", regex}}));
    for (const char* text : good) {
      EXPECT_TRUE(allows(spec(Kind::kRegex, regex), text)) << regex << " " << text;
      EXPECT_TRUE(allows(pattern, dump(Json(text)))) << regex << " " << text;
    }
    for (const char* text : bad) {
      EXPECT_FALSE(allows(spec(Kind::kRegex, regex), text)) << regex << " " << text;
      EXPECT_FALSE(allows(pattern, dump(Json(text)))) << regex << " " << text;
    }
  }
}

TEST_F(GrammarTest, NamesWhatOfARegularExpressionIsNotFollowed) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::pair<const char*, const char*> cases[] = {
      {"a?^b", "'^' behind what may be empty or not is not supported, at character 3"},
      {"(a|^b)+", "'^' behind what may be empty or not is not supported, at character 4"},
      {"a$b?", "'$' before what may be empty or not is not supported, at character 2"},
      {"é\\bb", "'\\b' (a word boundary) is not supported, at character 2"},
      {"\\p{L}", "'\\p' (a Unicode property) is not supported, at character 1"},
      {"(a)\\1", "'\\1' (a reference to a group) is not supported, at character 4"},
      {"a\\Z", "'\\Z' is no escape of JavaScript's, at character 2"},
      {"(?<=a)b", "lookbehind is not supported, at character 1"},
      {"(?s:a)", "this kind of group ('(?') is not supported, at character 1"},
      {"a**", "nothing is there to be repeated, at character 3"},
      {"a{,3}", "nothing is there to be repeated (a brace is '\\{'), at character 2"},
      {"a{3,2}", "a repetition has its numbers out of order, at character 2"},
      {"^*", "an anchor is repeated, at character 1"},
      {"[b-a]", "a range of characters is out of order, at character 2"},
      {"(a", "'(' is not closed, at character 1"},
      {"a)", "')' closes nothing, at character 2"},
      {"[a", "'[' is not closed, at character 1"},
      {"b^a", "no text matches it"},
  };
  for (const auto& [regex, message] : cases) {
    for (const bool pattern : {false, true}) {
      const auto compiled =
          compiler_->compile(pattern ? spec(Kind::kJsonSchema, dump(Json{{"type", "string"}, {"pattern", regex}}))
                                     : spec(Kind::kRegex, regex));
      ASSERT_FALSE(compiled.ok()) << regex;
      EXPECT_EQ(compiled.error().code, ErrorCode::kInvalidInput);
      const std::string where = pattern ? fmt::format(" (in the pattern '{}')", regex) : "";
      EXPECT_EQ(compiled.error().message, fmt::format("'guided' cannot be compiled: {}{}", message, where));
    }
  }
  EXPECT_FALSE(compiler_->compile(spec(Kind::kRegex, "(?=a)b")).ok());
  EXPECT_FALSE(compiler_->compile(spec(Kind::kRegex, std::string(100'000, '('))).ok());
}

// A part that is repeated more than 128 times is a grammar of its own to xgrammar, which had quotes in it.
TEST_F(GrammarTest, PartsThatAreRepeatedOftenAreJson) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const char* regex : {"^.{1,200}$", "^.{1,200000}$", "^[^a]{1,129}$", "^(?:\\S\\s?){1,500}$"}) {
    const auto pattern = spec(Kind::kJsonSchema, dump(Json{{"type", "string"}, {"pattern", regex}}));
    EXPECT_TRUE(allows(pattern, "\"üb\"")) << regex;
    for (const char* inside : {"\"", "\t", "\\", "b\"b", "b\\b"}) {
      EXPECT_FALSE(allows(pattern, fmt::format("\"{}\"", inside))) << regex;
    }
  }
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

TEST_F(GrammarTest, CompilingEndsAtItsTime) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.compile_time = std::chrono::milliseconds(300)});
  const auto begin = std::chrono::steady_clock::now();
  const auto compiled = compiler_->compile(slow_to_compile());
  ASSERT_FALSE(compiled.ok());
  EXPECT_EQ(compiled.error().code, ErrorCode::kInvalidInput);
  EXPECT_NE(compiled.error().message.find("longer than 0.3 s"), std::string::npos) << compiled.error().message;
  EXPECT_LT(seconds_since(begin), 61);  // by the clock, of which it may have had little
  EXPECT_EQ(compiler_->stats().refused_time, 1u);
  EXPECT_EQ(compiler_->stats().compiling, 0);
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
}

// Its processes stand still, as if others had the machine: what a grammar costs is not more for that.
TEST_F(GrammarTest, ABusyMachineRefusesNoGrammar) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.compile_time = std::chrono::seconds(1)});
  ASSERT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
  const auto signal_all = [](int number) {
    for (const Thread& thread : threads_below(getpid())) {
      if (thread.process != getpid()) kill(thread.process, number);
    }
  };
  signal_all(SIGSTOP);
  std::optional<Result<Compiled>> result;
  std::thread asks([&] { result = compiler_->compile(spec(Kind::kRegex, "[d-f]+")); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2300));
  signal_all(SIGCONT);
  asks.join();
  ASSERT_TRUE(result->ok()) << result->error().message;
  // But nobody waits for ever, and it is not called the grammar's fault.
  limit({.compile_time = std::chrono::seconds(1), .compile_patience = std::chrono::milliseconds(200)});
  ASSERT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
  signal_all(SIGSTOP);
  const auto starved = compiler_->compile(spec(Kind::kRegex, "[g-i]+"));
  signal_all(SIGCONT);
  ASSERT_FALSE(starved.ok());
  EXPECT_EQ(starved.error().code, ErrorCode::kResource);
  EXPECT_NE(starved.error().message.find("'guided' is not compiled after 1.2 s"), std::string::npos)
      << starved.error().message;
  EXPECT_EQ(compiler_->stats().refused_busy, 1u);
  EXPECT_EQ(compiler_->stats().refused_time, 0u);
}

TEST_F(GrammarTest, CompilingEndsWhenNobodyWantsItAnyMore) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.compile_time = std::chrono::minutes(10)});
  std::stop_source stop;
  std::optional<Result<Compiled>> result;
  std::thread asks([&] { result = compiler_->compile(slow_to_compile(), stop.get_token()); });
  while (compiler_->stats().compiling == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  stop.request_stop();
  asks.join();
  ASSERT_FALSE(result->ok());
  EXPECT_EQ(result->error().code, ErrorCode::kCancelled);
  EXPECT_EQ(compiler_->stats().cancelled, 1u);
}

TEST_F(GrammarTest, NobodyKeepsOthersFromCompiling) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.compile_time = std::chrono::minutes(10), .compile_share = std::chrono::milliseconds(200)});
  std::vector<std::thread> hogs;
  std::stop_source stop;
  std::atomic<int> stopped{0};
  hogs.reserve(16);
  for (int i = 0; i < 16; ++i) {  // all places
    hogs.emplace_back([&, i] {
      const auto compiled = compiler_->compile(slow_to_compile(fmt::format("p{}_", i)), stop.get_token());
      if (!compiled.ok() && compiled.error().code == ErrorCode::kResource) ++stopped;
    });
  }
  while (compiler_->stats().compiling < 16) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
  EXPECT_GE(stopped, 1);
  stop.request_stop();
  for (std::thread& hog : hogs) hog.join();
}

TEST_F(GrammarTest, AMaskThatTakesTooLongEndsTheAnswerOnly) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.token_burst = std::chrono::milliseconds(50), .token_mean = std::chrono::microseconds(100)});
  // Ambiguous: every way to cut the text into sums is followed at once.
  const auto ambiguous = compiler_->compile(
      spec(Kind::kEbnf, "root ::= e\ne ::= e e | e e e | \"a\" | \"a\" e | e \"a\" | \"a\" e \"a\""));
  const auto cheap = compiler_->compile(spec(Kind::kRegex, "a*"));
  ASSERT_TRUE(ambiguous.ok()) << ambiguous.error().message;
  ASSERT_TRUE(cheap.ok());
  const auto dear = (*ambiguous)->instantiate();
  const auto other = (*cheap)->instantiate();
  std::vector<uint32_t> mask((kByteVocab + 31) / 32, 0);
  bool ended = false;
  for (int i = 0; i < 5000 && !ended; ++i) {
    dear->fill(mask);
    ended = !dear->accept('a');
    ASSERT_TRUE(other->fill(mask));
    ASSERT_TRUE(other->accept('a'));
  }
  EXPECT_TRUE(ended);
  EXPECT_NE(dear->failure().find("'guided' takes too long"), std::string::npos) << dear->failure();
  EXPECT_TRUE(dear->ready(std::chrono::microseconds(0)));
  EXPECT_EQ(compiler_->stats().answers_stopped, 1u);
}

TEST_F(GrammarTest, SurvivesTheEndOfTheProcessesThatMakeOthers) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const auto compiled = compiler_->compile(spec(Kind::kRegex, "[a-c]+"));
  ASSERT_TRUE(compiled.ok()) << compiled.error().message;
  const auto under_way = (*compiled)->instantiate();
  ASSERT_TRUE(goes_on(*under_way, "abc"));
  const pid_t first = child_of(getpid()), holder = child_of(first);
  ASSERT_GT(holder, 0);

  end_process(holder);
  EXPECT_TRUE(goes_on(*under_way, "abc"));
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[d-f]+"), "def"));
  EXPECT_EQ(compiler_->stats().restarts, 1u);

  end_process(first);
  EXPECT_TRUE(goes_on(*under_way, "abc"));
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[g-i]+"), "ghi"));  // its holder lives
  EXPECT_EQ(compiler_->stats().restarts, 1u);
}

// A process for grammars is the program, started again, without what the server knows: no keys of its environment, none
// of its descriptors but the standard ones.
void see_what_processes_have(GrammarCompiler& compiler) {
  setenv("NESTEDFP_API_KEY", "secret", 1);
  // Not closed on exec: as a library might leave it.
  const int port = dup(STDERR_FILENO);
  const auto compiled = compiler.compile(spec(Kind::kRegex, "[a-c]+"));
  close(port);
  unsetenv("NESTEDFP_API_KEY");
  ASSERT_TRUE(compiled.ok()) << compiled.error().message;
  const auto under_way = (*compiled)->instantiate();
  ASSERT_TRUE(goes_on(*under_way, "abc"));
  int seen = 0;
  for (const Thread& thread : threads_below(getpid())) {
    if (thread.process == getpid()) continue;
    ++seen;
    const std::string folder = fmt::format("/proc/{}/", thread.process);
    std::ifstream name_file(folder + "cmdline"), environment_file(folder + "environ");
    const std::string name{std::istreambuf_iterator<char>(name_file), {}};
    const std::string environment{std::istreambuf_iterator<char>(environment_file), {}};
    EXPECT_EQ(name, std::string("nestedfp-grammar\0", 17));
    EXPECT_EQ(environment.find("secret"), std::string::npos);
    for (const auto& fd : std::filesystem::directory_iterator(folder + "fd")) {
      const std::string file = std::filesystem::read_symlink(fd.path()).string();
      EXPECT_TRUE(std::stoi(fd.path().filename()) <= 2 || file.starts_with("socket:")) << file;
    }
  }
  EXPECT_GE(seen, 4);  // the first, the vocabulary's, the grammar's, the answer's
}

TEST_F(GrammarTest, ProcessesHaveNothingOfTheServers) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  see_what_processes_have(*compiler_);
}

// As Linux before 5.9: for this process and all that it starts.
bool take_away_close_range() {
  sock_filter steps[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close_range, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{std::size(steps), steps};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 &&
         close_range(1000, 1000, 0) != 0;
}

using GrammarDeathTest = GrammarTest;

TEST_F(GrammarDeathTest, NorWhereTheKernelHasNoCloseRange) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto see = [&] {
    if (!take_away_close_range()) _exit(77);
    see_what_processes_have(*compiler_);
    _exit(HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(
      see(), [](int status) { return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77); },
      "");
}

TEST_F(GrammarTest, AllProcessesKilledEndsTheAnswersUnderWayOnly) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.compile_time = std::chrono::seconds(1)});
  const auto compiled = compiler_->compile(spec(Kind::kRegex, "[a-c]+"));
  ASSERT_TRUE(compiled.ok()) << compiled.error().message;
  const auto under_way = (*compiled)->instantiate(), not_begun = (*compiled)->instantiate();
  ASSERT_TRUE(goes_on(*under_way, "abc"));
  // A grammar that is being compiled is lost with its process, and begun again.
  std::optional<Result<Compiled>> lost;
  std::thread asks([&] { lost = compiler_->compile(slow_to_compile()); });
  while (compiler_->stats().compiling == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (const Thread& thread : threads_below(getpid())) {
    if (thread.process != getpid()) kill(thread.process, SIGKILL);
  }
  asks.join();
  ASSERT_FALSE(lost->ok());
  EXPECT_NE(lost->error().message.find("longer than 1 s"), std::string::npos) << lost->error().message;
  for (TokenConstraint* constraint : {under_way.get(), not_begun.get()}) {
    EXPECT_FALSE(goes_on(*constraint, "abc"));
    EXPECT_EQ(constraint->failure(), "the process of the grammar in 'guided' has ended; try again");
    EXPECT_EQ(constraint->failure_code(), ErrorCode::kIo);
  }
  EXPECT_TRUE(allows(spec(Kind::kRegex, "[a-c]+"), "abc"));
  EXPECT_GE(compiler_->stats().restarts, 1u);
}

// What the client sent is not to blame for a limit of processes, nor for one of open files.
void meet_limits(GrammarCompiler& compiler) {
  const auto check = [](bool holds, const std::string& what) {
    if (holds) return;
    fmt::print(stderr, "{}\n", what);
    _exit(1);
  };
  const std::string said = "no process could be made for a grammar; try again later";
  const auto refused = [&](const char* regex) {
    const auto compiled = compiler.compile(spec(Kind::kRegex, regex));
    check(!compiled.ok() && compiled.error().code == ErrorCode::kResource && compiled.error().message == said,
          compiled.ok() ? "compiled" : compiled.error().message);
  };
  // Nobody's limits are those of who is root.
  if (getuid() == 0) check(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0, "setresuid");
  const auto compiled = compiler.compile(spec(Kind::kRegex, "[a-c]+"));
  check(compiled.ok(), "a grammar before there are limits");
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  const rlimit none{0, files.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  refused("[d-f]+");
  setrlimit(RLIMIT_NOFILE, &files);
  const rlimit one{1, 1};
  for (const Thread& thread : threads_below(getpid())) prlimit(thread.process, RLIMIT_NPROC, &one, nullptr);
  refused("[g-i]+");
  const auto answer = (*compiled)->instantiate();
  check(!goes_on(*answer, "abc") && answer->failure() == said && answer->failure_code() == ErrorCode::kResource,
        std::string(answer->failure()));
  _exit(0);
}

TEST_F(GrammarDeathTest, WhereTheSystemGivesNoProcessItIsNotTheGrammar) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(meet_limits(*compiler_), ::testing::ExitedWithCode(0), "");
}

// Nothing that belongs to a grammar may take a processor from the server's threads for long.
TEST_F(GrammarTest, GivesWayToTheServer) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const int ours = getpriority(PRIO_PROCESS, 0);
  if (ours >= 19) GTEST_SKIP() << "runs with too low a priority to see others give way";
  ASSERT_TRUE(compiler_->compile(spec(Kind::kRegex, "[a-c]+")).ok());  // the vocabulary is indexed
  std::stop_source stop;
  std::thread asks([&] { (void)compiler_->compile(slow_to_compile(), stop.get_token()); });
  const auto lowest = [&] {
    int nice = ours;
    for (const Thread& thread : threads_below(getpid())) {
      if (thread.process != getpid()) nice = std::max(nice, thread.nice);
    }
    return nice;
  };
  while (lowest() < std::min(19, ours + 15)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  stop.request_stop();
  asks.join();
  // An answer starts as the server is, however long its grammar took to compile.
  const auto compiled = compiler_->compile(spec(Kind::kRegex, "(a?){3000}"));
  ASSERT_TRUE(compiled.ok()) << compiled.error().message;
  const auto constraint = (*compiled)->instantiate();
  while (lowest() > ours) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // what was stopped is gone
  while (!constraint->ready(std::chrono::milliseconds(20))) {
  }
  EXPECT_EQ(constraint->failure(), "");
}

TEST_F(GrammarTest, KeepsCompiledGrammarsWithinTheirBytes) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  limit({.cache_bytes = 20u << 20});  // about ten, by their processes alone
  for (int i = 0; i < 30; ++i)
    ASSERT_TRUE(compiler_->compile(spec(Kind::kRegex, "a{" + std::to_string(i + 1) + "}")).ok());
  EXPECT_LE(compiler_->stats().cached_bytes, 20u << 20);
  EXPECT_NE(compiler_->find(spec(Kind::kRegex, "a{30}")), nullptr);
  EXPECT_EQ(compiler_->find(spec(Kind::kRegex, "a{1}")), nullptr);
  // One that is in use stays, whether it is kept or not.
  const auto first = compiler_->compile(spec(Kind::kRegex, "b"));
  ASSERT_TRUE(first.ok());
  const auto constraint = (*first)->instantiate();
  for (int i = 0; i < 30; ++i)
    ASSERT_TRUE(compiler_->compile(spec(Kind::kRegex, "c{" + std::to_string(i + 1) + "}")).ok());
  std::vector<uint32_t> mask((kByteVocab + 31) / 32, 0);
  EXPECT_TRUE(constraint->fill(mask));
  EXPECT_TRUE(constraint->accept('b'));
}

TEST_F(GrammarTest, WhatNothingSatisfiesIsRefused) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const char* schema : {R"({"$ref":"#"})", R"({"anyOf":[{"$ref":"#"},{"$ref":"#"}]})",
                             R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})"}) {
    const auto compiled = compiler_->compile(spec(Kind::kJsonSchema, schema));
    ASSERT_FALSE(compiled.ok()) << schema;
    EXPECT_NE(compiled.error().message.find("no text satisfies it"), std::string::npos) << compiled.error().message;
  }
}

// RFC 6901: escapes, in a URI; lists; names with a slash.
TEST_F(GrammarTest, ReferencesAreJsonPointers) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::pair<const char*, const char*> cases[] = {
      {R"({"$defs":{"a/b":{"const":1}},"$ref":"#/$defs/a~1b"})", "1"},
      {R"({"$defs":{"a/b":{"const":1}},"$ref":"#/%24defs/a%7E1b"})", "1"},
      {R"({"$defs":{"a~b":{"const":1}},"$ref":"#/$defs/a~0b"})", "1"},
      {R"({"$defs":{"a~1b":{"const":1}},"$ref":"#/$defs/a~01b"})", "1"},
      {R"({"$defs":{"List<int>":{"const":1}},"$ref":"#/$defs/List%3Cint%3E"})", "1"},
      {R"({"$defs":{"ü":{"const":1}},"$ref":"#/$defs/%C3%BC"})", "1"},
      {R"({"$defs":{"10%":{"const":1}},"$ref":"#/$defs/10%"})", "1"},
      {R"({"$defs":{"":{"const":1}},"$ref":"#/$defs/"})", "1"},
      {R"({"type":"array","prefixItems":[{"const":2},{"const":1}],"items":{"$ref":"#/prefixItems/1"},"minItems":3})",
       "[2, 1, 1]"},
      {R"({"x-references":{},"$defs":{"a/b":{"$defs":{"c":{"const":1}}}},"$ref":"#/$defs/a~1b/$defs/c"})", "1"},
      {R"({"type":"object","properties":{"a/b":{"const":1},"c":{"$ref":"#/properties/a~1b"}},"required":["a/b","c"]})",
       R"({"a/b": 1, "c": 1})"},
      {R"({"anyOf":[{"const":1},{"type":"array","items":{"$ref":"#/anyOf/1"},"maxItems":1},{"$ref":"#/anyOf/0"}]})",
       "[[]]"},
      // One within another.
      {R"({"type":"array","prefixItems":[{"$ref":"#/$defs/l/anyOf/0"},{"$ref":"#/$defs/l/anyOf/0/anyOf/0"},
           {"$ref":"#/$defs/l/anyOf/0/anyOf/0/anyOf/1"},{"$ref":"#/$defs/l/anyOf/1"}],"items":false,"minItems":4,
           "$defs":{"l":{"anyOf":[{"anyOf":[{"anyOf":[{"const":1},{"const":2}]},{"const":3}]},{"const":4}]}}})",
       "[3, 2, 2, 4]"},
      {R"({"type":"array","prefixItems":[{"const":2}],"items":{"$ref":"#/$defs/a"},"$defs":{
           "b":{"type":"integer","$defs":{"0":{"anyOf":[{"$ref":"#/$defs/a/prefixItems/0/anyOf/0"}]}}},
           "a":{"type":"array","prefixItems":[{"anyOf":[{"const":3},{"$ref":"#/$defs/a/prefixItems/0"},
           {"$ref":"#/$defs/b/$defs/0/anyOf/0"}]},{"$ref":"#/$defs/a/prefixItems/0/anyOf/1"}],"items":{"const":0}}}})",
       "[2, [3, 3, 0]]"},
      {R"({"type":"array","items":{"$ref":"#/$defs/named/patternProperties/%5Ea%3Fb$"},"minItems":1,"maxItems":1,)"
       R"("$defs":{"named":{"type":"object","patternProperties":{"^a?b$":{"const":1}}}}})",
       "[1]"},
      {R"({"type":"array","items":{"$ref":"#/$defs/named/patternProperties/^ü$/anyOf/1"},"minItems":1,"maxItems":1,)"
       R"("$defs":{"named":{"type":"object","patternProperties":{"^ü$":{"anyOf":[{"const":2},{"const":1}]}}}}})",
       "[1]"},
  };
  for (const auto& [schema, good] : cases) {
    EXPECT_TRUE(unenforced_keywords(Json::parse(schema)).empty()) << schema;
    EXPECT_TRUE(allows(spec(Kind::kJsonSchema, schema), good)) << schema;
    EXPECT_FALSE(allows(spec(Kind::kJsonSchema, schema), "[2, 2, 2]")) << schema;
    EXPECT_FALSE(allows(spec(Kind::kJsonSchema, schema), "{}")) << schema;
  }
  for (const char* schema : {R"({"$ref":"#/$defs/a~1b","$defs":{"a":{"b":{"const":1}}}})", R"({"$ref":"#/anyOf/01"})",
                             R"({"$ref":"#/anyOf/2","anyOf":[true]})"}) {
    const auto compiled = compiler_->compile(spec(Kind::kJsonSchema, schema));
    ASSERT_FALSE(compiled.ok()) << schema;
    EXPECT_NE(compiled.error().message.find("Cannot find field"), std::string::npos) << compiled.error().message;
  }
}

TEST_F(GrammarTest, WhatNoSchemaMayHaveIsRefusedByItsPlace) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"string","maxLength":-1})", "'#/maxLength' must be a whole number, 0 or more"},
      {R"({"type":"object","properties":{"a":{"minItems":-1}}})", "'#/properties/a/minItems' must be a whole number"},
      {R"({"type":"string","minLength":1.5})", "'#/minLength' must be a whole number"},
      {R"({"type":"object","maxProperties":"3"})", "'#/maxProperties' must be a whole number"},
      {R"({"type":[]})", "'#/type' must be a list that is not empty"},
      {R"({"anyOf":[{"type":"null"},{"items":{"oneOf":[]}}]})", "'#/anyOf/1/items/oneOf' must be a list"},
      {R"({"allOf":[]})", "'#/allOf' must be a list that is not empty"},
      {R"({"$ref":"#/parts/a","parts":{"a":{"type":[]}}})", "'#/parts/a/type' must be a list"},
  };
  for (const auto& [schema, message] : cases) {
    const auto compiled = compiler_->compile(spec(Kind::kJsonSchema, schema));
    ASSERT_FALSE(compiled.ok()) << schema;
    EXPECT_EQ(compiled.error().code, ErrorCode::kInvalidInput);
    EXPECT_NE(compiled.error().message.find(message), std::string::npos) << compiled.error().message;
  }
  // Names of properties, values and what nobody knows are no keywords.
  for (const char* schema : {R"({"type":"object","properties":{"maxLength":{"const":-1},"type":{"const":[]}}})",
                             R"({"const":{"maxLength":-1}})", R"({"type":"null","x-form":{"maxLength":-1}})"}) {
    EXPECT_TRUE(compiler_->compile(spec(Kind::kJsonSchema, schema)).ok()) << schema;
  }
}

// As in JSON Schema, where 2.0 is an integer.
TEST_F(GrammarTest, WholeNumbersMayBeWrittenWithAFractionOfZero) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  expect_followed({{R"({"type":"string","minLength":2.0,"maxLength":3e0})", R"("ab")", R"("a")"},
                   {R"({"type":"string","maxLength":2.0})", R"("ab")", R"("abc")"},
                   {R"({"type":"array","items":{"const":1},"minItems":1.0,"maxItems":2.0})", "[1, 1]", "[1, 1, 1]"},
                   {R"({"type":"object","additionalProperties":{"const":1},"minProperties":1.0})", R"({"a": 1})", "{}"},
                   {R"({"type":"integer","minimum":2.0,"maximum":3.0})", "3", "4"},
                   {R"({"type":"integer","multipleOf":2.0})", "4", "3"}});
}

TEST_F(GrammarTest, DecimalsAreWrittenAsTheSchemaHasThem) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const auto few = spec(Kind::kJsonSchema, R"({"type":["number","null"],"enum":[0.1,0.25,0.7,-2.3,1,null]})");
  for (const char* text : {"0.1", "0.25", "0.7", "-2.3", "1", "null"}) EXPECT_TRUE(allows(few, text)) << text;
  for (const char* text : {"0.2", "0.11", "0.69999999999999996", "2.3", "0", "[]"})
    EXPECT_FALSE(allows(few, text)) << text;
  EXPECT_TRUE(
      allows(spec(Kind::kJsonSchema, R"({"type":"array","items":{"const":3.14159},"minItems":1})"), "[3.14159]"));
  EXPECT_FALSE(allows(spec(Kind::kJsonSchema, R"({"const":3.14159})"), "3.1415"));
  const auto others = spec(Kind::kJsonSchema, R"({"enum":[0.1,{"a":[1]},"x"]})");
  EXPECT_TRUE(allows(others, R"({"a":[1]})"));
  EXPECT_TRUE(allows(others, R"("x")"));
  EXPECT_FALSE(allows(others, R"("y")"));
}

TEST_F(GrammarTest, BoundsOfIntegersBeyond64BitsAreLeftOut) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const auto schema = spec(Kind::kJsonSchema, R"({"type":"integer","minimum":0,"maximum":18446744073709551615})");
  EXPECT_TRUE(allows(schema, "18446744073709551615"));
  EXPECT_FALSE(allows(schema, "-1"));
  EXPECT_TRUE(allows(spec(Kind::kJsonSchema, R"({"type":["integer","null"],"exclusiveMinimum":-1e20})"), "-1"));
}

TEST_F(GrammarTest, BoundsOfIntegersMayHaveAFraction) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  expect_followed({{R"({"type":"integer","minimum":1.5,"maximum":2.5})", "2", "1"},
                   {R"({"type":"integer","minimum":1.5,"maximum":2.5})", "2", "3"},
                   {R"({"type":"integer","exclusiveMinimum":1.5,"exclusiveMaximum":2.5})", "2", "1"},
                   {R"({"type":["integer","null"],"exclusiveMinimum":-1.5,"exclusiveMaximum":-0.5})", "-1", "0"},
                   {R"({"type":"integer","minimum":-0.5,"maximum":0.5})", "0", "1"},
                   {R"({"type":["integer","number"],"minimum":0.1,"maximum":0.9})", "0.5", "1"}});
  EXPECT_FALSE(compiler_->compile(spec(Kind::kJsonSchema, R"({"type":"integer","minimum":1.2,"maximum":1.8})")).ok());
}

// Within bounds the grammar has six decimals, and a number's place would be left empty.
TEST_F(GrammarTest, BoundsTooCloseForSixDecimalsAreLeftOut) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const char* bounds :
       {R"("exclusiveMinimum":0,"maximum":1e-7)", R"("minimum":1e-8,"maximum":5e-7)",
        R"("minimum":-5e-7,"exclusiveMaximum":-1e-7)", R"("minimum":0.1234567,"maximum":0.1234567)",
        R"("exclusiveMinimum":1e-6,"exclusiveMaximum":2e-6)"}) {
    const std::string schema = fmt::format(R"({{"type":["number","null"],{}}})", bounds);
    EXPECT_EQ(unenforced_keywords(Json::parse(schema)).size(), 2u) << schema;
    EXPECT_TRUE(allows(spec(Kind::kJsonSchema, schema), "1e-8")) << schema;
    EXPECT_FALSE(allows(spec(Kind::kJsonSchema, schema), "")) << schema;
  }
  const std::string exact = R"({"type":"number","exclusiveMinimum":1e-6,"exclusiveMaximum":3e-6})";
  EXPECT_TRUE(unenforced_keywords(Json::parse(exact)).empty());
  EXPECT_TRUE(allows(spec(Kind::kJsonSchema, exact), "0.000002"));
  EXPECT_FALSE(allows(spec(Kind::kJsonSchema, exact), "0.000003"));
  EXPECT_FALSE(compiler_->compile(spec(Kind::kJsonSchema, R"({"type":"number","minimum":2,"maximum":1})")).ok());
}

TEST_F(GrammarTest, FirstItemsMayBeTrueOrMoreThanThereMayBe) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  expect_followed({{R"({"type":"array","prefixItems":[true,{"const":1}],"minItems":2})", R"(["a", 1])", "[1, 2]"},
                   {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"maxItems":1})", "[1]", "[1, 2]"},
                   {R"({"type":"array","prefixItems":[{"const":1},{"const":2}],"maxItems":1})", "[1]", "[1, 1]"},
                   {R"({"type":"array","prefixItems":[{"const":1},false]})", "[1]", "[1, 1]"},
                   {R"({"type":"array","prefixItems":[{"const":1}],"maxItems":0})", "[]", "[1]"}});
}

// xgrammar keeps described names from the others as they are, and what it leaves of these is no JSON.
TEST_F(GrammarTest, OtherNamesBesideOnesWithEscapesAreJson) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::pair<const char*, const char*> cases[] = {
      {R"(\")", R"({"" ": 2})"}, {R"(a\"b)", R"({"a"": 2})"}, {R"(\\)", R"({"\q": 2})"}, {R"(a\nb)", "{\"a\nbc\": 2}"}};
  for (const auto& [name, bad] : cases) {
    for (const char* keyword : {"additionalProperties", "unevaluatedProperties"}) {
      const auto schema = spec(Kind::kJsonSchema, fmt::format(R"({{"type":"object","properties":{{"{}":{{"const":1}},)"
                                                              R"("c":{{"$ref":"#/{}"}}}},"{}":{{"const":2}}}})",
                                                              name, keyword, keyword));
      EXPECT_FALSE(allows(schema, bad)) << schema.text;
      EXPECT_TRUE(allows(schema, fmt::format(R"({{"{}": 1, "c": 2, "ü": 2}})", name))) << schema.text;
      EXPECT_TRUE(allows(schema, "{}")) << schema.text;
      EXPECT_FALSE(allows(schema, R"({"d": 3})")) << schema.text;
    }
  }
}

TEST_F(GrammarTest, MinTokensDelaysTheEndWhereTheGrammarCanGoOn) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const auto compiled = compiler_->compile(spec(Kind::kRegex, "a{1,3}"));
  ASSERT_TRUE(compiled.ok());
  const auto constraint = with_min_tokens((*compiled)->instantiate(), 10, {kByteEnd});
  std::vector<bool> may_end;
  for (int i = 0; i < 4; ++i) {
    std::vector<uint32_t> mask((kByteVocab + 31) / 32, 0);
    ASSERT_TRUE(constraint->fill(mask));
    may_end.push_back((mask[kByteEnd / 32] >> (kByteEnd % 32) & 1u) != 0);
    ASSERT_TRUE(constraint->accept(i < 3 ? 'a' : kByteEnd));
  }
  EXPECT_EQ(may_end, (std::vector<bool>{false, false, false, true}));  // after three there is nothing but the end
}

// An object's beginning, and nothing else.
class Brace final : public TokenConstraint {
 public:
  bool fill(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0u);
    mask['{' / 32] |= 1u << ('{' % 32);
    return true;
  }
  bool accept(int32_t token) override { return token == '{'; }
};

std::string allowed_by(TokenConstraint& constraint) {
  std::vector<uint32_t> mask((kByteVocab + 31) / 32, 0);
  if (!constraint.fill(mask)) return "all";
  std::string bytes;
  for (int i = 0; i < 256; ++i) {
    if ((mask[i / 32] >> (i % 32) & 1u) != 0) bytes.push_back(static_cast<char>(i));
  }
  return bytes;
}

TEST(OrCall, TheFirstTokenSaysWhichOfBoth) {
  const auto tokenizer = make_byte_tokenizer();
  ASSERT_TRUE(tokenizer.ok());
  const auto call = or_call(std::make_unique<Brace>(), "<tool>", **tokenizer);
  EXPECT_EQ(allowed_by(*call), "<{");
  for (const char byte : std::string("<tool")) ASSERT_TRUE(call->accept(byte));
  EXPECT_EQ(allowed_by(*call), ">");  // the mark is written to its end
  ASSERT_TRUE(call->accept('>'));
  EXPECT_EQ(allowed_by(*call), "all");
  EXPECT_TRUE(call->accept('x'));

  const auto answer = or_call(std::make_unique<Brace>(), "<tool>", **tokenizer);
  ASSERT_TRUE(answer->accept('{'));
  EXPECT_EQ(allowed_by(*answer), "{");
  EXPECT_FALSE(answer->accept('<'));
  EXPECT_FALSE(or_call(std::make_unique<Brace>(), "<tool>", **tokenizer)->accept('x'));

  // One token that is the mark leaves no doubt; a mark of several that a list may begin with does.
  const auto token = or_call(std::make_unique<Brace>(), "<|im_start|>", **tokenizer);
  EXPECT_EQ(allowed_by(*token), "{");
  ASSERT_TRUE(token->accept(256));
  EXPECT_EQ(allowed_by(*token), "all");
  EXPECT_EQ(allowed_by(*or_call(std::make_unique<Brace>(), "[CALLS]", **tokenizer)), "{");
  EXPECT_EQ(allowed_by(*or_call(std::make_unique<Brace>(), "", **tokenizer)), "{");
}

// For each keyword a value that it forbids: either the grammar does not allow it, or the keyword is named.
TEST_F(GrammarTest, KnowsWhichKeywordsAreNotEnforced) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::pair<const char*, const char*> cases[] = {
      {R"({"type":"array","items":{"type":"integer"},"uniqueItems":true})", "[1, 1]"},
      {R"({"type":"array","items":{"type":"integer"},"contains":{"const":5}})", "[1, 1]"},
      {R"({"allOf":[{"type":"integer"},{"minimum":5}]})", "3"},
      {R"({"allOf":[{"type":"integer"}]})", "\"a\""},
      {R"({"type":"object","required":["a"],"properties":{"a":{"type":"integer"}},"allOf":[{"type":"object"}]})", "{}"},
      {R"({"type":"string","not":{"const":"a"}})", "\"a\""},
      {R"({"not":{"type":"string"}})", "\"a\""},
      {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"if":{"required":["a"]},"then":{"required":["b"]}})",
       "{\"a\": 1}"},
      {R"({"type":"integer","multipleOf":5})", "3"},
      {R"({"type":"integer","multipleOf":5,"minimum":7})", "11"},
      {R"({"type":"integer","multipleOf":1000003})", "3"},
      {R"({"type":"number","multipleOf":0.5})", "0.3"},
      {R"({"type":"integer","minimum":5,"maximum":7})", "8"},
      {R"({"type":"number","exclusiveMaximum":5})", "5"},
      {R"({"minimum":5})", "3"},
      {R"({"type":"string","minLength":3})", "\"a\""},
      {R"({"type":"string","pattern":"^a+$"})", "\"b\""},
      {R"({"type":"string","pattern":"^a+$","maxLength":1})", "\"aa\""},
      {R"({"type":"string","pattern":"^(?!a)[ab]$"})", "\"a\""},
      {R"({"pattern":"^a$"})", "\"b\""},
      {R"({"type":"string","format":"date"})", "\"b\""},
      {R"({"type":"string","format":"date","minLength":40})", "\"2020-01-01\""},
      {R"({"type":"string","format":"iri"})", "\"b\""},
      {R"({"type":"array","maxItems":1})", "[1, 1]"},
      {R"({"type":"array","prefixItems":[{"type":"integer"}],"items":false})", "[1, 2]"},
      {R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]})", "{}"},
      {R"({"properties":{"a":{"type":"integer"}},"required":["a"]})", "{}"},
      {R"({"type":"object","required":["a"]})", "{}"},
      {R"({"required":["a"]})", "{}"},
      {R"({"type":"object","patternProperties":{"^a":{"type":"integer"}},"additionalProperties":false})",
       "{\"a\": \"x\"}"},
      {R"({"type":"object","propertyNames":{"pattern":"^a$"}})", "{\"b\": 1}"},
      {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"maxProperties":1})",
       "{\"a\": 1, \"b\": 1}"},
      {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"dependentRequired":{"a":["b"]}})",
       "{\"a\": 1}"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "3"},
      {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"anyOf":[{"required":["a"]},{"required":["b"]}]})",
       "{}"},
      {R"({"type":"integer","enum":["a",1]})", "\"a\""},
      {R"({"type":"string","enum":["a","b"]})", "\"c\""},
      {R"({"type":"string","const":"a"})", "\"b\""},
      {R"({"$ref":"https://a.example/x"})", "1"},
      {R"({"$ref":"#/$defs/a","minimum":5,"$defs":{"a":{"type":"integer"}}})", "3"},
      {R"({"$ref":"#/$defs/a","$defs":{"a":{"type":"integer"}}})", "\"3\""},
      {R"({"type":"string","pattern":"^(?:a|b)(?!b)[ab]$"})", "\"ab\""},
      {R"({"type":"string","pattern":"^[(?=]$"})", "\"b\""},
      {R"({"type":"string","pattern":"^(?<name>a)$"})", "\"b\""},
      {R"({"type":"string","pattern":"^[0-9]+(\\.[0-9]+)?$"})", "\"00.0.0\""},
      {R"({"type":"string","pattern":"^(xa+)?$"})", "\"a\""},
      {R"({"type":"string","pattern":"^(xa*)??b+?$"})", "\"ab\""},
      {R"({"type":"string","pattern":"^\\(?a[?]\\?$"})", "\"(?a??\""},
      {R"({"type":"string","pattern":"^(?:xa{0,2}){2,}b$"})", "\"xxaaab\""},
      {R"({"type":"string","pattern":"^(?:[(]a){2,}?b{2,}c{0,}$"})", "\"(abb\""},
      {R"({"type":"string","minLength":2,"maxLength":3})", "\"abcd\""},
      {R"({"type":"string","maxLength":0})", "\"a\""},
      {R"({"type":"string","format":"date"})", "\"2023-02-29\""},
      {R"({"type":"string","format":"date"})", "\"2024-04-31\""},
      {R"({"type":"string","format":"date-time"})", "\"1900-02-29T10:00:00Z\""},
      {R"({"type":"string","format":"time"})", "\"10:00:61Z\""},
      {R"({"type":"string","format":"ipv4"})", "\"10.0.0.010\""},
      {R"({"type":"string","format":"json-pointer"})", "\"a\""},
      {R"({"type":"string","format":"relative-json-pointer"})", "\"/a\""},
      {R"({"type":"array","maxItems":2})", "[1, 1, 1]"},
      {R"({"type":["array","null"],"minItems":2})", "[1]"},
      {R"({"type":"object","maxProperties":1})", "{\"a\": 1, \"b\": 1}"},
      {R"({"type":"object","patternProperties":{"^(?!a)[ab]$":{"type":"integer"}},"additionalProperties":false})",
       "{\"a\": 1}"},
      {R"({"type":"object","patternProperties":{"^a":{"type":"integer"}},"additionalProperties":true})",
       "{\"a\": \"x\"}"},
      {R"({"type":"object","patternProperties":{"^a+$":{"type":"integer"}},"propertyNames":{"maxLength":1},"additionalProperties":false})",
       "{\"aa\": 1}"},
      {R"({"type":"object","properties":{"b":{"type":"integer"}},"patternProperties":{"^a":{"type":"integer"}},"additionalProperties":true})",
       "{\"a\": \"x\"}"},
      {R"({"type":"object","properties":{"ab":{"type":"string"}},"patternProperties":{"^[a-c]+$":{"type":"integer"}},"additionalProperties":false})",
       "{\"ab\": 1}"},
      {R"({"type":"object","patternProperties":{"^a":{"type":"integer"},"b$":{"type":"string"}},"additionalProperties":false})",
       "{\"b\": \"x\", \"a\": 1}"},
      {R"({"type":"object","properties":{"A":{"type":"integer"}},"propertyNames":{"pattern":"^a$"},"additionalProperties":false})",
       "{\"A\": 1}"},
      {R"({"type":"object","propertyNames":{"pattern":"^a$"},"additionalProperties":false})", "{\"a\": 1}"},
      {R"({"$ref":"#/components/a","components":{"a":{"type":"array","items":{"type":"integer"},"uniqueItems":true}}})",
       "[1, 1]"},
      {R"({"type":"integer","minimum":0,"maximum":18446744073709551615})", "18446744073709551616"},
      {R"({"type":"object","properties":{"a.b":{"type":"integer"}},"additionalProperties":true})", "{\"a.b\": \"x\"}"},
      {R"({"type":"object","properties":{"é":{"type":"integer"}},"additionalProperties":false})", "{\"é\": \"x\"}"},
      {R"({"type":"object","properties":{"é":{"type":"integer"}},"additionalProperties":true})", "{\"é\": \"x\"}"},
      {R"({"properties":{"a\"":{"type":"integer"}},"unevaluatedProperties":{"type":"string"}})", "{\"a\\\"\": \"x\"}"},
      {R"({"properties":{"a\"":{"type":"integer"},"b":{}},"additionalProperties":{"type":"string"}})",
       "{\"b\": \"x\"}"},
      {R"({"$dynamicRef":"#b","$defs":{"a":{"$dynamicAnchor":"b","type":"integer"}}})", "\"x\""},
  };
  for (const auto& [schema, bad] : cases) {
    const bool named = !unenforced_keywords(Json::parse(schema)).empty();
    EXPECT_EQ(allows(spec(Kind::kJsonSchema, schema), bad), named) << schema;
  }
}

// An annotation's name is a property's, too: schemas that differ in such properties only are not the same.
TEST_F(GrammarTest, PropertiesNamedAsAnnotationsCount) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const char* name : {"title", "description", "default", "examples", "deprecated", "readOnly", "$schema"}) {
    const auto object = [&](const char* type) -> Json {
      return {{"type", "object"},
              {"properties", {{name, {{"type", type}}}}},
              {"required", {name}},
              {"additionalProperties", false}};
    };
    const auto both =
        spec(Kind::kJsonSchema, dump(Json{{"type", "object"},
                                          {"properties", {{"a", object("string")}, {"b", object("integer")}}},
                                          {"required", {"a", "b"}}}));
    EXPECT_TRUE(allows(both, fmt::format(R"({{"a": {{"{0}": "x"}}, "b": {{"{0}": 1}}}})", name)));
    EXPECT_FALSE(allows(both, fmt::format(R"({{"a": {{"{0}": "x"}}, "b": {{"{0}": "x"}}}})", name)));
  }
  const auto values =
      spec(Kind::kJsonSchema,
           R"({"type":"array","prefixItems":[{"const":{"title":1}},{"enum":[{"title":2}]}],"minItems":2})");
  EXPECT_TRUE(allows(values, R"([{"title":1},{"title":2}])"));
  EXPECT_FALSE(allows(values, R"([{"title":1},{"title":1}])"));
}

TEST_F(GrammarTest, WhatASchemaAllowsIsJson) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  for (const char* text :
       {R"({"type":"string","minLength":1})", R"({"type":"string","maxLength":100000})",
        R"({"type":["string","null"],"maxLength":3})", R"({"type":"string","pattern":"^..?$"})",
        R"({"type":"string","pattern":"^é?.$"})", R"({"type":"string","pattern":"^[^é]$"})",
        R"({"type":"string","format":"json-pointer"})", R"({"type":"string","format":"relative-json-pointer"})"}) {
    const auto schema = spec(Kind::kJsonSchema, text);
    const std::string begin = std::string_view(text).find("relative") != std::string_view::npos  ? "1/"
                              : std::string_view(text).find("pointer") != std::string_view::npos ? "/"
                                                                                                 : "";
    for (const char* inside : {"\"", "\t", "\x1f", "\\"}) {
      EXPECT_FALSE(allows(schema, "\"" + begin + inside + "\"")) << text;
    }
    EXPECT_TRUE(allows(schema, "\"" + begin + "ü\"")) << text;
  }
  const auto optional = spec(Kind::kJsonSchema, R"({"type":"string","pattern":"^\\(?(?:(é+)?)b??[?]c\\é$"})");
  EXPECT_TRUE(allows(optional, "\"(éé?cé\""));
  EXPECT_TRUE(allows(optional, "\"b?cé\""));
  const auto names = spec(
      Kind::kJsonSchema, R"({"type":"object","propertyNames":{"maxLength":3},"additionalProperties":{"type":"null"}})");
  EXPECT_FALSE(allows(names, "{\"\t\": null}"));
  EXPECT_TRUE(allows(names, "{\"ü\": null}"));
  // Without these characters no text would satisfy them.
  for (const char* pattern : {R"(^\"a\"$)", R"(^a\\\\b$)"}) {
    for (const std::string& schema :
         {fmt::format(R"({{"type":"string","pattern":"{}"}})", pattern),
          fmt::format(R"({{"type":"object","patternProperties":{{"{}":true}}}})", pattern)}) {
      const auto compiled = compiler_->compile(spec(Kind::kJsonSchema, schema));
      ASSERT_FALSE(compiled.ok()) << schema;
      EXPECT_NE(compiled.error().message.find("needs characters that JSON writes as escapes"), std::string::npos)
          << compiled.error().message;
    }
  }
}

// As with {"type":"array"} and {"type":"object"} alone.
TEST_F(GrammarTest, MembersThatNothingIsSaidOfMayBeAnything) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  EXPECT_TRUE(allows(spec(Kind::kJsonSchema, R"({"type":"array","minItems":1,"maxItems":2})"), R"([1, "a"])"));
  EXPECT_FALSE(allows(spec(Kind::kJsonSchema, R"({"type":"array","minItems":1,"maxItems":2})"), "[]"));
  EXPECT_TRUE(allows(spec(Kind::kJsonSchema, R"({"type":"object","minProperties":1})"), R"({"a": [1]})"));
  EXPECT_FALSE(allows(spec(Kind::kJsonSchema, R"({"type":"object","minProperties":1})"), "{}"));
  // Also beside what says nothing of them.
  for (const char* more : {R"("$defs":{})", R"("uniqueItems":true)", R"("nullable":true)", R"("$comment":"")"}) {
    EXPECT_TRUE(allows(spec(Kind::kJsonSchema, fmt::format(R"({{"type":"array",{}}})", more)), R"([1, "a"])")) << more;
    EXPECT_TRUE(allows(spec(Kind::kJsonSchema, fmt::format(R"({{"type":"object",{}}})", more)), R"({"a": [1]})"))
        << more;
  }
  // Where some are named, these are all.
  EXPECT_FALSE(
      allows(spec(Kind::kJsonSchema, R"({"type":"object","properties":{"a":{"type":"integer"}}})"), R"({"b": 1})"));
}

TEST_F(GrammarTest, FormatsAllowWhatIsOfThem) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  const std::pair<const char*, const char*> cases[] = {{"date", "2024-02-29"},
                                                       {"date", "2000-02-29"},
                                                       {"date", "1999-12-31"},
                                                       {"date", "2023-04-30"},
                                                       {"time", "23:59:59.25+01:00"},
                                                       {"ipv4", "10.0.200.255"},
                                                       {"json-pointer", "/a/~0ü~1"},
                                                       {"json-pointer", ""},
                                                       {"relative-json-pointer", "1/a"},
                                                       {"relative-json-pointer", "0#"},
                                                       {"date-time", "1996-02-29T00:00:00Z"}};
  for (const auto& [format, text] : cases) {
    EXPECT_TRUE(allows(spec(Kind::kJsonSchema, fmt::format(R"({{"type":"string","format":"{}"}})", format)),
                       fmt::format("\"{}\"", text)))
        << format << " " << text;
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
