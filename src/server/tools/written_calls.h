// Calls of functions as models write them, read once they are complete. Nothing: it is not such a call.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/api/json_text.h"

namespace nfp::server {

struct WrittenCall {
  std::string name;
  std::string arguments;  // a JSON object
};
using WrittenCalls = std::optional<std::vector<WrittenCall>>;

// Python: `[f(city="Paris", days=3), g()]`, or one call without brackets, or that printed: `print(f())`. (Llama 4;
// Gemma's ```tool_code```.)
WrittenCalls read_python_calls(std::string_view text);
// JSON: `[{"name": "f", "arguments": {...}}]` or one object; "parameters" serves too. (Phi-4-mini.)
WrittenCalls read_json_calls(std::string_view text);
// Where no mark says that these are calls: JSON whose "arguments" or "parameters" are there, or Python.
WrittenCalls read_unmarked_calls(std::string_view text);
// Qwen3-Coder: `<function=f><parameter=city>\nParis\n</parameter></function>`, any number of times. Values are text
// unless the tool's schema (of `tools`, as in a request; null = there are none) says otherwise (parameter_schema.h).
WrittenCalls read_xml_calls(std::string_view text, const Json* tools);
// FunctionGemma: `call:f{city:<escape>Paris<escape>,days:3}`.
WrittenCalls read_gemma_calls(std::string_view text);

}  // namespace nfp::server
