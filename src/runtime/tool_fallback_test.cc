#include "runtime/tool_fallback.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

Json tools() { return Json::parse(R"([{"type":"function","function":{"name":"f"}}])"); }

Json described(const Json& messages, bool has_system_role) {
  auto out = describe_tools(messages, tools(), has_system_role);
  EXPECT_TRUE(out.ok()) << (out.ok() ? "" : out.error().message);
  return out.ok() ? *out : Json();
}

TEST(ToolFallback, DescribesToolsInTheSystemsMessage) {
  const Json messages = Json::parse(R"([{"role":"system","content":"Be brief."},{"role":"user","content":"hi"},
    {"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{"x":1}}}]},
    {"role":"tool","content":"one"},{"role":"tool","content":"two"},{"role":"user","content":"and?"}])");
  const Json out = described(messages, /*has_system_role=*/true);
  ASSERT_EQ(out.size(), 5u);
  EXPECT_TRUE(out[0]["content"].get<std::string>().starts_with("Be brief.\n\nYou can call functions."));
  EXPECT_EQ(out[1], messages[1]);
  EXPECT_EQ(out[2]["content"], "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>");
  EXPECT_EQ(out[3]["role"], "user");
  EXPECT_EQ(out[3]["content"], "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>");
  EXPECT_EQ(out[4], messages[5]);
}

TEST(ToolFallback, MessagesOfTheSystemStayInTheirOrder) {
  const Json messages = Json::parse(R"([{"role":"system","content":"First."},{"role":"system","content":"Second."},
    {"role":"user","content":"hi"}])");
  const Json out = described(messages, /*has_system_role=*/false);
  ASSERT_EQ(out.size(), 1u);
  const auto content = out[0]["content"].get<std::string>();
  EXPECT_TRUE(content.starts_with("First.\n\nSecond.\n\nYou can call functions.")) << content;
  EXPECT_TRUE(content.ends_with("\nhi")) << content;
}

TEST(ToolFallback, WithoutAMessageOfTheUserThereIsOneForTheTools) {
  const Json messages =
      Json::parse(R"([{"role":"system","content":"Be brief."},{"role":"assistant","content":"Hi."}])");
  const Json out = described(messages, /*has_system_role=*/false);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0]["role"], "user");
  const auto content = out[0]["content"].get<std::string>();
  EXPECT_TRUE(content.starts_with("Be brief.\n\nYou can call functions.")) << content;
  EXPECT_EQ(out[1], messages[1]);
}

TEST(ToolFallback, TemplatesThatKnowNoToolsGetThemDescribed) {
  const auto prompt = [](const char* source, const Json& given) {
    auto chat = ChatTemplate::parse(source, "t");
    EXPECT_TRUE(chat.ok());
    ChatTemplateInput input;
    input.messages = Json::parse(R"([{"role":"user","content":"hi"}])");
    input.tools = given;
    auto text = render_with_tools(*chat, std::move(input));
    return text.ok() ? *text : text.error().message;
  };
  const char* all = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
  const char* no_system =
      "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
      "[{{ m.role }}]{{ m.content }}{% endfor %}";
  const char* knows = "{{ tools | length }} {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
  EXPECT_TRUE(prompt(all, tools()).starts_with("[system]You can call functions.")) << prompt(all, tools());
  EXPECT_TRUE(prompt(no_system, tools()).starts_with("[user]You can call functions.")) << prompt(no_system, tools());
  EXPECT_EQ(prompt(knows, tools()), "1 [user]hi");
  EXPECT_EQ(prompt(all, Json::array()), "[user]hi");
  EXPECT_EQ(prompt(all, nullptr), "[user]hi");
  EXPECT_EQ(prompt(all, Json({{"name", "f"}})), "'tools' must be a list of objects");
}

TEST(ToolFallback, WhatIsNoTextIsNamed) {
  const auto refused = [](const char* messages, const char* given = "[]") {
    auto out = describe_tools(Json::parse(messages), Json::parse(given), /*has_system_role=*/true);
    return out.ok() ? "" : out.error().message;
  };
  EXPECT_EQ(refused("5"), "'messages' must be a list of objects");
  EXPECT_EQ(refused("[5]"), "'messages[0]' must be an object");
  EXPECT_EQ(refused(R"([{"content": "x"}])"), "'messages[0].role' is missing");
  EXPECT_TRUE(refused(R"([{"role": "tool", "content": ["x"]}])").starts_with("'messages[0].content' must be a text"));
  for (const char* calls : {R"("x")", "[5]", R"([{"name": "f"}])", R"([{"function": {}}])"}) {
    EXPECT_TRUE(refused(fmt::format(R"([{{"role": "assistant", "tool_calls": {}}}])", calls).c_str())
                    .starts_with("'messages[0].tool_calls' must be a list of objects with a 'function'"));
  }
  EXPECT_EQ(refused("[]", R"([{"name": "f"}, "g"])"), "'tools[1]' must be an object");
}

// Copying what is there for each message would take minutes.
TEST(ToolFallback, ManyMessagesAreJoinedInLinearTime) {
  constexpr size_t kMany = 100'000, kBytes = 200;
  const std::string text(kBytes, 'x');
  for (const char* role : {"tool", "system"}) {
    Json messages = Json::array();
    for (size_t i = 0; i < kMany; ++i) messages.push_back({{"role", role}, {"content", text}});
    messages.push_back({{"role", "user"}, {"content", "hi"}});
    const Json out = described(messages, /*has_system_role=*/false);
    ASSERT_EQ(out.size(), role == std::string_view("tool") ? 2u : 1u);
    EXPECT_GT(out[0]["content"].get_ref<const std::string&>().size(), kMany * kBytes);
  }
}

}  // namespace
}  // namespace nfp
