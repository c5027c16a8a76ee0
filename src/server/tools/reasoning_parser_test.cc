#include "server/tools/reasoning_parser.h"

#include <gtest/gtest.h>

namespace nfp::server {
namespace {

struct Read {
  std::string thoughts, text;
  int calls = 0;
};

Read read(std::string_view text, bool inside, size_t step, ToolFormat tools = ToolFormat::kNone) {
  const auto parser = make_reasoning_parser(ReasoningFormat::kThink, inside, make_tool_call_parser(tools));
  std::vector<ToolEvent> events;
  for (size_t at = 0; at < text.size(); at += step) parser->feed(text.substr(at, step), &events);
  parser->finish(&events);
  Read out;
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kReasoning) out.thoughts += event.text;
    if (event.kind == ToolEvent::Kind::kText) out.text += event.text;
    if (event.kind == ToolEvent::Kind::kCall) ++out.calls;
  }
  return out;
}

void expect(std::string_view text, bool inside, const std::string& thoughts, const std::string& answer) {
  for (const size_t step : {size_t{1}, size_t{3}, size_t{8}, text.size() + 1}) {
    const Read got = read(text, inside, step);
    EXPECT_EQ(got.thoughts, thoughts) << text << " in pieces of " << step;
    EXPECT_EQ(got.text, answer) << text << " in pieces of " << step;
  }
}

TEST(ReasoningParser, SeparatesThoughtsFromTheAnswer) {
  expect("<think>\nIt is\n\nParis.\n</think>\n\nParis </think>.", false, "It is\n\nParis.", "Paris </think>.");
  expect("It is Paris.</think>Paris.", true, "It is Paris.", "Paris.");
  expect("<think>again</think>Paris.", true, "again", "Paris.");  // the mark a second time
  expect("<think>\n\n</think>\n\nParis.", false, "", "Paris.");
  expect("Paris <think>.", false, "", "Paris <think>.");
  expect("<think>a < b </thin", false, "a < b </thin", "");  // cut off while it thinks
  expect("  <thin", false, "", "  <thin");
  expect("", true, "", "");
}

TEST(ReasoningParser, WhiteSpaceWithoutEnd) {
  const std::string blanks(300'000, '\n');
  EXPECT_TRUE(read(blanks + "x", false, 1).text == blanks + "x");
  EXPECT_TRUE(read("<think>x" + blanks, false, 1).thoughts == "x" + blanks);
  EXPECT_TRUE(read("x" + blanks + "y" + blanks + "</think>z", true, 1).thoughts == "x" + blanks + "y");
}

TEST(ReasoningParser, CallsFollowThoughts) {
  const std::string text =
      "<think>I'll call <tool_call>.</think>\nOK<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
  for (const size_t step : {1, 4, 1000}) {
    const Read got = read(text, false, step, ToolFormat::kHermes);
    EXPECT_EQ(got.thoughts, "I'll call <tool_call>.");
    EXPECT_EQ(got.text, "OK");
    EXPECT_EQ(got.calls, 1);
  }
}

TEST(ReasoningParser, FormatFromTheTemplate) {
  EXPECT_EQ(*parse_reasoning_format("auto", "{{ '<think>' }}"), ReasoningFormat::kThink);
  EXPECT_EQ(*parse_reasoning_format("auto", "content.split('</think>')"), ReasoningFormat::kThink);
  EXPECT_EQ(*parse_reasoning_format("auto", "[THINK]"), ReasoningFormat::kMistral);
  EXPECT_EQ(*parse_reasoning_format("auto", "<|channel|>analysis"), ReasoningFormat::kHarmony);
  EXPECT_EQ(*parse_reasoning_format("auto", "plain"), ReasoningFormat::kNone);
  EXPECT_EQ(*parse_reasoning_format("qwen3", ""), ReasoningFormat::kThink);
  EXPECT_FALSE(parse_reasoning_format("loud", "").ok());
}

}  // namespace
}  // namespace nfp::server
