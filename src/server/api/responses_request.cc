// OpenAI's Responses API: items instead of messages.
#include <algorithm>
#include <set>

#include "server/api/dialects.h"

namespace nfp::server {
namespace {

// Items of `input`, as the messages that chat templates know.
class Conversation {
 public:
  Conversation(Json* messages, const Unknown& unknown) : messages_(messages), unknown_(unknown) {}

  MaybeError add(const Json& item, const std::string& where) {
    if (!item.is_object()) return bad_request(where, fmt::format("'{}' must be an object", where));
    Fields fields(item, where);
    std::string type;
    NFP_API_TRY(fields.get("type", &type));
    if (type.empty()) type = "message";  // the short form {"role", "content"}
    if (type == "message") {
      NFP_API_TRY(message(fields, where));
    } else if (type == "function_call") {
      NFP_API_TRY(call(fields, where));
    } else if (type == "function_call_output") {
      NFP_API_TRY(output(fields, where));
    } else if (type == "reasoning") {
      NFP_API_TRY(reasoning(fields, where));
    } else {
      return bad_request(where + ".type", fmt::format("'{}.type' is '{}'; this server knows message, function_call, "
                                                      "function_call_output, reasoning and item_reference",
                                                      where, type.substr(0, 64)));
    }
    ignore(fields, {"id", "status"});
    return fields.rest(unknown_.limits, unknown_.ignored);
  }

 private:
  // Members that answers have, and that clients send back with them.
  static void ignore(Fields& fields, std::initializer_list<const char*> names) {
    for (const char* name : names) fields.without_effect(name);
  }

  MaybeError message(Fields& fields, const std::string& where) {
    ignore(fields, {"phase"});
    std::string role;
    NFP_API_TRY(fields.get("role", &role));
    if (role != "user" && role != "assistant" && role != "system" && role != "developer") {
      return bad_request(where + ".role", fmt::format("'{}.role' must be user, assistant, system or developer", where));
    }
    const Json* content = fields.find("content");
    if (content == nullptr) return bad_request(where + ".content", fmt::format("'{}.content' is missing", where));
    std::string text;
    NFP_API_TRY(read_text_parts(*content, where + ".content", {"input_text", "output_text", "text", "refusal"},
                                unknown_, &text));
    // What the model wrote behind calls is of the message that has them, as where a kept response goes on.
    if (role == "assistant" && !messages_->empty() && messages_->back().contains("tool_calls")) {
      Json& made = messages_->back();
      made["content"].get_ref<std::string&>() += text;
      take_reasoning(made);
      return std::nullopt;
    }
    Json entry = {{"role", role}, {"content", text}};
    if (role == "assistant") {
      take_reasoning(entry);
    } else {
      reasoning_.clear();  // of a turn that has ended
    }
    messages_->push_back(std::move(entry));
    return std::nullopt;
  }

  MaybeError call(Fields& fields, const std::string& where) {
    ignore(fields, {"namespace", "caller", "async", "parsed_arguments"});
    std::string id, name, arguments;
    NFP_API_TRY(fields.get("call_id", &id));
    NFP_API_TRY(fields.get("name", &name));
    NFP_API_TRY(fields.get("arguments", &arguments));
    if (name.empty()) return bad_request(where + ".name", fmt::format("'{}.name' is missing", where));
    const auto parsed = parse_json(arguments.empty() ? "{}" : arguments);
    const auto wrong = [&] { return fmt::format("'{}.arguments' is not a JSON object", where); };
    if (parsed.ok() && !parsed->is_object()) return bad_request(where + ".arguments", wrong());
    if (!parsed.ok()) {  // as chat completions have it, whose field would have another name
      NFP_API_TRY(unknown_.leave_out(where + ".arguments", wrong()));
      arguments = "{}";
    }
    // Calls made together, and the text before them, are one message.
    if (messages_->empty() || messages_->back()["role"] != "assistant") {
      messages_->push_back({{"role", "assistant"}, {"content", ""}});
    }
    take_reasoning(messages_->back());
    messages_->back()["tool_calls"].push_back(
        {{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", arguments}}}});
    return std::nullopt;
  }

  MaybeError output(Fields& fields, const std::string& where) {
    ignore(fields, {"name", "namespace", "caller"});
    std::string id, text;
    NFP_API_TRY(fields.get("call_id", &id));
    const Json* output = fields.find("output");
    if (output == nullptr) return bad_request(where + ".output", fmt::format("'{}.output' is missing", where));
    NFP_API_TRY(read_text_parts(*output, where + ".output", {"input_text", "output_text", "text"}, unknown_, &text));
    messages_->push_back({{"role", "tool"}, {"tool_call_id", id}, {"content", text}});
    reasoning_.clear();
    return std::nullopt;
  }

  MaybeError reasoning(Fields& fields, const std::string& where) {
    ignore(fields, {"summary", "encrypted_content"});
    const Json* content = fields.find("content");
    if (content == nullptr) return std::nullopt;  // a summary alone is for people
    return read_text_parts(*content, where + ".content", {"reasoning_text", "text"}, unknown_, &reasoning_);
  }

  void take_reasoning(Json& entry) {
    if (reasoning_.empty()) return;
    Json& before = entry["reasoning_content"];
    before = (before.is_string() ? before.get<std::string>() : "") + std::exchange(reasoning_, {});
  }

  Json* messages_;
  const Unknown& unknown_;
  std::string reasoning_;
};

MaybeError read_tools(const Json& tools, const Unknown& unknown, Json* out) {
  if (!tools.is_array()) return bad_request("tools", "'tools' must be a list");
  // Before any work on them: the chat parser sees only those that tool_choice keeps.
  const int most = unknown.limits.max_tools;
  if (tools.size() > static_cast<size_t>(most)) {
    return bad_request("tools", fmt::format("'tools' has {} entries; at most {} are allowed", tools.size(), most));
  }
  // Tools that a server runs, or a client by a protocol of its own, are sent along by agents (Codex: web_search,
  // namespace, custom), which do without them; whoever sends nothing else wants just these.
  const bool has_functions = std::any_of(
      tools.begin(), tools.end(), [](const Json& tool) { return dialect::text_field(tool, "type") == "function"; });
  *out = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& tool = tools[i];
    const std::string where = fmt::format("tools[{}]", i);
    if (!tool.is_object() || !tool.contains("type") || !tool["type"].is_string()) {
      return bad_request(where, fmt::format("'{}' must be an object with a 'type'", where));
    }
    if (tool["type"] != "function") {
      const std::string why =
          fmt::format("'{}.type' is '{}'; this server runs no tools of its own: only function is known", where,
                      tool["type"].get_ref<const std::string&>().substr(0, 64));
      if (!has_functions) return bad_request(where + ".type", why, "unsupported_parameter");
      NFP_API_TRY(unknown.leave_out(where, why));
      continue;
    }
    if (!tool.contains("name") || !tool["name"].is_string() || tool["name"].get_ref<const std::string&>().empty()) {
      return bad_request(where + ".name", fmt::format("'{}.name' must be a non-empty string", where));
    }
    NFP_API_TRY(unknown.check(tool, where,
                              {"type", "name", "description", "parameters", "strict", "async", "allowed_callers",
                               "defer_loading", "output_schema"}));
    Json function = Json::object();
    for (const char* name : {"name", "description", "parameters", "strict"}) {
      if (tool.contains(name) && !tool[name].is_null()) function[name] = tool[name];
    }
    out->push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return std::nullopt;
}

MaybeError read_tool_choice(const Json& choice, const Unknown& unknown, Json* chat) {
  if (choice == "auto" && !chat->contains("tools")) return std::nullopt;  // as responses without tools say it
  if (choice.is_string()) {
    (*chat)["tool_choice"] = choice;
    return std::nullopt;
  }
  const auto refuse = [] {
    return bad_request("tool_choice",
                       "'tool_choice' must be none, auto, required, {\"type\": \"function\", \"name\": ...} or "
                       "{\"type\": \"allowed_tools\", ...}");
  };
  const std::string type = dialect::text_field(choice, "type"), function = dialect::text_field(choice, "name");
  if (type == "function" && !function.empty()) {
    NFP_API_TRY(unknown.check(choice, "tool_choice", {"type", "name"}));
    (*chat)["tool_choice"] = {{"type", "function"}, {"function", {{"name", function}}}};
    return std::nullopt;
  }
  if (type != "allowed_tools" || !choice.contains("tools") || !choice["tools"].is_array()) {
    return refuse();
  }
  NFP_API_TRY(unknown.check(choice, "tool_choice", {"type", "mode", "tools"}));
  std::set<std::string_view> names;  // of `choice`; the list may be long
  for (const Json& allowed : choice["tools"]) {
    if (!allowed.is_object()) continue;
    const auto name = allowed.find("name");
    if (name != allowed.end() && name->is_string()) names.insert(name->get_ref<const std::string&>());
  }
  Json kept = Json::array();
  if (chat->contains("tools")) {
    for (const Json& tool : (*chat)["tools"]) {
      if (names.contains(tool["function"]["name"].get_ref<const std::string&>())) kept.push_back(tool);
    }
  }
  if (kept.empty()) return bad_request("tool_choice", "'tool_choice' allows no function of 'tools'");
  (*chat)["tools"] = std::move(kept);
  Fields fields(choice, "tool_choice");
  std::string mode = "auto";
  NFP_API_TRY(fields.get("mode", &mode));
  if (mode != "auto" && mode != "required") {
    return bad_request(fields.path("mode"), fmt::format("'{}' must be auto or required", fields.path("mode")));
  }
  (*chat)["tool_choice"] = mode;
  return std::nullopt;
}

MaybeError read_text_options(const Json& text, const RequestLimits& limits, Json* chat,
                             std::vector<std::string>* ignored) {
  if (!text.is_object()) return bad_request("text", "'text' must be an object");
  Fields fields(text, "text");
  if (const Json* verbosity = fields.find("verbosity")) (*chat)["verbosity"] = *verbosity;
  const Json* format = fields.find("format");
  NFP_API_TRY(fields.rest(limits, ignored));
  if (format == nullptr) return std::nullopt;
  const auto refuse = [] { return bad_request("text.format", "'text.format' must be an object with a 'type'"); };
  if (!format->is_object()) return refuse();
  Fields inner(*format, "text.format");
  const Json* type = inner.find("type");
  if (type == nullptr) return refuse();
  (*chat)["response_format"] = {{"type", *type}};
  if (*type == "json_schema") {
    Json& wrapped = (*chat)["response_format"]["json_schema"] = Json::object();
    for (const char* name : {"name", "schema", "strict", "description"}) {
      if (const Json* value = inner.find(name)) wrapped[name] = *value;
    }
  } else if (*type == "json_object") {
    if (const Json* schema = inner.find("schema")) (*chat)["response_format"]["schema"] = *schema;
  }
  return inner.rest(limits, ignored);
}

MaybeError read_reasoning(const Json& reasoning, const RequestLimits& limits, Json* chat,
                          std::vector<std::string>* ignored) {
  if (!reasoning.is_object()) return bad_request("reasoning", "'reasoning' must be an object");
  Fields fields(reasoning, "reasoning");
  if (const Json* effort = fields.find("effort")) (*chat)["reasoning_effort"] = *effort;
  for (const char* name : {"summary", "generate_summary"}) fields.without_effect(name);  // thoughts come as they are
  return fields.rest(limits, ignored);
}

void show(std::string& out, std::string_view name, const Json* value, std::string_view otherwise) {
  if (!out.empty()) out += ',';
  append_string(out, name);
  out += ':';
  out += value == nullptr ? std::string(otherwise) : dump(*value);
}

// A conversation may also go on without any.
MaybeError read_input(Fields& fields, const Unknown& unknown, ResponsesRequest* out) {
  Json* messages = &out->input;
  const Json* input = fields.find("input");
  if (input == nullptr) {
    if (!out->previous.empty()) return std::nullopt;
    return bad_request("input", "'input' is missing, and there is no 'previous_response_id' to go on with");
  }
  if (input->is_string()) {
    messages->push_back({{"role", "user"}, {"content", *input}});
  } else if (input->is_array() && !input->empty()) {
    const int most = unknown.limits.max_messages;
    if (input->size() > static_cast<size_t>(most)) {
      return bad_request("input", fmt::format("'input' has {} items; at most {} are allowed", input->size(), most));
    }
    Conversation conversation(messages, unknown);
    for (size_t i = 0; i < input->size(); ++i) {
      NFP_API_TRY(conversation.add((*input)[i], fmt::format("input[{}]", i)));
    }
  } else {
    return bad_request("input", "'input' must be a string or a non-empty list of items");
  }
  return std::nullopt;
}

// What is not made here is included where there is any, which is nowhere.
MaybeError read_included(const Json& one, size_t index, const Unknown& unknown, Json* chat) {
  constexpr const char* kNotMade[] = {"code_interpreter_call.outputs", "computer_call_output.output.image_url",
                                      "file_search_call.results",      "message.input_image.image_url",
                                      "reasoning.encrypted_content",   "web_search_call.action.sources",
                                      "web_search_call.results"};
  const std::string where = fmt::format("include[{}]", index);
  if (!one.is_string()) return bad_request(where, fmt::format("'{}' must be a string", where));
  if (one == "message.output_text.logprobs") {
    (*chat)["logprobs"] = true;
  } else if (std::find(std::begin(kNotMade), std::end(kNotMade), one) == std::end(kNotMade)) {
    return unknown.leave_out(
        where, fmt::format("'{}' must be message.output_text.logprobs, {}", where, fmt::join(kNotMade, ", ")));
  }
  return std::nullopt;
}

// How long the answer may be, and what comes with it.
MaybeError read_answer_options(Fields& fields, const Unknown& unknown, Json* chat) {
  if (fields.find("max_output_tokens") != nullptr) {
    int most = 1;
    NFP_API_TRY(fields.get("max_output_tokens", 1, INT32_MAX, &most));
    (*chat)["max_tokens"] = most;
  }
  if (const Json* include = fields.find("include")) {
    if (!include->is_array()) return bad_request("include", "'include' must be a list of strings");
    for (size_t i = 0; i < include->size(); ++i) NFP_API_TRY(read_included((*include)[i], i, unknown, chat));
  }
  if (const Json* top = fields.find("top_logprobs")) {
    (*chat)["logprobs"] = true;
    (*chat)["top_logprobs"] = *top;
  }
  std::string truncation;
  NFP_API_TRY(fields.get("truncation", &truncation));
  if (!truncation.empty() && truncation != "auto" && truncation != "disabled") {
    return bad_request("truncation", "'truncation' must be auto or disabled");
  }
  if (truncation == "auto") unknown.ignored->emplace_back("truncation");
  if (const Json* metadata = fields.find("metadata")) {  // the answer repeats it
    const auto is_text = [](const Json& value) { return value.is_string(); };
    if (!metadata->is_object() || !std::all_of(metadata->begin(), metadata->end(), is_text)) {
      return bad_request("metadata", "'metadata' must be an object whose values are strings");
    }
  }
  return check_service_tier(fields);
}

// The options as the answer repeats them.
void show_options(Fields& fields, ResponsesRequest* out) {
  std::string& shown = out->shown;
  show(shown, "instructions", out->instructions.is_null() ? nullptr : &out->instructions, "null");
  show(shown, "metadata", fields.find("metadata"), "{}");
  show(shown, "tools", fields.find("tools"), "[]");
  show(shown, "tool_choice", fields.find("tool_choice"), "\"auto\"");
  show(shown, "parallel_tool_calls", fields.find("parallel_tool_calls"), "true");
  show(shown, "text", fields.find("text"), R"({"format":{"type":"text"}})");
  show(shown, "reasoning", fields.find("reasoning"), R"({"effort":null,"summary":null})");
  show(shown, "max_output_tokens", fields.find("max_output_tokens"), "null");
  show(shown, "previous_response_id", fields.find("previous_response_id"), "null");
  show(shown, "top_logprobs", fields.find("top_logprobs"), "0");
  show(shown, "user", fields.find("user"), "null");
  shown +=
      fmt::format(R"(,"store":{},"truncation":"disabled","background":false,"service_tier":"default")", out->store);
}

}  // namespace

MaybeError read_responses(const Json& body, const RequestLimits& limits, ResponsesRequest* out) {
  Fields fields(body);
  Json& chat = out->chat;
  dialect::pass_on(fields, &chat);

  const Unknown unknown = {limits, &out->ignored};
  NFP_API_TRY(fields.get("previous_response_id", &out->previous));
  NFP_API_TRY(read_input(fields, unknown, out));
  if (const Json* instructions = fields.find("instructions")) {
    if (!instructions->is_string()) return bad_request("instructions", "'instructions' must be a string");
    out->instructions = *instructions;
  }
  if (const Json* stop = fields.find("stop")) chat["stop"] = *stop;
  NFP_API_TRY(fields.get("store", &out->store));
  if (!limits.keep_responses) out->store = false;

  if (const Json* tools = fields.find("tools")) {
    Json known;
    NFP_API_TRY(read_tools(*tools, unknown, &known));
    if (!known.empty()) chat["tools"] = std::move(known);
  }
  if (const Json* tool_choice = fields.find("tool_choice")) NFP_API_TRY(read_tool_choice(*tool_choice, unknown, &chat));
  if (const Json* parallel = fields.find("parallel_tool_calls")) chat["parallel_tool_calls"] = *parallel;
  if (const Json* text = fields.find("text")) NFP_API_TRY(read_text_options(*text, limits, &chat, &out->ignored));
  if (const Json* reasoning = fields.find("reasoning")) {
    NFP_API_TRY(read_reasoning(*reasoning, limits, &chat, &out->ignored));
  }
  NFP_API_TRY(read_answer_options(fields, unknown, &chat));
  fields.without_effect("stream_options");  // it has nothing that is done here
  fields.without_effect("max_tool_calls");  // of tools that a server runs
  for (const char* name : {"background", "conversation", "prompt"}) {
    NFP_API_TRY(fields.unsupported(name, "this server does not implement it; leave it out"));
  }
  NFP_API_TRY(fields.rest(limits, &out->ignored));

  show_options(fields, out);
  return std::nullopt;
}

MaybeError parse_responses(ResponsesRequest& from, Json earlier, const RequestLimits& limits, GenerationRequest* out) {
  Json& chat = from.chat;
  for (Json& message : from.input) earlier.push_back(std::move(message));
  if (from.store) out->conversation = dump(earlier);
  Json messages = Json::array();
  if (!from.instructions.is_null()) messages.push_back({{"role", "system"}, {"content", from.instructions}});
  for (Json& message : earlier) messages.push_back(std::move(message));
  chat["messages"] = std::move(messages);
  NFP_API_TRY(dialect::parse_as_chat(chat, limits,
                                     {{"messages", "input"},
                                      {"].function.", "]."},
                                      {"response_format.json_schema", "text.format"},
                                      {"response_format", "text.format"},
                                      {"reasoning_effort", "reasoning.effort"},
                                      {"verbosity", "text.verbosity"}},
                                     out));
  for (auto& acts : out->template_fields) {
    if (acts.field == "reasoning_effort") acts.field = "reasoning.effort";
    if (acts.field == "verbosity") acts.field = "text.verbosity";
  }
  out->api = TextApi::kResponses;
  out->shown = std::move(from.shown);
  out->store = from.store;
  out->ignored.insert(out->ignored.end(), from.ignored.begin(), from.ignored.end());
  return std::nullopt;
}

}  // namespace nfp::server
