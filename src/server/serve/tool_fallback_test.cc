#include "server/serve/tool_fallback.h"

#include <gtest/gtest.h>

namespace nfp::server {
namespace {

Json tools() { return Json::parse(R"([{"type":"function","function":{"name":"f"}}])"); }

TEST(ToolFallback, DescribesToolsInTheSystemsMessage) {
  const Json messages = Json::parse(R"([{"role":"system","content":"Be brief."},{"role":"user","content":"hi"},
    {"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{"x":1}}}]},
    {"role":"tool","content":"one"},{"role":"tool","content":"two"},{"role":"user","content":"and?"}])");
  const Json out = describe_tools(messages, tools(), /*has_system_role=*/true);
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
  const Json out = describe_tools(messages, tools(), /*has_system_role=*/false);
  ASSERT_EQ(out.size(), 1u);
  const auto content = out[0]["content"].get<std::string>();
  EXPECT_TRUE(content.starts_with("First.\n\nSecond.\n\nYou can call functions.")) << content;
  EXPECT_TRUE(content.ends_with("\nhi")) << content;
}

TEST(ToolFallback, WithoutAMessageOfTheUserThereIsOneForTheTools) {
  const Json messages =
      Json::parse(R"([{"role":"system","content":"Be brief."},{"role":"assistant","content":"Hi."}])");
  const Json out = describe_tools(messages, tools(), /*has_system_role=*/false);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0]["role"], "user");
  const auto content = out[0]["content"].get<std::string>();
  EXPECT_TRUE(content.starts_with("Be brief.\n\nYou can call functions.")) << content;
  EXPECT_TRUE(shows_tools("<|user|>" + content));
  EXPECT_EQ(out[1], messages[1]);
}

// Copying what is there for each message would take minutes.
TEST(ToolFallback, ManyMessagesAreJoinedInLinearTime) {
  constexpr size_t kMany = 100'000, kBytes = 200;
  const std::string text(kBytes, 'x');
  for (const char* role : {"tool", "system"}) {
    Json messages = Json::array();
    for (size_t i = 0; i < kMany; ++i) messages.push_back({{"role", role}, {"content", text}});
    messages.push_back({{"role", "user"}, {"content", "hi"}});
    const Json out = describe_tools(messages, tools(), /*has_system_role=*/false);
    ASSERT_EQ(out.size(), role == std::string_view("tool") ? 2u : 1u);
    EXPECT_GT(out[0]["content"].get_ref<const std::string&>().size(), kMany * kBytes);
  }
}

}  // namespace
}  // namespace nfp::server
