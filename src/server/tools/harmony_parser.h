// gpt-oss writes every answer as messages in channels (OpenAI's harmony format):
//   <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.f
//   <|constrain|>json<|message|>{...}<|call|>        or        <|channel|>final<|message|>the answer<|return|>
// Source: https://cookbook.openai.com/articles/openai-harmony
#pragma once

#include <memory>

#include "server/tools/tool_call_parser.h"

namespace nfp::server {

// Thoughts, calls and text, while they come. An answer that does not begin with such a mark is text.
std::unique_ptr<ToolCallParser> make_harmony_parser();

}  // namespace nfp::server
