#include "text/jinja/chat_template.h"

#include <algorithm>
#include <exception>
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

class InputConverter {
 public:
  explicit InputConverter(jinja::Heap& heap) : heap_(heap) {}

  jinja::Value convert(const ordered_json& json, int depth = 0) {
    if (depth > kMaxInputDepth) fail("the input is nested deeper than {} levels", kMaxInputDepth);
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
        return string(json.get_ref<const std::string&>());
      case ordered_json::value_t::array: {
        auto* list = heap_.make<jinja::List>();
        list->items.reserve(json.size());
        for (const ordered_json& item : json) list->items.push_back(convert(item, depth + 1));
        return jinja::Value::object(jinja::Kind::kList, list);
      }
      case ordered_json::value_t::object: {
        auto* dict = heap_.make<jinja::Dict>();
        for (auto it = json.begin(); it != json.end(); ++it) dict->set(string(it.key()), convert(*it, depth + 1));
        return jinja::Value::object(jinja::Kind::kDict, dict);
      }
      default:
        return jinja::Value::none();
    }
  }

  jinja::Value string(const std::string& s) {
    if (!text::is_utf8(s)) fail("a string of the input is not valid UTF-8");
    return heap_.string(s);
  }

 private:
  template <typename... Args>
  [[noreturn]] static void fail(fmt::format_string<Args...> format, Args&&... args) {
    throw jinja::Failure{ErrorCode::kInvalidInput, fmt::format(format, std::forward<Args>(args)...), 0};
  }
  jinja::Heap& heap_;
};

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
  InputConverter converter(heap);
  const auto set = [&](std::string_view name, const auto& make) {
    const auto it = program.symbols.find(name);
    if (it != program.symbols.end()) context[it->second] = make();
  };
  set("messages", [&] { return converter.convert(input.messages); });
  set("tools", [&] { return converter.convert(input.tools); });
  set("documents", [] { return jinja::Value::none(); });
  set("add_generation_prompt", [&] { return jinja::Value::boolean(input.add_generation_prompt); });
  if (input.bos_token) set("bos_token", [&] { return converter.string(*input.bos_token); });
  if (input.eos_token) set("eos_token", [&] { return converter.string(*input.eos_token); });
  if (input.extra.is_object()) {
    for (auto it = input.extra.begin(); it != input.extra.end(); ++it) {
      set(it.key(), [&] { return converter.convert(*it); });
    }
  }
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
  std::vector<std::pair<std::string, const ordered_json*>> templates;
  for (const ordered_json& entry : chat_template) {
    const auto entry_name = entry.is_object() ? entry.find("name") : entry.end();
    const auto entry_text = entry.is_object() ? entry.find("template") : entry.end();
    if (!entry.is_object() || entry_name == entry.end() || entry_text == entry.end() || !entry_name->is_string() ||
        !entry_text->is_string()) {
      return error(ErrorCode::kInvalidInput,
                   "field 'chat_template': each entry of the list needs the strings 'name' and 'template'");
    }
    templates.emplace_back(entry_name->get<std::string>(), &*entry_text);
  }
  const auto find = [&](std::string_view wanted) -> const ordered_json* {
    const ordered_json* found = nullptr;
    for (const auto& [entry_name, text] : templates) {
      if (entry_name == wanted) found = text;  // the last one of a name counts, as in a dict made of the list
    }
    return found;
  };
  const ordered_json* chosen = nullptr;
  if (!name.empty()) {
    chosen = find(name);
  } else {
    if (has_tools) chosen = find("tool_use");
    if (chosen == nullptr) chosen = find("default");
  }
  if (chosen != nullptr) return chosen->get<std::string>();
  std::vector<std::string> names;
  names.reserve(templates.size());
  for (const auto& [entry_name, text] : templates) names.push_back(entry_name);
  std::sort(names.begin(), names.end());
  return error(ErrorCode::kNotFound, "field 'chat_template' has no template '{}'; it has: {}",
               name.empty() ? std::string_view("default") : name, fmt::join(names, ", "));
}

}  // namespace nfp
