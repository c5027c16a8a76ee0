// Forms of calls as the models' own documentation and cards show them, whole and cut into pieces.
#include "server/tools/written_calls.h"

#include <gtest/gtest.h>

#include "server/tools/tool_call_parser.h"

namespace nfp::server {
namespace {

struct Read {
  std::string text, reasoning;
  std::vector<std::pair<std::string, Json>> calls;
};

Read read(ToolFormat format, std::string_view text, size_t step, const Json& tools = nullptr, bool cut = false) {
  const auto parser = make_tool_call_parser(format, tools);
  std::vector<ToolEvent> events;
  for (size_t at = 0; at < text.size(); at += step) parser->feed(text.substr(at, step), &events);
  parser->finish(&events, cut);
  Read out;
  std::vector<std::string> arguments;
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kText) out.text += event.text;
    if (event.kind == ToolEvent::Kind::kReasoning) out.reasoning += event.text;
    if (event.kind == ToolEvent::Kind::kCall) {
      out.calls.emplace_back(event.text, nullptr);
      arguments.emplace_back();
    }
    if (event.kind == ToolEvent::Kind::kArguments) arguments.at(static_cast<size_t>(event.call)) += event.text;
  }
  for (size_t i = 0; i < arguments.size(); ++i) out.calls[i].second = Json::parse(arguments[i], nullptr, false);
  return out;
}

void expect(ToolFormat format, std::string_view text, const std::string& shown,
            const std::vector<std::pair<std::string, Json>>& calls, const Json& tools = nullptr,
            const std::string& reasoning = "") {
  for (const size_t step : {size_t{1}, size_t{2}, size_t{5}, text.size() + 1}) {
    const Read got = read(format, text, step, tools);
    EXPECT_EQ(got.text, shown) << text << " in pieces of " << step;
    EXPECT_EQ(got.calls, calls) << text << " in pieces of " << step;
    EXPECT_EQ(got.reasoning, reasoning) << text << " in pieces of " << step;
  }
}

TEST(WrittenCalls, Qwen3Coder) {
  const Json tools = Json::parse(R"([{"type":"function","function":{"name":"weather","parameters":{"type":"object",
    "properties":{"city":{"type":"string"},"days":{"type":"integer"},"where":{"type":"object"},"now":{"type":"boolean"}}}}}])");
  const std::string text =
      "I'll look it "
      "up.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n75001\n</parameter>\n<parameter=days>\n3\n"
      "</parameter>\n<parameter=where>\n{\"lat\": "
      "48.8}\n</parameter>\n<parameter=now>\nTrue\n</parameter>\n</function>\n"
      "</tool_call>";
  expect(ToolFormat::kQwen3Coder, text, "I'll look it up.",
         {{"weather", {{"city", "Paris\n75001"}, {"days", 3}, {"where", {{"lat", 48.8}}}, {"now", true}}}}, tools);
  // Without a schema values stay text; a missing end of a value is forgiven; two calls.
  expect(ToolFormat::kQwen3Coder,
         "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\nx < y\n</parameter>\n</function>\n</tool_call>\n"
         "<tool_call><function=g></function></tool_call>",
         "", {{"f", {{"a", "1"}, {"b", "x < y"}}}, {"g", Json::object()}});
  expect(ToolFormat::kQwen3Coder, "<tool_call>no call</tool_call> text", "<tool_call>no call</tool_call> text", {});
  EXPECT_EQ(read(ToolFormat::kQwen3Coder, "a<tool_call><function=f><parameter=x>1", 3, nullptr, /*cut=*/true).text,
            "a");
}

TEST(WrittenCalls, Pythonic) {
  expect(ToolFormat::kPythonic, R"([get_weather(city="San Francisco", metric='celsius', days=-3), now()])", "",
         {{"get_weather", {{"city", "San Francisco"}, {"metric", "celsius"}, {"days", -3}}}, {"now", Json::object()}});
  expect(ToolFormat::kPythonic,
         R"(<|python_start|>[f(x=[1, 2.5, None, True], y={"a": (1, "\u00e9\n")})]<|python_end|>)", "",
         {{"f", {{"x", {1, 2.5, nullptr, true}}, {"y", {{"a", {1, "\u00e9\n"}}}}}}});
  expect(ToolFormat::kPythonic, "[1] is a footnote", "[1] is a footnote", {});
  expect(ToolFormat::kPythonic, "see [f(x=1)]", "see [f(x=1)]", {});
}

TEST(WrittenCalls, Phi4Mini) {
  expect(ToolFormat::kPhi4, R"(functools[{"name": "get_weather", "arguments": {"city": "Paris"}}])", "",
         {{"get_weather", {{"city", "Paris"}}}});
  expect(ToolFormat::kPhi4, R"(<|tool_call|>[{"name": "f", "parameters": {}}, {"name": "g"}]<|/tool_call|>)", "",
         {{"f", Json::object()}, {"g", Json::object()}});
  expect(ToolFormat::kPhi4, "functools is a module", "functools is a module", {});
}

TEST(WrittenCalls, Gemma) {
  expect(ToolFormat::kGemma,
         "<start_function_call>call:get_weather{location:<escape>London, UK<escape>,days:2,units:[<escape>C<escape>]}"
         "<end_function_call>",
         "", {{"get_weather", {{"location", "London, UK"}, {"days", 2}, {"units", {"C"}}}}});
  expect(ToolFormat::kGemma, "Sure.\n```tool_code\nget_weather(city='Paris')\n```", "Sure.",
         {{"get_weather", {{"city", "Paris"}}}});
  expect(ToolFormat::kGemma, "```python\nprint(1)\n```", "```python\nprint(1)\n```", {});
}

TEST(WrittenCalls, Harmony) {
  expect(ToolFormat::kHarmony,
         "<|channel|>analysis<|message|>The user wants the weather.<|end|><|start|>assistant<|channel|>commentary "
         "to=functions.get_weather <|constrain|>json<|message|>{\"city\":\"Paris\"}<|call|>",
         "", {{"get_weather", {{"city", "Paris"}}}}, nullptr, "The user wants the weather.");
  expect(ToolFormat::kHarmony,
         "<|channel|>analysis<|message|>Easy: a < b.<|end|><|start|>assistant<|channel|>final<|message|>Paris "
         "<|1|>.<|return|>",
         "Paris <|1|>.", {}, nullptr, "Easy: a < b.");
  expect(ToolFormat::kHarmony, "plain text", "plain text", {});
}

TEST(WrittenCalls, DeepAndBrokenOnesAreText) {
  const std::string deep = "f(x=" + std::string(10'000, '[') + ")";
  EXPECT_FALSE(read_python_calls(deep));
  for (const char* text :
       {"", "f", "f(", "f(x)", "f(x=)", "f(x='a)", "[f()", "f() g()", "[,]", "f(x=1e)", "f(x=\"\\u12\")"}) {
    EXPECT_FALSE(read_python_calls(text)) << text;
  }
  for (const char* text : {"[1]", "{}", "[]", R"([{"name": 1}])", R"({"name": "f", "arguments": [1]})"}) {
    EXPECT_FALSE(read_json_calls(text)) << text;
  }
}

}  // namespace
}  // namespace nfp::server
