// Anthropic's Messages API: content blocks, with tools' results inside the user's messages.
#include <algorithm>

#include "server/api/dialects.h"

namespace nfp::server {
namespace {

using dialect::text_field;

// A tool's result as text; an error says that it is one.
MaybeError tool_result(const Json& block, const std::string& where, const Unknown& unknown, Json* messages) {
  Fields fields(block, where);
  std::string text, id;
  bool is_error = false;
  NFP_API_TRY(fields.get("tool_use_id", &id));
  NFP_API_TRY(fields.get("is_error", &is_error));
  if (block.contains("content") && !block["content"].is_null()) {
    NFP_API_TRY(read_text_parts(block["content"], where + ".content", {"text"}, unknown, &text));
  }
  if (is_error) text = "Error: " + text;
  messages->push_back({{"role", "tool"}, {"tool_call_id", id}, {"content", text}});
  return std::nullopt;
}

MaybeError add_message(const Json& message, const std::string& where, const Unknown& unknown, Json* messages) {
  if (!message.is_object()) return bad_request(where, fmt::format("'{}' must be an object", where));
  const std::string role = text_field(message, "role");
  if (role != "user" && role != "assistant" && role != "system") {
    return bad_request(where + ".role", fmt::format("'{}.role' must be user or assistant", where));
  }
  if (!message.contains("content")) {
    return bad_request(where + ".content", fmt::format("'{}.content' is missing", where));
  }
  NFP_API_TRY(unknown.check(message, where, {"role", "content"}));
  const Json& content = message["content"];
  if (content.is_string() || role == "system") {
    std::string text;
    NFP_API_TRY(read_text_parts(content, where + ".content", {"text"}, unknown, &text));
    messages->push_back({{"role", role}, {"content", text}});
    return std::nullopt;
  }
  if (!content.is_array()) {
    return bad_request(where + ".content", fmt::format("'{}.content' must be a string or a list of blocks", where));
  }
  std::string text, thinking;
  bool any_text = false;
  Json calls = Json::array();
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& block = content[i];
    const std::string at = fmt::format("{}.content[{}]", where, i);
    const std::string type = text_field(block, "type");
    if (type == "text") {
      if (!block.contains("text") || !block["text"].is_string()) {
        return bad_request(at + ".text", fmt::format("'{}.text' must be a string", at));
      }
      NFP_API_TRY(unknown.check(block, at, {"type", "text", "cache_control", "citations"}));
      if (any_text) text += '\n';
      text += block["text"].get_ref<const std::string&>();
      any_text = true;
    } else if (type == "tool_result" && role == "user") {
      NFP_API_TRY(
          unknown.check(block, at, {"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"}));
      NFP_API_TRY(tool_result(block, at, unknown, messages));
    } else if (type == "tool_use" && role == "assistant") {
      std::string id;
      NFP_API_TRY(Fields(block, at).get("id", &id));
      const std::string name = text_field(block, "name");
      if (name.empty()) return bad_request(at + ".name", fmt::format("'{}.name' must be a non-empty string", at));
      const Json input = block.contains("input") && !block["input"].is_null() ? block["input"] : Json::object();
      if (!input.is_object()) return bad_request(at + ".input", fmt::format("'{}.input' must be an object", at));
      NFP_API_TRY(unknown.check(block, at, {"type", "id", "name", "input", "cache_control", "caller", "toolset_name"}));
      calls.push_back({{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", input}}}});
    } else if (type == "thinking" && role == "assistant") {
      NFP_API_TRY(unknown.check(block, at, {"type", "thinking", "signature", "cache_control"}));
      std::string thought;
      NFP_API_TRY(Fields(block, at).get("thinking", &thought));
      thinking += thought;
    } else if (type == "redacted_thinking" && role == "assistant") {
      NFP_API_TRY(unknown.check(block, at, {"type", "data", "cache_control"}));
    } else {
      return bad_request(at, fmt::format("'{}': blocks of type '{}' are not supported here in a message of the {}", at,
                                         type.substr(0, 32), role));
    }
  }
  if (role == "user" && !any_text && !content.empty()) return std::nullopt;  // tools' results only
  Json entry = {{"role", role}, {"content", text}};
  if (!calls.empty()) entry["tool_calls"] = std::move(calls);
  if (!thinking.empty()) entry["reasoning_content"] = thinking;
  messages->push_back(std::move(entry));
  return std::nullopt;
}

MaybeError read_anthropic_tools(const Json& tools, const Unknown& unknown, Json* out) {
  if (!tools.is_array()) return bad_request("tools", "'tools' must be a list");
  *out = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& tool = tools[i];
    const std::string where = fmt::format("tools[{}]", i);
    if (!tool.is_object()) return bad_request(where, fmt::format("'{}' must be an object", where));
    const std::string type = text_field(tool, "type");
    if (!type.empty() && type != "custom") {
      return bad_request(where + ".type",
                         fmt::format("'{}.type' is '{}'; this server runs no tools of its own: only custom is known",
                                     where, type.substr(0, 64)),
                         "unsupported_parameter");
    }
    const std::string name = text_field(tool, "name");
    if (name.empty()) return bad_request(where + ".name", fmt::format("'{}.name' must be a non-empty string", where));
    NFP_API_TRY(unknown.check(tool, where,
                              {"type", "name", "description", "input_schema", "strict", "cache_control",
                               "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"}));
    Json function = {{"name", name}};
    if (tool.contains("description")) function["description"] = tool["description"];
    if (tool.contains("input_schema")) function["parameters"] = tool["input_schema"];
    if (tool.contains("strict")) function["strict"] = tool["strict"];
    out->push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return std::nullopt;
}

MaybeError read_anthropic_choice(const Json& choice, Json* chat) {
  const std::string type = text_field(choice, "type");
  if (type == "auto" || type == "none") {
    if (type == "none" || chat->contains("tools")) (*chat)["tool_choice"] = type;
  } else if (type == "any") {
    (*chat)["tool_choice"] = "required";
  } else if (type == "tool") {
    (*chat)["tool_choice"] = {{"type", "function"}, {"function", {{"name", text_field(choice, "name")}}}};
  } else {
    return bad_request("tool_choice", "'tool_choice' must be an object whose 'type' is auto, any, tool or none");
  }
  bool one_call = false;
  NFP_API_TRY(Fields(choice, "tool_choice").get("disable_parallel_tool_use", &one_call));
  if (one_call) (*chat)["parallel_tool_calls"] = false;
  return std::nullopt;
}

// output_config: {"format": {"type": "json_schema", "schema": ...}, "effort": ...}
MaybeError read_output_config(const Json& config, const Unknown& unknown, Json* chat) {
  if (!config.is_object()) return bad_request("output_config", "'output_config' must be an object");
  Fields fields(config, "output_config");
  if (const Json* effort = fields.find("effort")) (*chat)["reasoning_effort"] = *effort;
  const Json* format = fields.find("format");
  NFP_API_TRY(fields.rest(unknown.limits, unknown.ignored));
  if (format == nullptr) return std::nullopt;
  if (text_field(*format, "type") != "json_schema" || !format->contains("schema")) {
    return bad_request("output_config.format",
                       "'output_config.format' must be {\"type\": \"json_schema\", \"schema\": ...}");
  }
  NFP_API_TRY(unknown.check(*format, "output_config.format", {"type", "schema"}));
  (*chat)["response_format"] = {{"type", "json_schema"},
                                {"json_schema", {{"name", "answer"}, {"schema", (*format)["schema"]}}}};
  return std::nullopt;
}

MaybeError read_messages(Fields& fields, const Unknown& unknown, Json* chat) {
  Json messages = Json::array();
  if (const Json* system = fields.find("system")) {
    std::string text;
    NFP_API_TRY(read_text_parts(*system, "system", {"text"}, unknown, &text));
    if (!text.empty()) messages.push_back({{"role", "system"}, {"content", text}});
  }
  const Json* given = fields.find("messages");
  if (given == nullptr || !given->is_array() || given->empty()) {
    return bad_request("messages", "'messages' must be a non-empty list");
  }
  const int most = unknown.limits.max_messages;
  if (given->size() > static_cast<size_t>(most)) {
    return bad_request("messages",
                       fmt::format("'messages' has {} entries; at most {} are allowed", given->size(), most));
  }
  for (size_t i = 0; i < given->size(); ++i) {
    NFP_API_TRY(add_message((*given)[i], fmt::format("messages[{}]", i), unknown, &messages));
  }
  // A last message of the assistant is the beginning of the answer.
  const Json& last = messages.back();
  if (last["role"] == "assistant" && !last.contains("tool_calls") && last["content"] != Json("")) {
    (*chat)["continue_final_message"] = true;
  }
  (*chat)["messages"] = std::move(messages);
  return std::nullopt;
}

// Edits that take nothing away: Claude Code asks for all thoughts to be kept.
MaybeError check_context_management(const Json& context) {
  if (!context.is_object()) return bad_request("context_management", "'context_management' must be an object");
  const auto edits = context.find("edits");
  if (edits == context.end() || edits->is_null()) return std::nullopt;
  const auto keeps_all = [](const Json& edit) {
    return text_field(edit, "type") == "clear_thinking_20251015" && text_field(edit, "keep") == "all";
  };
  if (edits->is_array() && std::all_of(edits->begin(), edits->end(), keeps_all)) return std::nullopt;
  return bad_request(
      "context_management",
      "'context_management' is not supported but for clear_thinking with keep: all; leave other edits out",
      "unsupported_parameter");
}

MaybeError read_thinking(const Json& thinking, const RequestLimits& limits, Json* chat,
                         std::vector<std::string>* ignored) {
  const std::string type = text_field(thinking, "type");
  if (type != "enabled" && type != "disabled" && type != "adaptive") {
    return bad_request("thinking", "'thinking' must be an object whose 'type' is enabled, disabled or adaptive");
  }
  for (const char* name : {"enable_thinking", "thinking"}) {
    if (!chat->contains("chat_template_kwargs")) (*chat)["chat_template_kwargs"] = Json::object();
    Json& variables = (*chat)["chat_template_kwargs"];
    if (variables.is_object() && !variables.contains(name)) variables[name] = type != "disabled";
  }
  Fields fields(thinking, "thinking");
  for (const char* name : {"type", "budget_tokens", "display"}) fields.without_effect(name);
  return fields.rest(limits, ignored);
}

}  // namespace

MaybeError parse_anthropic(const Json& body, const RequestLimits& limits, bool counting, GenerationRequest* out) {
  Fields fields(body);
  Json chat = Json::object();
  dialect::pass_on(fields, &chat);
  chat.erase("metadata");
  std::vector<std::string> ignored;

  const Unknown unknown = {limits, &ignored};
  NFP_API_TRY(read_messages(fields, unknown, &chat));

  if (const Json* tools = fields.find("tools")) {
    Json known;
    NFP_API_TRY(read_anthropic_tools(*tools, unknown, &known));
    if (!known.empty()) chat["tools"] = std::move(known);
  }
  if (const Json* choice = fields.find("tool_choice")) {
    NFP_API_TRY(read_anthropic_choice(*choice, &chat));
    NFP_API_TRY(unknown.check(*choice, "tool_choice", {"type", "name", "disable_parallel_tool_use"}));
  }
  if (const Json* stop = fields.find("stop_sequences")) {
    if (!stop->is_array()) return bad_request("stop_sequences", "'stop_sequences' must be a list of strings");
    chat["stop"] = *stop;
  }
  if (fields.find("max_tokens") != nullptr) {
    int most = 1;
    NFP_API_TRY(fields.get("max_tokens", 1, INT32_MAX, &most));
    chat["max_tokens"] = most;
  } else if (!counting) {
    return bad_request("max_tokens", "'max_tokens' is missing");
  }
  const Json* thinking = fields.find("thinking");
  if (thinking != nullptr) NFP_API_TRY(read_thinking(*thinking, limits, &chat, &ignored));
  if (const Json* metadata = fields.find("metadata")) {
    if (const std::string user = text_field(*metadata, "user_id"); !user.empty()) chat["user"] = user;
  }
  if (const Json* config = fields.find("output_config")) NFP_API_TRY(read_output_config(*config, unknown, &chat));
  for (const char* name : {"service_tier", "cache_control"}) fields.without_effect(name);
  if (const Json* context = fields.find("context_management")) NFP_API_TRY(check_context_management(*context));
  for (const char* name : {"container", "mcp_servers"}) {
    NFP_API_TRY(fields.unsupported(name, "this server does not implement it; leave it out"));
  }
  NFP_API_TRY(fields.unsupported("output_format", "use 'output_config.format'"));
  if (counting) {
    fields.without_effect("compaction");  // what is counted is as it is sent
  } else {
    NFP_API_TRY(fields.unsupported("compaction", "conversations are not compacted here; leave it out"));
  }
  // Ignored, a conversation would go on without what came before.
  if (fields.find("thread") != nullptr) {
    return bad_request("thread",
                       "'thread' is not supported: this server keeps no messages; send all of them, without it",
                       std::string(kThreadUnsupported));
  }
  NFP_API_TRY(fields.rest(limits, &ignored));

  NFP_API_TRY(dialect::parse_as_chat(chat, limits,
                                     {{"stop", "stop_sequences"},
                                      {"].function.parameters", "].input_schema"},
                                      {"].function.", "]."},
                                      {"response_format.json_schema", "output_config.format"},
                                      {"response_format", "output_config.format"},
                                      {"reasoning_effort", "output_config.effort"}},
                                     out));
  for (auto& acts : out->template_fields) {
    if (acts.field == "reasoning_effort") acts.field = "output_config.effort";
  }
  if (thinking != nullptr) out->template_fields.push_back({"thinking", {"enable_thinking", "thinking"}});
  out->api = TextApi::kMessages;
  out->ignored.insert(out->ignored.end(), ignored.begin(), ignored.end());
  return std::nullopt;
}

}  // namespace nfp::server
