// Renders chat templates for the oracle tests. Reads JSON lines from standard input,
//   {"template": "...", "messages": [...], "tools": ..., "add_generation_prompt": true, "bos_token": "<s>",
//    "eos_token": "</s>", "extra": {...}, "now": 1700000000}
// (all but the template optional), and writes one line for each: {"text": "..."} or {"error": "...", "limit": false}.
#include <cstdio>
#include <iostream>
#include <map>
#include <string>

#include "text/jinja/chat_template.h"

namespace {

using nlohmann::ordered_json;

ordered_json failure(const nfp::Error& e) {
  return {{"error", e.message}, {"limit", e.code == nfp::ErrorCode::kResource}};
}

ordered_json render(const ordered_json& request) {
  // Many cases share a template: parsed ones are kept.
  static std::map<std::string, nfp::ChatTemplate> parsed;
  const std::string source = request.at("template").get<std::string>();
  auto it = parsed.find(source);
  if (it == parsed.end()) {
    auto chat = nfp::ChatTemplate::parse(source, "test");
    if (!chat.ok()) return failure(chat.error());
    it = parsed.emplace(source, std::move(chat).value()).first;
  }
  nfp::ChatTemplateInput input;
  if (request.contains("messages")) input.messages = request["messages"];
  if (request.contains("tools")) input.tools = request["tools"];
  if (request.contains("extra")) input.extra = request["extra"];
  input.add_generation_prompt = request.value("add_generation_prompt", false);
  if (request.contains("bos_token")) input.bos_token = request["bos_token"].get<std::string>();
  if (request.contains("eos_token")) input.eos_token = request["eos_token"].get<std::string>();
  if (request.contains("now")) {
    input.now = std::chrono::system_clock::from_time_t(request["now"].get<std::time_t>());
  }
  const auto text = it->second.render(input);
  return text.ok() ? ordered_json{{"text", *text}} : failure(text.error());
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line.empty()) continue;
    try {
      std::cout << render(ordered_json::parse(line)).dump() << '\n';
    } catch (const std::exception& e) {
      std::cerr << "nfp_render: " << e.what() << '\n';
      return 1;
    }
  }
  return 0;
}
