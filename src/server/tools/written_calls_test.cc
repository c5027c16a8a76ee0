// Forms of calls as the models' own documentation and cards show them, whole and cut into pieces.
#include "server/tools/written_calls.h"

#include <gtest/gtest.h>

#include "server/tools/tool_call_parser.h"

namespace nfp::server {
namespace {

struct ReadCalls {
  std::string text, reasoning;
  std::vector<std::pair<std::string, Json>> calls;
};

ReadCalls read(ToolFormat format, std::string_view text, size_t step, const Json& tools = nullptr, bool cut = false) {
  const auto parser = make_tool_call_parser(format, &tools);
  std::vector<ToolEvent> events;
  for (size_t at = 0; at < text.size(); at += step) parser->feed(text.substr(at, step), &events);
  parser->finish(&events, cut);
  ReadCalls out;
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
    const ReadCalls got = read(format, text, step, tools);
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

// Schemas as Pydantic writes them: Optional has no "type", a nested model is a reference.
TEST(WrittenCalls, ParametersOfSeveralTypes) {
  const Json tools =
      Json::parse(R"([{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{
    "i":{"anyOf":[{"type":"integer"},{"type":"null"}]}, "l":{"type":["integer","null"]}, "p":{"$ref":"#/$defs/P"},
    "s":{"anyOf":[{"type":"string"},{"type":"null"}]}, "e":{"enum":[1,2]}, "r":{"$ref":"#/properties/r"},
    "a":{"oneOf":[{"type":"array"},{"$ref":"#/$defs/P"}]}, "n":{"anyOf":[{"type":"string"},{"type":"integer"}]}},
    "$defs":{"P":{"type":"object"}}}}}])");
  const auto call = [](const std::string& key, const std::string& value) {
    return "<tool_call><function=f><parameter=" + key + ">" + value + "</parameter></function></tool_call>";
  };
  const std::vector<std::tuple<std::string, std::string, Json>> cases = {
      {"i", "5", 5},   {"i", "null", nullptr}, {"i", "five", "five"},   {"l", "5", 5},
      {"s", "5", "5"}, {"s", "null", nullptr}, {"s", "[1]", "[1]"},     {"s", "\"x\"", "\"x\""},
      {"e", "2", 2},   {"r", "5", "5"},        {"a", "[1]", Json({1})}, {"p", "{\"n\":\"Bob\"}", {{"n", "Bob"}}},
      {"n", "5", 5},   {"n", "five", "five"},  {"n", "2.5", 2.5},       {"other", "5", "5"},
  };
  for (const auto& [key, value, meant] : cases) {
    expect(ToolFormat::kQwen3Coder, call(key, value), "", {{"f", {{key, meant}}}}, tools);
  }
}

// The model's words are no paths into the schema, and the schema is the client's.
TEST(WrittenCalls, SchemasThatAreNone) {
  for (
      const char* parameters :
      {R"({"properties":[]})", R"({"properties":[{"type":"integer"}]})", R"({"properties":7})", R"([])", R"("x")",
       "null", R"({"properties":{"99999999999999999999999":7}})",
       R"({"properties":{"99999999999999999999999":{"type":{}}}})",
       R"({"properties":{"99999999999999999999999":{"$ref":"#/properties/99999999999999999999999"}}})",
       R"({"properties":{"99999999999999999999999":{"anyOf":[{"$ref":"#"},{"$ref":"#/~"},{"$ref":"#/properties/0/1"}]}}})"}) {
    const Json tools = {{{"type", "function"}, {"function", {{"name", "f"}, {"parameters", Json::parse(parameters)}}}}};
    expect(ToolFormat::kQwen3Coder,
           "<tool_call><function=f><parameter=99999999999999999999999>1</parameter></function></tool_call>", "",
           {{"f", {{"99999999999999999999999", "1"}}}}, tools);
  }
}

TEST(WrittenCalls, Pythonic) {
  expect(ToolFormat::kPythonic, R"([get_weather(city="San Francisco", metric='celsius', days=-3), now()])", "",
         {{"get_weather", {{"city", "San Francisco"}, {"metric", "celsius"}, {"days", -3}}}, {"now", Json::object()}});
  expect(ToolFormat::kPythonic,
         R"(<|python_start|>[f(x=[1, 2.5, None, True], y={"a": (1, "\u00e9\n")})]<|python_end|>)", "",
         {{"f", {{"x", {1, 2.5, nullptr, true}}, {"y", {{"a", {1, "\u00e9\n"}}}}}}});
  expect(ToolFormat::kPythonic, "[f(x=18446744073709551615)]", "", {{"f", {{"x", 18446744073709551615u}}}});
  expect(ToolFormat::kPythonic, "[1] is a footnote", "[1] is a footnote", {});
  expect(ToolFormat::kPythonic, "see [f(x=1)]", "see [f(x=1)]", {});
}

TEST(WrittenCalls, PythonicSurrogates) {
  expect(ToolFormat::kPythonic, R"([f(a="\ud83d\ude00", b="\ud83d", c="\ude00x", d="\ud83d\u0041")])", "",
         {{"f", {{"a", "\U0001F600"}, {"b", "\uFFFD"}, {"c", "\uFFFDx"}, {"d", "\uFFFDA"}}}});
}

// What looks like a mark and is none stays as it was written.
TEST(WrittenCalls, TextAroundMarksThatAreNone) {
  for (const auto& [format, text] : std::vector<std::pair<ToolFormat, std::string>>{
           {ToolFormat::kPhi4, "Use import functools here please"},
           {ToolFormat::kPhi4, "Use \n functools[1] here"},
           {ToolFormat::kHermes, "Use <tool_call> tags to call"},
           {ToolFormat::kHermes, "a \n<tool_call>{\"x\": 1}"},
           {ToolFormat::kQwen3Coder, "Write <function=x and then </tool_call> ok"},
           {ToolFormat::kMistral, "Write [TOOL_CALLS] and then text"},
           {ToolFormat::kLlama3Json, R"({"name": "Bob", "age": 30})"},
           {ToolFormat::kGemma, " [1, 2] is a list"}}) {
    expect(format, text, text, {});
  }
}

// Small models miscount the braces: with its arguments whole, a call is one without its last brace.
TEST(WrittenCalls, ABraceTooFew) {
  const std::vector<std::pair<std::string, Json>> f = {{"f", {{"a", 1}}}};
  const std::vector<std::pair<std::string, Json>> both = {f[0], {"g", Json::object()}};
  const std::string call = R"({"name": "f", "arguments": {"a": 1})", other = R"({"name": "g", "arguments": {}})";
  expect(ToolFormat::kHermes, "<tool_call>\n" + call + "\n</tool_call>", "", f);
  expect(ToolFormat::kHermes, "<tool_call>" + call + "</tool_call>\n<tool_call>" + other + "</tool_call> Done.",
         "\n Done.", both);
  expect(ToolFormat::kHermes, "<tool_call>" + call + "\n<tool_call>" + other + "\n</tool_call>", "", both);
  expect(ToolFormat::kLlama3Json, call + "; " + other, "", both);
  expect(ToolFormat::kLlama3Json, call + "\nDone.", "Done.", f);
  expect(ToolFormat::kMistral, "[TOOL_CALLS][" + call + "] Done.", " Done.", f);
}

// A model that is stuck writes white space to the end; what waits is not looked at again for each token.
TEST(WrittenCalls, WhiteSpaceWithoutEnd) {
  const std::string blanks(300'000, '\n');
  for (const ToolFormat format :
       {ToolFormat::kHermes, ToolFormat::kLlama3Json, ToolFormat::kMistral, ToolFormat::kQwen3Coder,
        ToolFormat::kPythonic, ToolFormat::kPhi4, ToolFormat::kGemma, ToolFormat::kHarmony}) {
    for (const std::string& text : {blanks, "x" + blanks, "x" + blanks + "y"}) {
      EXPECT_TRUE(read(format, text, 1).text == text) << static_cast<int>(format);
    }
  }
}

TEST(WrittenCalls, AMarkTwice) {
  expect(ToolFormat::kHermes, "<tool_call>\n<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "<tool_call>",
         {{"f", Json::object()}});
}

TEST(WrittenCalls, AnAnswerInJsonThatIsCutIsShown) {
  EXPECT_EQ(read(ToolFormat::kGemma, "```json\n[1, 2, 3", 4, nullptr, /*cut=*/true).text, "```json\n[1, 2, 3");
  EXPECT_EQ(read(ToolFormat::kGemma, "<start_function_call>call:f{a", 4, nullptr, /*cut=*/true).text, "");
}

TEST(WrittenCalls, Phi4Mini) {
  expect(ToolFormat::kPhi4, R"(functools[{"name": "get_weather", "arguments": {"city": "Paris"}}])", "",
         {{"get_weather", {{"city", "Paris"}}}});
  expect(ToolFormat::kPhi4, R"(<|tool_call|>[{"name": "f", "parameters": {}}, {"name": "g"}]<|/tool_call|>)", "",
         {{"f", Json::object()}, {"g", Json::object()}});
  expect(ToolFormat::kPhi4, "functools is a module", "functools is a module", {});
}

TEST(WrittenCalls, Phi4MiniGoesOnAfterItsCalls) {
  const std::string call = R"(functools[{"name": "f", "arguments": {"a": ["]\\\"]}", 1]}}])";
  const std::pair<std::string, Json> read = {"f", {{"a", {"]\\\"]}", 1}}}};
  expect(ToolFormat::kPhi4, call + " That is all.", " That is all.", {read});
  expect(ToolFormat::kPhi4, "First:\n" + call + "\n" + call + "<|tool_call|>{\"name\": \"g\"}<|/tool_call|>",
         "First:", {read, read, {"g", Json::object()}});
  // A list that is no call is text, and a call may follow.
  expect(ToolFormat::kPhi4, "functools[1, [2]], then " + call, "functools[1, [2]], then", {read});
  expect(ToolFormat::kPhi4, "functools[{]} no list", "functools[{]} no list", {});
  expect(ToolFormat::kPhi4, "functools[{\"name\": \"f\"}", "functools[{\"name\": \"f\"}", {});
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
  // A call without arguments, with its mark and where that mark is the token that ends the answer, which is no text.
  for (const std::string end : {"<|call|>", ""}) {
    expect(ToolFormat::kHarmony, "<|channel|>commentary to=functions.now <|constrain|>json<|message|>" + end, "",
           {{"now", Json::object()}});
  }
}

// What users recorded of the models themselves, in form: reports on other servers that did not read it. Names and texts
// are other ones.
TEST(WrittenCalls, AsModelsWroteThem) {
  // Qwen3-Coder 30B (ollama #18530, #12751): words before the call, and no <tool_call>.
  expect(ToolFormat::kQwen3Coder,
         "I'll list the sources first.\n\n<function=glob>\n<parameter=pattern>\n**/*.cc\n</parameter>\n</function>\n"
         "</tool_call>",
         "I'll list the sources first.", {{"glob", {{"pattern", "**/*.cc"}}}});
  expect(ToolFormat::kQwen3Coder,
         "Two files.\n\n<function=list_files>\n</function>\n<function=list_files>\n</function>", "Two files.",
         {{"list_files", Json::object()}, {"list_files", Json::object()}});
  // A program as a value (Qwen's own examples): its indentation, blank lines and comparisons are part of it.
  const Json tools = Json::parse(R"([{"type":"function","function":{"name":"write","parameters":{"type":"object",
    "properties":{"path":{"type":"string"},"content":{"type":"string"},"lines":{"type":"array"}}}}}])");
  expect(
      ToolFormat::kQwen3Coder,
      "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=content>\nfor i in x:\n    if "
      "i < 3 and i > 1:\n\n        print(\"<b>\")\n</parameter>\n<parameter=lines>\n[1, {\"a\": \"é\"}]\n</parameter>\n"
      "</function>\n</tool_call>",
      "",
      {{"write",
        {{"path", "a.py"},
         {"content", "for i in x:\n    if i < 3 and i > 1:\n\n        print(\"<b>\")"},
         {"lines", {1, {{"a", "é"}}}}}}},
      tools);
  // Llama 4 Scout and Maverick (Meta's prompt format; vLLM #16214, #46863).
  expect(ToolFormat::kPythonic, R"([get_weather(city="San Francisco"), get_weather(city="Seattle")])", "",
         {{"get_weather", {{"city", "San Francisco"}}}, {"get_weather", {{"city", "Seattle"}}}});
  expect(ToolFormat::kPythonic,
         R"(<|python_start|>{"name": "web_search", "parameters": {"query": "latest news"}}<|python_end|>)", "",
         {{"web_search", {{"query", "latest news"}}}});
  expect(ToolFormat::kPythonic,
         R"({"type": "function", "name": "shell", "parameters": {"command": "echo hello", "timeout": 12000}})", "",
         {{"shell", {{"command", "echo hello"}, {"timeout", 12000}}}});
  for (const ToolFormat format : {ToolFormat::kPythonic, ToolFormat::kGemma}) {
    for (const char* answer : {R"({"answer": 42})", R"([{"name": "Ada", "born": 1815}])", R"({"name": "Ada"})"}) {
      expect(format, answer, answer, {});
    }
  }
  // Phi-4-mini (vLLM #14682, #48795): lists inside of lists; and with its special tokens around (llama.cpp #12288).
  expect(
      ToolFormat::kPhi4,
      R"(functools[{"name": "search", "arguments": {"tags": ["a", "b]"], "most": 7.0}}, {"name": "now", "arguments": {}}])",
      "", {{"search", {{"tags", {"a", "b]"}}, {"most", 7.0}}}, {"now", Json::object()}});
  expect(ToolFormat::kPhi4, R"(<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>)", "",
         {{"foo", {{"a", 1}}}});
  // Gemma 3, by the two prompts of its documentation and its cookbook's tool_code.
  expect(ToolFormat::kGemma, R"([get_product(product_id="807", fields=["name", 'price'])])", "",
         {{"get_product", {{"product_id", "807"}, {"fields", {"name", "price"}}}}});
  expect(ToolFormat::kGemma, "```json\n{\"name\": \"get_product\", \"parameters\": {\"product_id\": \"807\"}}\n```", "",
         {{"get_product", {{"product_id", "807"}}}});
  expect(ToolFormat::kGemma, R"({"name": "get_product", "parameters": {"product_id": "807"}})", "",
         {{"get_product", {{"product_id", "807"}}}});
  expect(ToolFormat::kGemma, "```tool_code\nprint(convert(amount=200000.0, currency=\"EUR\"))\n```", "",
         {{"convert", {{"amount", 200000.0}, {"currency", "EUR"}}}});
  expect(ToolFormat::kGemma, "```json\n{\"a\": 1}\n```\nThat is all.", "```json\n{\"a\": 1}\n```\nThat is all.", {});
  // gpt-oss (llama.cpp #15181, #15158; vllm-mlx #562): for whom the call is before the channel, also as the first words
  // of the answer; a call in the channel of thoughts; words to the user before a call; no <|constrain|>.
  expect(ToolFormat::kHarmony,
         " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{\"city\":\"Lima\"}<|call|>", "",
         {{"get_weather", {{"city", "Lima"}}}});
  expect(ToolFormat::kHarmony,
         "<|channel|>analysis<|message|>Sorted by temperature.<|end|><|start|>assistant to=functions.get_weather"
         "<|channel|>commentary json<|message|>{\"city\":\"Lima\"}<|call|>",
         "", {{"get_weather", {{"city", "Lima"}}}}, nullptr, "Sorted by temperature.");
  expect(ToolFormat::kHarmony,
         "<|channel|>analysis<|message|>We need to search.\n<|end|><|start|>assistant<|channel|>analysis "
         "to=functions.grep code<|message|>{\"path\":\"\",\"pattern\":\"View\"}<|call|>",
         "", {{"grep", {{"path", ""}, {"pattern", "View"}}}}, nullptr, "We need to search.\n");
  expect(
      ToolFormat::kHarmony,
      "<|channel|>analysis<|message|>Plan.<|end|><|start|>assistant<|channel|>commentary<|message|>I'll look at both "
      "files.<|end|><|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
      "{\"path\":\"a\"}<|call|>",
      "I'll look at both files.", {{"read", {{"path", "a"}}}}, nullptr, "Plan.");
  expect(ToolFormat::kHarmony, " to=functions.f is how a call begins.", " to=functions.f is how a call begins.", {});
  expect(ToolFormat::kHarmony, " to begin with", " to begin with", {});
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
