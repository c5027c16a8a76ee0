// Messages and tools of OpenAI's shape, brought into the shape that chat templates expect.
#include <algorithm>

#include "server/api/generation_request.h"
#include "server/api/json_schema.h"

namespace nfp::server {
namespace {

using Names = std::initializer_list<const char*>;

// Of an object that templates see, the members that say something, in their order. Those in `inert` are known to say
// nothing here.
MaybeError keep_known(const Json& object, const std::string& where, Names known, Names inert, const Unknown& unknown,
                      Json* out) {
  Fields fields(object, where);
  for (const char* name : known) fields.without_effect(name);
  for (const char* name : inert) fields.without_effect(name);
  NFP_API_TRY(fields.rest(unknown.limits, unknown.ignored));
  *out = Json::object();
  for (const auto& [name, value] : object.items()) {
    if (std::find(known.begin(), known.end(), name) != known.end()) (*out)[name] = value;
  }
  return std::nullopt;
}

// OpenAI's clients send a call's arguments as text; templates print them as JSON.
MaybeError normalize_tool_calls(const Json& calls, const std::string& where, const Unknown& unknown, Json* out) {
  if (!calls.is_array()) return bad_request(where, fmt::format("'{}' must be a list", where));
  *out = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    const Json& call = calls[i];
    const bool shaped = call.is_object() && call.contains("function") && call["function"].is_object() &&
                        call["function"].contains("name") && call["function"]["name"].is_string();
    if (!shaped) {
      return bad_request(where,
                         fmt::format("each entry of '{}' must have 'function' with 'name' and 'arguments'", where));
    }
    const std::string at = fmt::format("{}[{}]", where, i);
    Json copy, function;
    NFP_API_TRY(keep_known(call, at, {"id", "type", "function"}, {"index", "cache_control", "provider_specific_fields"},
                           unknown, &copy));
    NFP_API_TRY(keep_known(call["function"], at + ".function", {"name", "arguments"},
                           {"parsed_arguments", "provider_specific_fields"}, unknown, &function));
    if (function.contains("arguments") && function["arguments"].is_string()) {
      const std::string text = function["arguments"].get<std::string>();
      auto parsed = parse_json(text.empty() ? "{}" : text);
      const auto wrong = [&] {
        return fmt::format("'{}': the arguments of '{}' are not a JSON object", where,
                           function["name"].get<std::string>().substr(0, 64));
      };
      if (parsed.ok() && !parsed->is_object()) return bad_request(where, wrong());
      // As a model wrote it, cut off perhaps, and as our own answers have it, which agents send back.
      if (!parsed.ok()) NFP_API_TRY(unknown.leave_out(at + ".function.arguments", wrong()));
      function["arguments"] = parsed.ok() ? std::move(*parsed) : Json::object();
    } else if (!function.contains("arguments") || function["arguments"].is_null()) {
      function["arguments"] = Json::object();
    } else if (!function["arguments"].is_object()) {
      return bad_request(where, fmt::format("'{}': the arguments of '{}' are not a JSON object", where,
                                            function["name"].get<std::string>().substr(0, 64)));
    }
    copy["function"] = std::move(function);
    out->push_back(std::move(copy));
  }
  return std::nullopt;
}

}  // namespace

MaybeError read_text_parts(const Json& content, const std::string& where, std::initializer_list<std::string_view> types,
                           const Unknown& unknown, std::string* out) {
  if (content.is_string()) {
    *out = content.get<std::string>();
    return std::nullopt;
  }
  if (!content.is_array()) {
    return bad_request(where, fmt::format("'{}' must be a string or a list of parts", where));
  }
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& part = content[i];
    const std::string at = fmt::format("{}[{}]", where, i);
    if (!part.is_object() || !part.contains("type") || !part["type"].is_string()) {
      return bad_request(at, fmt::format("'{}' must be an object with a 'type'", at));
    }
    const auto& type = part["type"].get_ref<const std::string&>();
    if (std::find(types.begin(), types.end(), type) == types.end()) {
      return bad_request(at, fmt::format("'{}': parts of type '{}' are not supported here; only {}", at,
                                         type.substr(0, 32), fmt::join(types, ", ")));
    }
    const char* field = type == "refusal" ? "refusal" : "text";
    if (!part.contains(field) || !part[field].is_string()) {
      return bad_request(at, fmt::format("'{}.{}' must be a string", at, field));
    }
    NFP_API_TRY(unknown.check(part, at,
                              {"type", field, "id", "annotations", "logprobs", "prompt_cache_breakpoint",
                               "cache_control", "citations", "parsed"}));
    if (i > 0) *out += '\n';
    *out += part[field].get_ref<const std::string&>();
  }
  return std::nullopt;
}

MaybeError parse_messages(const Json& messages, const RequestLimits& limits, Json* out,
                          std::vector<std::string>* ignored) {
  if (!messages.is_array() || messages.empty()) return bad_request("messages", "'messages' must be a non-empty list");
  if (messages.size() > static_cast<size_t>(limits.max_messages)) {
    return bad_request("messages", fmt::format("'messages' has {} entries; at most {} are allowed", messages.size(),
                                               limits.max_messages));
  }
  *out = Json::array();
  const Unknown unknown = {limits, ignored};
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    const std::string where = fmt::format("messages[{}]", i);
    if (!message.is_object()) return bad_request(where, fmt::format("'{}' must be an object", where));
    Fields fields(message, where);
    std::string role;
    NFP_API_TRY(fields.get("role", &role));
    constexpr std::string_view kRoles[] = {"system", "developer", "user", "assistant", "tool"};
    if (std::find(std::begin(kRoles), std::end(kRoles), role) == std::end(kRoles)) {
      return bad_request(where + ".role",
                         fmt::format("'{}.role' must be system, developer, user, assistant or tool", where));
    }
    Json kept = Json::object();
    kept["role"] = role == "developer" ? "system" : role;  // the newer name; templates know the older one
    std::string content;
    const Json* given = fields.find("content");
    const Json* calls = fields.find("tool_calls");
    if (given != nullptr) {
      NFP_API_TRY(read_text_parts(*given, where + ".content", {"text", "refusal"}, unknown, &content));
    } else if (role != "assistant") {
      return bad_request(where + ".content", fmt::format("'{}.content' is missing", where));
    }
    kept["content"] = content;
    if (calls != nullptr) {
      if (role != "assistant")
        return bad_request(where, fmt::format("'{}': only an assistant has 'tool_calls'", where));
      Json normalized;
      NFP_API_TRY(normalize_tool_calls(*calls, where + ".tool_calls", unknown, &normalized));
      if (!normalized.empty()) kept["tool_calls"] = std::move(normalized);
    }
    for (const char* name : {"name", "tool_call_id", "reasoning_content", "reasoning"}) {
      std::string text;
      NFP_API_TRY(fields.get(name, &text));
      // "reasoning" is vLLM's newer name.
      if (!text.empty()) kept.emplace(name == std::string_view("reasoning") ? "reasoning_content" : name, text);
    }
    // The last two are openai's and litellm's own, in answers that are sent back.
    for (const char* name : {"refusal", "annotations", "cache_control", "parsed", "provider_specific_fields"}) {
      fields.without_effect(name);
    }
    for (const char* name : {"audio", "function_call"}) {
      NFP_API_TRY(fields.unsupported(name, "this server does not implement it; leave it out"));
    }
    NFP_API_TRY(fields.rest(limits, ignored));
    out->push_back(std::move(kept));
  }
  return std::nullopt;
}

MaybeError parse_template_variables(Fields& fields, Json* out) {
  const Json* variables = fields.find("chat_template_kwargs");
  if (variables == nullptr) return std::nullopt;
  if (!variables->is_object()) return bad_request("chat_template_kwargs", "'chat_template_kwargs' must be an object");
  // Names with a meaning: a variable of such a name would put another conversation in place of the one that was
  // checked.
  for (const char* name : {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception",
                           "strftime_now", "namespace", "range", "dict"}) {
    if (variables->contains(name)) {
      return bad_request("chat_template_kwargs",
                         fmt::format("'chat_template_kwargs' may not set '{}'; use the request's own fields", name));
    }
  }
  *out = *variables;
  return std::nullopt;
}

MaybeError parse_turn(Fields& fields, GenerationRequest* out) {
  NFP_API_TRY(fields.get("add_generation_prompt", &out->add_generation_prompt));
  NFP_API_TRY(fields.get("continue_final_message", &out->continue_final_message));
  if (!out->continue_final_message) return std::nullopt;
  if (fields.find("add_generation_prompt") != nullptr && out->add_generation_prompt) {
    return bad_request("continue_final_message",
                       "'continue_final_message' and 'add_generation_prompt' cannot both be true");
  }
  out->add_generation_prompt = false;
  return std::nullopt;
}

ApiError unenforced_error(const std::vector<std::string>& keywords, std::string_view param) {
  return bad_request(
      std::string(param),
      fmt::format("'{}' asks for strict, and these of its keywords are not enforced here: {}; leave them "
                  "out, or strict",
                  param, fmt::join(keywords, ", ")),
      "unsupported_parameter");
}

MaybeError parse_tools(const Json& tools, const RequestLimits& limits, Json* out, std::vector<std::string>* ignored,
                       std::vector<std::string>* unenforced) {
  if (!tools.is_array()) return bad_request("tools", "'tools' must be a list");
  if (tools.size() > static_cast<size_t>(limits.max_tools)) {
    return bad_request("tools",
                       fmt::format("'tools' has {} entries; at most {} are allowed", tools.size(), limits.max_tools));
  }
  size_t bytes = 0;
  const Unknown unknown = {limits, ignored};
  Json kept = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& tool = tools[i];
    const std::string where = fmt::format("tools[{}]", i);
    const bool shaped = tool.is_object() && tool.contains("type") && tool["type"] == "function" &&
                        tool.contains("function") && tool["function"].is_object() &&
                        tool["function"].contains("name") && tool["function"]["name"].is_string() &&
                        !tool["function"]["name"].get_ref<const std::string&>().empty();
    if (!shaped) {
      return bad_request(
          where, fmt::format("'{}' must be {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}", where));
    }
    const Json& function = tool["function"];
    Fields described(function, where + ".function");
    std::string description;
    bool strict = false;
    NFP_API_TRY(described.get("description", &description));
    NFP_API_TRY(described.get("strict", &strict));
    const auto too_large = [&] {
      return bad_request("tools",
                         fmt::format("the names and 'parameters' of all 'tools' together are larger than {} bytes",
                                     limits.max_schema_bytes));
    };
    bytes += function["name"].get_ref<const std::string&>().size();
    if (bytes > static_cast<size_t>(limits.max_schema_bytes)) return too_large();
    if (function.contains("parameters") && !function["parameters"].is_null()) {
      if (!function["parameters"].is_object()) {
        return bad_request(where, fmt::format("'{}.function.parameters' must be a JSON schema (an object)", where));
      }
      const Json type = function["parameters"].value("type", Json("object"));
      if (type.is_string() && type != "object") {
        const std::string param = where + ".function.parameters";
        return bad_request(param, fmt::format("'{}' must describe an object, as a call's arguments are one: its 'type' "
                                              "has to be object",
                                              param));
      }
      const std::string text = dump(function["parameters"]);
      bytes += text.size();
      if (bytes > static_cast<size_t>(limits.max_schema_bytes)) return too_large();
      const auto keywords = unenforced_keywords(function["parameters"]);
      if (!keywords.empty() && strict) {
        return unenforced_error(keywords, where + ".function.parameters");
      }
      if (unenforced != nullptr) {
        for (const std::string& keyword : keywords) {
          if (std::find(unenforced->begin(), unenforced->end(), keyword) == unenforced->end()) {
            unenforced->push_back(keyword);
          }
        }
      }
      if (json_depth(text, limits.max_schema_depth) > limits.max_schema_depth) {
        return bad_request(where, fmt::format("'{}.function.parameters' is nested deeper than {} levels", where,
                                              limits.max_schema_depth));
      }
    }
    Json& known = kept.emplace_back();
    NFP_API_TRY(keep_known(tool, where, {"type", "function"},
                           {"cache_control", "allowed_callers", "defer_loading", "input_examples"}, unknown, &known));
    // "return" and "response" are none of OpenAI's, but templates read them.
    NFP_API_TRY(keep_known(function, where + ".function",
                           {"name", "description", "parameters", "strict", "return", "response"}, {"cache_control"},
                           unknown, &known["function"]));
  }
  if (!kept.empty()) *out = std::move(kept);
  return std::nullopt;
}

}  // namespace nfp::server
