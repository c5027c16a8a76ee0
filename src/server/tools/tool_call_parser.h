// Finds tool calls in what a model writes, while it writes. Three ways of writing them are passed on while they come:
//   Hermes, Qwen:  <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>, any number of times, after text
//   Llama 3 JSON:  the whole answer is {"name": "f", "parameters": {...}}, several separated by ';', perhaps after
//                  <|python_tag|>
//   Mistral:       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or the newer [TOOL_CALLS]f{...} and
//                  [TOOL_CALLS]f[ARGS]{...}
// Qwen3-Coder, pythonic (Llama 4), Phi-4 and Gemma are read call by call (written_calls.h), gpt-oss by
// harmony_parser.h. What turns out not to be a call is passed on as text.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "server/api/json_text.h"

namespace nfp::server {

enum class ToolFormat { kNone, kHermes, kLlama3Json, kMistral, kQwen3Coder, kPythonic, kPhi4, kGemma, kHarmony };

// "hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic", "phi4_mini_json", "gemma", "gpt_oss", "none" (vLLM's
// names, where it has them); "auto" looks at the model's chat template. One that does not know tools is told of them in
// Hermes's way (runtime/tool_fallback.h).
Result<ToolFormat> parse_tool_format(std::string_view name, std::string_view chat_template);

struct ToolEvent {
  enum class Kind { kText, kReasoning, kCall, kArguments };
  Kind kind = Kind::kText;
  std::string text;  // text; thoughts before it; a new call's name; a further piece of its arguments (JSON)
  int call = 0;      // 0, 1, ... (kCall, kArguments)
};

class ToolCallParser {
 public:
  virtual ~ToolCallParser() = default;
  // The events do not depend on how the text is cut into pieces, but for how text and arguments are cut themselves.
  virtual void feed(std::string_view text, std::vector<ToolEvent>* events) = 0;
  // The end: what was held back comes out.
  // `cut`: by a limit, not by the model; the beginning of a call is then no text of the answer.
  virtual void finish(std::vector<ToolEvent>* events, bool cut = false) = 0;
  // Whether the end of the piece that was fed last is text of the answer, or may still turn out to be: not within
  // thoughts or a call, nor with a mark that ends or opens one of them or a message.
  virtual bool within_text() const = 0;
};

// `tools`: those of the request, for forms whose arguments have no types of their own; they outlive the parser, which
// keeps no copy, as there is a parser for each choice. Null = none.
std::unique_ptr<ToolCallParser> make_tool_call_parser(ToolFormat format, const Json* tools = nullptr);

// The answer is the arguments of this one function (a forced call under a grammar), or, with an empty name, a JSON list
// of {"name", "parameters"}.
std::unique_ptr<ToolCallParser> make_forced_call_parser(std::string function);

// What a model writes before its calls; "" where they have no mark that is theirs alone.
std::string_view opening_mark(ToolFormat format);

// A fresh id for a call, of the form that the model's template expects (Mistral: nine letters and digits).
std::string make_tool_call_id(ToolFormat format);

}  // namespace nfp::server
