// Any bytes as a template: parsing and rendering end, with a text or an error, within tight limits.
#include <cstddef>
#include <cstdint>
#include <string>

#include "text/jinja/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const nfp::ChatTemplateInput input = [] {
    nfp::ChatTemplateInput in;
    in.messages = nlohmann::ordered_json::parse(R"([
      {"role": "system", "content": "Be \"kind\" <b> \u00e9\ud83d\ude00"},
      {"role": "user", "content": [{"type": "text", "text": "Hi\n"}, {"type": "image"}]},
      {"role": "assistant", "content": null, "tool_calls":
        [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [true, null]}}}]},
      {"role": "tool", "name": "f", "content": "42", "tool_call_id": "abcdefghi"}])");
    in.tools = nlohmann::ordered_json::parse(
        R"([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}])");
    in.add_generation_prompt = true;
    in.bos_token = "<s>";
    in.eos_token = "</s>";
    in.extra = {{"n", -7}, {"big", 18446744073709551615u}, {"x", 0.1}, {"enable_thinking", false}};
    in.limits.max_output_bytes = 1 << 16;
    in.limits.max_memory_bytes = 1 << 22;
    in.limits.max_steps = 20'000;
    in.limits.max_depth = 200;
    return in;
  }();
  auto chat = nfp::ChatTemplate::parse(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
  if (chat.ok()) static_cast<void>(chat->render(input).ok());
  return 0;
}
