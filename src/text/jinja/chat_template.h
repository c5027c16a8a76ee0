// Chat templates: the Jinja2 programs that Hugging Face models carry (tokenizer_config.json, chat_template.jinja, or
// GGUF's tokenizer.chat_template), run as transformers' apply_chat_template runs them: jinja2's
// ImmutableSandboxedEnvironment with trim_blocks, lstrip_blocks, the loopcontrols extension, transformers' own tojson,
// raise_exception, strftime_now and the {% generation %} tag.
//
//   NFP_ASSIGN_OR_RETURN(ChatTemplate chat, ChatTemplate::parse(source, "chat_template of model.gguf"));
//   ChatTemplateInput input;
//   input.messages = {{{"role", "user"}, {"content", "Hi"}}};
//   input.add_generation_prompt = true;
//   NFP_ASSIGN_OR_RETURN(std::string prompt, chat.render(input));
//
// What jinja2 has and no chat template uses (inheritance, cyclers, and rarer
// filters, tests and methods) is refused with an error that names it, where it is parsed or where it
// runs.
//
// A template is a program from outside: it may loop, recurse and print without end. Every render runs under
// ChatTemplateLimits and ends with an error when it passes one of them.
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace nfp {

// What one render may use.
struct ChatTemplateLimits {
  uint64_t max_output_bytes = 16u << 20;   // the rendered prompt
  uint64_t max_memory_bytes = 512u << 20;  // all that one render makes, temporaries included
  uint64_t max_steps = 10'000'000;         // nodes evaluated, items visited, and one for every 64 bytes handled
  int max_depth = 1'000;                   // nested evaluations; a macro that calls itself uses about four per call
  std::stop_token stop = {};               // ends the render early
};

// What transformers passes to a template. Strings must be UTF-8.
struct ChatTemplateInput {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();  // [{"role": ..., "content": ...}, ...]
  nlohmann::ordered_json tools = nullptr;  // null (Python's None) or an array of JSON schemas
  bool add_generation_prompt = false;
  std::optional<std::string> bos_token;  // nullopt: the tokenizer has none, the name is undefined
  std::optional<std::string> eos_token;
  std::vector<std::pair<std::string, std::string>> named_tokens;  // further ones that the tokenizer has ("pad_token")
  std::vector<std::string> additional_special_tokens;             // empty: the name is undefined
  // An object of further variables (enable_thinking, date_string, documents ...); they win over the above.
  nlohmann::ordered_json extra = nlohmann::ordered_json::object();
  std::optional<std::chrono::system_clock::time_point>
      now;  // what strftime_now shows in local time; nullopt: the clock
  ChatTemplateLimits limits;
};

namespace jinja {
struct Template;
}

// Immutable after parse; any number of threads may render one at the same time.
class ChatTemplate {
 public:
  // `name` appears in every error ("chat template 'NAME' line 3: ..."). Error: kInvalidInput for a syntax error.
  static Result<ChatTemplate> parse(const std::string& source, std::string name);

  // Error kInvalidInput: the template refused the conversation (raise_exception), failed on it, or the input is not
  // UTF-8; kResource: a limit was passed. A failed render returns no text at all.
  Result<std::string> render(const ChatTemplateInput& input) const;

  // Whether the template reads a variable of this name at all (for example
  // "tools" or "enable_thinking"): a server uses it to refuse what a model cannot do.
  bool mentions(std::string_view variable) const;

 private:
  explicit ChatTemplate(std::shared_ptr<const jinja::Template> program) : program_(std::move(program)) {}
  std::shared_ptr<const jinja::Template> program_;
};

// The template text of tokenizer_config.json's field `chat_template`: a string, or a list of {"name", "template"} from
// which transformers takes "tool_use" when there are tools and such a template, else "default". A nonempty `name`
// chooses by name. Errors: kNotFound (no such name, no default), kInvalidInput (another shape).
Result<std::string> pick_chat_template(const nlohmann::ordered_json& chat_template, bool has_tools,
                                       std::string_view name = {});

}  // namespace nfp
