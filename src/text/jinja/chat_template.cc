#include "text/jinja/chat_template.h"

#include <algorithm>
#include <exception>
#include <map>
#include <vector>

#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp {
namespace {

using nlohmann::ordered_json;

// What the caller passes is not on the template's account, but for the nesting: JSON deeper than this is refused.
constexpr int kMaxInputDepth = 256;

template <typename... Args>
[[noreturn]] void refuse_input(fmt::format_string<Args...> format, Args&&... args) {
  throw jinja::Failure{ErrorCode::kInvalidInput, fmt::format(format, std::forward<Args>(args)...), 0};
}

jinja::Value convert(jinja::Heap& heap, const std::string& s) {
  if (!text::is_utf8(s)) refuse_input("a string of the input is not valid UTF-8");
  return heap.string(s);
}

jinja::Value convert(jinja::Heap& heap, const ordered_json& json, int depth = 0) {
  if (depth > kMaxInputDepth) refuse_input("the input is nested deeper than {} levels", kMaxInputDepth);
  switch (json.type()) {
    case ordered_json::value_t::boolean:
      return jinja::Value::boolean(json.get<bool>());
    case ordered_json::value_t::number_integer:
      return jinja::Value::integer(json.get<int64_t>());
    case ordered_json::value_t::number_unsigned:
      return jinja::Value::integer(static_cast<jinja::Int>(json.get<uint64_t>()));
    case ordered_json::value_t::number_float:
      return jinja::Value::real(json.get<double>());
    case ordered_json::value_t::string:
      return convert(heap, json.get_ref<const std::string&>());
    case ordered_json::value_t::array: {
      auto* list = heap.make<jinja::List>();
      for (const ordered_json& item : json) list->items.push_back(convert(heap, item, depth + 1));
      return jinja::Value::object(jinja::Kind::kList, list);
    }
    case ordered_json::value_t::object: {
      auto* dict = heap.make<jinja::Dict>();
      for (const auto& [key, value] : json.items()) dict->set(convert(heap, key), convert(heap, value, depth + 1));
      return jinja::Value::object(jinja::Kind::kDict, dict);
    }
    default:
      return jinja::Value::none();
  }
}

// raise_exception's text is the template's, so it may be of any length and have line breaks.
std::string one_line(std::string_view message) {
  constexpr size_t kMaxMessage = 1000;
  std::string out(message.substr(0, message.size() <= kMaxMessage ? message.size() : text::byte_of(message, 250)));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return out;
}

// Variables by symbol. What the template does not mention is not converted.
std::vector<jinja::Value> make_context(const jinja::Template& program, const ChatTemplateInput& input,
                                       jinja::Heap& heap) {
  std::vector<jinja::Value> context(program.symbol_names.size());
  const auto set = [&](std::string_view name, const auto& input_value) {
    if (const auto it = program.symbols.find(name); it != program.symbols.end()) {
      context[it->second] = convert(heap, input_value);
    }
  };
  // First, so that no token of the model's takes the place of a conversation.
  for (const auto& [name, text] : input.named_tokens) set(name, text);
  if (!input.additional_special_tokens.empty()) {
    set("additional_special_tokens", ordered_json(input.additional_special_tokens));
  }
  set("messages", input.messages);
  set("tools", input.tools);
  set("documents", ordered_json());
  set("add_generation_prompt", ordered_json(input.add_generation_prompt));
  if (input.bos_token) set("bos_token", *input.bos_token);
  if (input.eos_token) set("eos_token", *input.eos_token);
  for (const auto& [name, value] : input.extra.items()) set(name, value);
  return context;
}

}  // namespace

Result<ChatTemplate> ChatTemplate::parse(const std::string& source, std::string name) {
  NFP_ASSIGN_OR_RETURN(std::shared_ptr<const jinja::Template> program, jinja::parse_template(source, std::move(name)));
  return ChatTemplate(std::move(program));
}

Result<std::string> ChatTemplate::render(const ChatTemplateInput& input) const {
  if (!input.extra.is_object()) {
    return error(ErrorCode::kInvalidInput, "chat template '{}': the further variables must be a JSON object",
                 program_->name);
  }
  jinja::Heap heap;
  jinja::Runtime runtime(input.limits);
  runtime.now = input.now;
  try {
    return jinja::run_template(*program_, runtime, make_context(*program_, input, heap));
  } catch (const jinja::Failure& failure) {
    return error(failure.code, "chat template '{}' line {}: {}", program_->name, failure.line,
                 one_line(failure.message));
  } catch (const std::exception& e) {  // of the standard library: out of memory
    return error(ErrorCode::kResource, "chat template '{}': {}", program_->name, e.what());
  }
}

bool ChatTemplate::mentions(std::string_view variable) const {
  const auto it = program_->symbols.find(variable);
  return it != program_->symbols.end() && program_->read[it->second];
}

Result<std::string> pick_chat_template(const ordered_json& chat_template, bool has_tools, std::string_view name) {
  if (chat_template.is_string()) return chat_template.get<std::string>();
  if (!chat_template.is_array()) {
    return error(ErrorCode::kInvalidInput, "field 'chat_template' must be a string or a list of named templates");
  }
  std::map<std::string, std::string, std::less<>> templates;  // of two with one name the last counts, as in a dict
  for (const ordered_json& entry : chat_template) {
    const auto has = [&](const char* field) {
      return entry.is_object() && entry.contains(field) && entry[field].is_string();
    };
    if (!has("name") || !has("template")) {
      return error(ErrorCode::kInvalidInput,
                   "field 'chat_template': each entry of the list needs the strings 'name' and 'template'");
    }
    templates[entry["name"].get<std::string>()] = entry["template"].get<std::string>();
  }
  if (name.empty()) name = has_tools && templates.contains("tool_use") ? "tool_use" : "default";
  if (const auto it = templates.find(name); it != templates.end()) return it->second;
  std::vector<std::string_view> names;  // no view of the keys: Clang 14, which builds the fuzzers, does not compile one
  names.reserve(templates.size());
  for (const auto& [known, source] : templates) names.push_back(known);
  return error(ErrorCode::kNotFound, "field 'chat_template' has no template '{}'; it has: {}", name,
               fmt::join(names, ", "));
}

}  // namespace nfp
