#include "server/tools/tool_call_parser.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

namespace nfp::server {
namespace {

struct Seen {
  std::string text;
  std::vector<std::pair<std::string, std::string>> calls = {};
  std::string reasoning = {};
  friend bool operator==(const Seen&, const Seen&) = default;
};

void add(Seen& seen, const std::vector<ToolEvent>& events) {
  for (const ToolEvent& event : events) {
    switch (event.kind) {
      case ToolEvent::Kind::kText:
        seen.text += event.text;
        break;
      case ToolEvent::Kind::kReasoning:
        seen.reasoning += event.text;
        break;
      case ToolEvent::Kind::kCall:
        EXPECT_EQ(event.call, static_cast<int>(seen.calls.size()));
        seen.calls.emplace_back(event.text, "");
        break;
      case ToolEvent::Kind::kArguments:
        seen.calls.at(static_cast<size_t>(event.call)).second += event.text;
        break;
    }
  }
}

// In pieces of `step` bytes; 0 = all at once.
Seen parse(ToolCallParser& parser, std::string_view text, size_t step) {
  Seen seen;
  std::vector<ToolEvent> events;
  for (size_t at = 0; at < text.size(); at += step == 0 ? text.size() : step) {
    parser.feed(text.substr(at, step == 0 ? std::string_view::npos : step), &events);
  }
  parser.finish(&events);
  add(seen, events);
  return seen;
}

void expect(ToolFormat format, std::string_view text, const Seen& want) {
  for (const size_t step : {0, 1, 2, 3, 7}) {
    const Seen got = parse(*make_tool_call_parser(format), text, step);
    EXPECT_EQ(got.text, want.text) << text << " in pieces of " << step;
    EXPECT_EQ(got.calls, want.calls) << text << " in pieces of " << step;
  }
}

TEST(ToolCallParser, Hermes) {
  const auto f = ToolFormat::kHermes;
  expect(f, "just text", {"just text", {}});
  expect(f, "a < b and <tool", {"a < b and <tool", {}});
  expect(f, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"}\"}}\n</tool_call>",
         {"", {{"f", "{\"x\": \"}\"}"}}});
  expect(f,
         "Let me "
         "see.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</"
         "tool_call>\n<tool_call>{\"arguments\":{\"a\":[1,2]},\"name\":\"g\"}</tool_call>",
         {"Let me see.", {{"f", "{}"}, {"g", "{\"a\":[1,2]}"}}});
  expect(f, "<tool_call>{\"name\":\"f\"}</tool_call>", {"", {{"f", "{}"}}});
  // Arguments that come twice: the first, as they are sent while they come.
  expect(f, R"(<tool_call>{"name":"f","arguments":{"a":1},"parameters":{"b":2},"arguments":{}}</tool_call>)",
         {"", {{"f", "{\"a\":1}"}}});
  expect(f, "<tool_call>{\"x\":1}</tool_call> x", {"<tool_call>{\"x\":1}</tool_call> x", {}});
  // White space around calls counts between two texts.
  const std::string call = "<tool_call>\n{\"name\":\"f\",\"arguments\":{}}";
  const std::string closed = call + "\n</tool_call>";
  expect(f, "A. " + closed + "B.", {"A. B.", {{"f", "{}"}}});
  expect(f, "A.\n" + closed + " " + closed + "\nB. ", {"A.\n \nB. ", {{"f", "{}"}, {"f", "{}"}}});
  expect(f, "A. " + closed + "\n", {"A.", {{"f", "{}"}}});
  expect(f, "A. " + closed + " <tool_call>x", {"A.  <tool_call>x", {{"f", "{}"}}});
  // A call that is not closed.
  expect(f, "A. " + call + "\nB.", {"A. \nB.", {{"f", "{}"}}});
  expect(f, call + "}\n</tool_call>B.", {"B.", {{"f", "{}"}}});
  expect(f, call + "\n</tool", {"", {{"f", "{}"}}});
  expect(f, call + "\nB. " + closed + "\n", {"\nB.", {{"f", "{}"}, {"f", "{}"}}});
  // Several between one pair of marks.
  expect(f, call + "\n{\"name\":\"g\",\"arguments\":{\"x\":1}}, {\"name\":\"h\"}\n</tool_call> B.",
         {" B.", {{"f", "{}"}, {"g", "{\"x\":1}"}, {"h", "{}"}}});
  expect(f, call + "\n{\"x\":1}\n</tool_call>B.", {"B.", {{"f", "{}"}}});
  expect(f, call + "\n{\"x\":1} B.", {"\n{\"x\":1} B.", {{"f", "{}"}}});
  expect(f, call + "\n{\"x\" " + closed, {"\n{\"x\"", {{"f", "{}"}, {"f", "{}"}}});
  expect(f, "<tool_call>not json</tool_call> x", {"<tool_call>not json</tool_call> x", {}});
  expect(f, "<tool_call>{\"nam", {"<tool_call>{\"nam", {}});
  expect(f, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"cut o", {"", {{"f", "{\"a\":\"cut o"}}});
}

TEST(ToolCallParser, Llama3Json) {
  const auto f = ToolFormat::kLlama3Json;
  expect(f, "Hello {there}", {"Hello {there}", {}});
  expect(f, "{\"name\": \"f\", \"parameters\": {\"x\": 1}}", {"", {{"f", "{\"x\": 1}"}}});
  expect(f, "<|python_tag|>{\"name\":\"f\",\"parameters\":{}}; {\"name\":\"g\",\"parameters\":{\"y\":null}}",
         {"", {{"f", "{}"}, {"g", "{\"y\":null}"}}});
  expect(f, "{\"answer\": 42}", {"{\"answer\": 42}", {}});
  expect(f, "  {\"type\":\"function\",\"name\":\"f\",\"parameters\":{\"s\":\"\\\"\"}}",
         {"", {{"f", "{\"s\":\"\\\"\"}"}}});
}

TEST(ToolCallParser, Mistral) {
  const auto f = ToolFormat::kMistral;
  expect(f, "plain [TOOL", {"plain [TOOL", {}});
  expect(f, "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\":\"g\",\"arguments\":{}}]",
         {"", {{"f", "{\"x\": 1}"}, {"g", "{}"}}});
  expect(f, "[TOOL_CALLS]f{\"x\": \"}\"}[TOOL_CALLS]g[ARGS]{}", {"", {{"f", "{\"x\": \"}\"}"}, {"g", "{}"}}});
  const std::string call = "{\"name\": \"f\", \"arguments\": {}}";
  expect(f, "[TOOL_CALLS] [" + call + "] B.", {" B.", {{"f", "{}"}}});
  // A list that is not closed.
  expect(f, "A.[TOOL_CALLS] [" + call + ", ", {"A.", {{"f", "{}"}}});
  expect(f, "A.[TOOL_CALLS] [" + call + "\nB.", {"A.\nB.", {{"f", "{}"}}});
  expect(f, "[TOOL_CALLS]" + call + " B. [TOOL_CALLS] [" + call + "]", {" B. ", {{"f", "{}"}, {"f", "{}"}}});
  // No calls.
  for (const std::string text :
       {"[TOOL_CALLS]", "[TOOL_CALLS] ", "[TOOL_CALLS] [", "[TOOL_CALLS] [ ,", "[TOOL_CALLS] [none]",
        "[TOOL_CALLS] [{\"x\": 1}]", "[TOOL_CALLS]{\"x\": 1} B.", "[TOOL_CALLS] [{x}] B.", "[TOOL_CALLS] [{\"na",
        "[TOOL_CALLS] words", "[TOOL_CALLS] [[TOOL_CALLS]"}) {
    expect(f, text, {text, {}});
  }
  expect(f, "[TOOL_CALLS] [" + call + ", {\"x\": 1}] B.", {", {\"x\": 1}] B.", {{"f", "{}"}}});
}

TEST(ToolCallParser, ForcedCalls) {
  for (const size_t step : {0, 1, 3}) {
    EXPECT_EQ(parse(*make_forced_call_parser("f"), "{\"x\": 1}", step), (Seen{"", {{"f", "{\"x\": 1}"}}}));
    EXPECT_EQ(parse(*make_forced_call_parser(""),
                    "[{\"name\": \"f\", \"parameters\": {\"x\": 1}}, {\"name\":\"g\",\"parameters\":{}}]", step),
              (Seen{"", {{"f", "{\"x\": 1}"}, {"g", "{}"}}}));
  }
}

TEST(ToolCallParser, CuttingDoesNotMatter) {
  const std::vector<std::string> parts = {"<tool_call>",
                                          "</tool_call>",
                                          "{",
                                          "}",
                                          "\"name\"",
                                          ":",
                                          "\"f\"",
                                          ",",
                                          "\"arguments\"",
                                          "[TOOL_CALLS]",
                                          "[",
                                          "]",
                                          " ",
                                          "x",
                                          "\\",
                                          "\"",
                                          "\n",
                                          "<|python_tag|>",
                                          "[ARGS]",
                                          ";",
                                          "<function=f>",
                                          "<parameter=x>",
                                          "</parameter>",
                                          "</function>",
                                          "f(a=1)",
                                          "functools",
                                          "<|channel|>",
                                          "<|message|>",
                                          "<|end|>",
                                          "analysis",
                                          " to=functions.f",
                                          "```tool_code\n",
                                          "```",
                                          "1"};
  EXPECT_TRUE(rc::check("pieces of any size give the same calls and text", [&] {
    std::string text;
    for (const size_t part : *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(0, parts.size()))) {
      text += parts[part];
    }
    const auto step = *rc::gen::inRange<size_t>(1, 9);
    for (const auto format :
         {ToolFormat::kHermes, ToolFormat::kLlama3Json, ToolFormat::kMistral, ToolFormat::kQwen3Coder,
          ToolFormat::kPythonic, ToolFormat::kPhi4, ToolFormat::kGemma, ToolFormat::kHarmony}) {
      const Seen whole = parse(*make_tool_call_parser(format), text, 0);
      const Seen cut = parse(*make_tool_call_parser(format), text, step);
      RC_ASSERT(whole == cut);
    }
  }));
}

TEST(ToolCallParser, FormatFromTheTemplate) {
  EXPECT_EQ(*parse_tool_format("auto", "no"), ToolFormat::kHermes);  // described in words
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}"), ToolFormat::kNone);
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}<tool_call>\n<function=name>"), ToolFormat::kQwen3Coder);
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}<|tool|>"), ToolFormat::kPhi4);
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}<|channel|>"), ToolFormat::kHarmony);
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}<tool_call>{% endif %}"), ToolFormat::kHermes);
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}[TOOL_CALLS]"), ToolFormat::kMistral);
  EXPECT_EQ(*parse_tool_format("auto", "{% if tools %}<|python_tag|>"), ToolFormat::kLlama3Json);
  EXPECT_EQ(*parse_tool_format("mistral", ""), ToolFormat::kMistral);
  EXPECT_FALSE(parse_tool_format("other", "").ok());
  EXPECT_EQ(make_tool_call_id(ToolFormat::kMistral).size(), 9u);
  EXPECT_NE(make_tool_call_id(ToolFormat::kHermes), make_tool_call_id(ToolFormat::kHermes));
}

// There is a parser for each choice of a request; a copy of its tools in each would take minutes here.
TEST(ToolCallParser, ManyParsersShareTheTools) {
  constexpr int kParsers = 20'000, kTools = 20'000;
  Json tools = Json::array();
  for (int i = 0; i < kTools; ++i) {
    tools.push_back({{"type", "function"},
                     {"function",
                      {{"name", "f" + std::to_string(i)},
                       {"parameters", {{"type", "object"}, {"properties", {{"n", {{"type", "integer"}}}}}}}}}});
  }
  std::vector<std::unique_ptr<ToolCallParser>> parsers;
  parsers.reserve(kParsers);
  for (int i = 0; i < kParsers; ++i) parsers.push_back(make_tool_call_parser(ToolFormat::kQwen3Coder, &tools));
  const std::string_view text = "<tool_call><function=f7><parameter=n>3</parameter></function></tool_call>";
  for (const auto* parser : {&parsers.front(), &parsers.back()}) {
    EXPECT_EQ(parse(**parser, text, 1), (Seen{"", {{"f7", R"({"n":3})"}}}));
  }
  // Without tools values are text.
  EXPECT_EQ(parse(*make_tool_call_parser(ToolFormat::kQwen3Coder), text, 0), (Seen{"", {{"f7", R"({"n":"3"})"}}}));
}

}  // namespace
}  // namespace nfp::server
