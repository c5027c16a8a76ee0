#include "server/serve/tool_fallback.h"

#include <algorithm>
#include <string>

namespace nfp::server {
namespace {

constexpr std::string_view kIntroduction =
    "You can call functions. To call one, answer with its name and arguments as a JSON object between these marks:";

std::string description(const Json& tools) {
  std::string out(kIntroduction);
  out +=
      "\n<tool_call>\n{\"name\": \"the function's name\", \"arguments\": {\"an argument\": \"its "
      "value\"}}\n</tool_call>\n"
      "Call functions only where they help; otherwise answer in words. These are the functions, as JSON schemas:\n";
  for (const Json& tool : tools) out += dump(tool["function"]) + "\n";
  return out;
}

void add_text(Json& message, const std::string& before) {
  const std::string own = message["content"].is_string() ? message["content"].get<std::string>() : "";
  message["content"] = own.empty() ? before : before + "\n" + own;
}

}  // namespace

Json describe_tools(const Json& messages, const Json& tools, bool has_system_role) {
  Json out = Json::array();
  const std::string described = description(tools);
  std::string system;  // messages of the system that the template cannot show, each before an empty line
  for (const Json& message : messages) {
    const std::string role = message["role"].get<std::string>();
    Json entry = message;
    if (role == "tool") {
      const std::string result =
          "<tool_response>\n" + message["content"].get_ref<const std::string&>() + "\n</tool_response>";
      // Results of one turn are one message: many templates insist on turns.
      if (!out.empty() && out.back()["role"] == "user") {
        // Appended in place: of many results each would copy all before it.
        auto& content = out.back()["content"].get_ref<std::string&>();
        content += '\n';
        content += result;
        continue;
      }
      entry = {{"role", "user"}, {"content", result}};
    } else if (entry.contains("tool_calls")) {
      std::string text = entry["content"].is_string() ? entry["content"].get<std::string>() : "";
      for (const Json& call : entry["tool_calls"]) {
        const Json shown = {{"name", call["function"]["name"]}, {"arguments", call["function"]["arguments"]}};
        text += (text.empty() ? "<tool_call>\n" : "\n<tool_call>\n") + dump(shown) + "\n</tool_call>";
      }
      entry.erase("tool_calls");
      entry["content"] = std::move(text);
    }
    if (role == "system" && !has_system_role) {
      system += entry["content"].get_ref<const std::string&>();
      system += "\n\n";
      continue;
    }
    out.push_back(std::move(entry));
  }
  if (has_system_role && !out.empty() && out.front()["role"] == "system") {
    out.front()["content"].get_ref<std::string&>() += "\n\n" + described;
  } else if (has_system_role) {
    out.insert(out.begin(), Json({{"role", "system"}, {"content", described}}));
  } else {
    const auto is_user = [](const Json& message) { return message["role"] == "user"; };
    auto first = std::find_if(out.begin(), out.end(), is_user);
    if (first == out.end()) first = out.insert(out.begin(), Json({{"role", "user"}, {"content", ""}}));
    add_text(*first, system + described);
  }
  return out;
}

bool shows_tools(std::string_view prompt) { return prompt.find(kIntroduction) != std::string_view::npos; }

}  // namespace nfp::server
