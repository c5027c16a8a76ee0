#include "text/jinja/chat_template.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

TEST(ChatTemplate, Renders) {
  auto chat = ChatTemplate::parse("{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}\n{% endfor %}", "t");
  ASSERT_TRUE(chat.ok()) << chat.error().message;
  ChatTemplateInput input;
  input.messages = {{{"role", "user"}, {"content", " Hi "}}};
  auto text = chat->render(input);
  ASSERT_TRUE(text.ok()) << text.error().message;
  EXPECT_EQ(*text, "[user] Hi\n");
}

}  // namespace
}  // namespace nfp
