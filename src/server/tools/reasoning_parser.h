// Separates a model's thoughts from its answer: <think>thoughts</think>answer.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "server/tools/tool_call_parser.h"

namespace nfp::server {

enum class ReasoningFormat { kNone, kThink, kMistral, kSeed, kHarmony };

// "deepseek_r1", "qwen3" (and "think") for <think>, "mistral" for [THINK], "seed_oss", "gpt_oss", "none";
// "auto" looks at the model's chat template.
Result<ReasoningFormat> parse_reasoning_format(std::string_view name, std::string_view chat_template);

struct ReasoningMarks {
  std::string_view open, close;
};
// Of a format that has them (empty for kNone and kHarmony, whose parser is the tool calls').
ReasoningMarks marks_of(ReasoningFormat format);

// `inside`: the prompt ends with the opening mark, so the answer begins with thoughts. `answer` reads what follows
// them; null = it is text.
std::unique_ptr<ToolCallParser> make_reasoning_parser(ReasoningFormat format, bool inside,
                                                      std::unique_ptr<ToolCallParser> answer);

}  // namespace nfp::server
