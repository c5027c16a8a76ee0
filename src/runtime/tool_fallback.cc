#include "runtime/tool_fallback.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kIntroduction =
    "You can call functions. To call one, answer with its name and arguments as a JSON object between these marks:";

// Bytes that are not UTF-8 become U+FFFD.
std::string dump(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

Result<std::string> description(const Json& tools) {
  std::string out(kIntroduction);
  out +=
      "\n<tool_call>\n{\"name\": \"the function's name\", \"arguments\": {\"an argument\": \"its "
      "value\"}}\n</tool_call>\n"
      "Call functions only where they help; otherwise answer in words. These are the functions, as JSON schemas:\n";
  if (!tools.is_array()) return error(ErrorCode::kInvalidInput, "'tools' must be a list of objects");
  for (size_t i = 0; i < tools.size(); ++i) {
    if (!tools[i].is_object()) return error(ErrorCode::kInvalidInput, "'tools[{}]' must be an object", i);
    const auto function = tools[i].find("function");
    out += dump(function == tools[i].end() ? tools[i] : *function) + "\n";
  }
  return out;
}

// Empty where the message has none.
Result<std::string> text_of(const Json& message, const char* name, size_t index) {
  if (!message.is_object()) return error(ErrorCode::kInvalidInput, "'messages[{}]' must be an object", index);
  const auto text = message.find(name);
  if (text == message.end() || text->is_null()) return std::string();
  if (text->is_string()) return text->get<std::string>();
  return error(ErrorCode::kInvalidInput,
               "'messages[{}].{}' must be a text where the chat template knows no tools: they and their calls are "
               "written into texts",
               index, name);
}

Result<std::string> calls_of(const Json& message, std::string text, size_t index) {
  for (const Json& call : message["tool_calls"]) {
    const auto function = call.is_object() ? call.find("function") : call.end();
    if (function == call.end() || !function->is_object() || !function->contains("name")) {
      return error(ErrorCode::kInvalidInput,
                   "'messages[{}].tool_calls' must be a list of objects with a 'function', which has a 'name'", index);
    }
    const Json shown = {{"name", (*function)["name"]}, {"arguments", function->value("arguments", Json::object())}};
    text += (text.empty() ? "<tool_call>\n" : "\n<tool_call>\n") + dump(shown) + "\n</tool_call>";
  }
  return text;
}

bool shows_tools(std::string_view prompt) { return prompt.find(kIntroduction) != std::string_view::npos; }

}  // namespace

Result<Json> describe_tools(const Json& messages, const Json& tools, bool has_system_role) {
  if (!messages.is_array()) return error(ErrorCode::kInvalidInput, "'messages' must be a list of objects");
  NFP_ASSIGN_OR_RETURN(const std::string described, description(tools));
  Json out = Json::array();
  std::string system;  // messages of the system that the template cannot show, each before an empty line
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    NFP_ASSIGN_OR_RETURN(const std::string role, text_of(message, "role", i));
    if (role.empty()) return error(ErrorCode::kInvalidInput, "'messages[{}].role' is missing", i);
    NFP_ASSIGN_OR_RETURN(std::string content, text_of(message, "content", i));
    if (role == "tool") {
      const std::string result = "<tool_response>\n" + content + "\n</tool_response>";
      // Results of one turn are one message: many templates insist on turns.
      if (!out.empty() && out.back()["role"] == "user") {
        // Appended in place: of many results each would copy all before it.
        auto& before = out.back()["content"].get_ref<std::string&>();
        before += '\n';
        before += result;
      } else {
        out.push_back({{"role", "user"}, {"content", result}});
      }
      continue;
    }
    if (role == "system" && !has_system_role) {
      system += content;
      system += "\n\n";
      continue;
    }
    Json entry = message;
    const auto calls = message.find("tool_calls");
    if (calls != message.end() && !calls->empty()) {
      NFP_ASSIGN_OR_RETURN(content, calls_of(message, std::move(content), i));
      entry.erase("tool_calls");
    }
    entry["content"] = std::move(content);
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
    auto& content = (*first)["content"].get_ref<std::string&>();
    content = content.empty() ? system + described : system + described + "\n" + content;
  }
  return out;
}

Result<std::string> render_with_tools(const ChatTemplate& chat, ChatTemplateInput input) {
  if (input.tools.is_null() || input.tools.empty() || chat.mentions("tools")) return chat.render(input);
  const Json messages = std::move(input.messages), tools = std::exchange(input.tools, nullptr);
  NFP_ASSIGN_OR_RETURN(input.messages, describe_tools(messages, tools, /*has_system_role=*/true));
  Result<std::string> rendered = chat.render(input);
  // A template that knows no system message says so by an error, or leaves it out.
  const bool lost = rendered.ok() ? !shows_tools(*rendered) : rendered.error().code == ErrorCode::kInvalidInput;
  if (!lost) return rendered;
  NFP_ASSIGN_OR_RETURN(input.messages, describe_tools(messages, tools, /*has_system_role=*/false));
  return chat.render(input);
}

}  // namespace nfp
