#include "server/serve/served_model.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "base/mapped_file.h"
#include "runtime/chat_session.h"
#include "runtime/tool_fallback.h"

namespace nfp::server {
namespace {

// Where a message is to be continued, its content gets this at its end, and the prompt ends where it stands in the
// rendered text, as transformers does it. Its last space tells whether the template trims contents.
constexpr std::string_view kMark = "CONTINUE_FINAL_MESSAGE_TAG ";

// False where the mark is not in the text.
bool end_at_mark(std::string* text) {
  const size_t place = text->rfind(kMark.substr(0, kMark.size() - 1));
  if (place == std::string::npos) return false;
  const bool trims = !std::string_view(*text).substr(place).starts_with(kMark);
  text->resize(place);
  if (trims) text->resize(text->find_last_not_of(" \t\r\n") + 1);
  return true;
}

// Thoughts by the name that gpt-oss' template has for them too; that takes none beside the words before a call.
void name_thoughts(Json& messages) {
  for (Json& message : messages) {
    const auto thoughts = message.find("reasoning_content");
    if (thoughts == message.end() || (message.contains("tool_calls") && message["content"] != Json(""))) continue;
    message["thinking"] = Json(*thoughts);
  }
}

struct Templates {
  std::optional<ChatTemplate> plain, tools;
};

Result<Templates> parse_templates(const ServedModel::Facts& facts) {
  const std::string name =
      facts.chat_template_file.empty() ? "chat_template of " + facts.root : facts.chat_template_file;
  Templates parsed;
  if (!facts.chat_template.empty()) {
    NFP_ASSIGN_OR_RETURN(parsed.plain, ChatTemplate::parse(facts.chat_template, name));
  } else if (!facts.chat_template_json.empty()) {
    NFP_ASSIGN_OR_RETURN(const Json list, parse_json(facts.chat_template_json));
    NFP_ASSIGN_OR_RETURN(const std::string plain, pick_chat_template(list, /*has_tools=*/false));
    NFP_ASSIGN_OR_RETURN(const std::string tools, pick_chat_template(list, /*has_tools=*/true));
    NFP_ASSIGN_OR_RETURN(parsed.plain, ChatTemplate::parse(plain, name));
    NFP_ASSIGN_OR_RETURN(parsed.tools, ChatTemplate::parse(tools, name));
  }
  return parsed;
}

}  // namespace

Result<ServedModel> ServedModel::create(Facts facts, const Engine& engine) {
  ServedModel model;
  model.facts_ = std::move(facts);
  model.bounds_ = engine.bounds();
  const Facts& f = model.facts_;
  model.created_ =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  for (int32_t id = 0; id < f.tokenizer->vocab_size(); ++id) {
    const std::string_view text = f.tokenizer->id_to_token(id).value_or(std::string_view());
    model.longest_token_ = std::max({model.longest_token_, text.size(), f.tokenizer->token_bytes(id).size()});
  }
  NFP_ASSIGN_OR_RETURN(Templates templates, parse_templates(f));
  model.chat_ = std::move(templates.plain);
  model.chat_tools_ = std::move(templates.tools);
  return model;
}

Status choose_chat_template(const std::string& name, ServedModel::Facts& facts) {
  if (name.empty()) return ok_status();
  std::error_code ignored;
  const auto kind = std::filesystem::status(name, ignored).type();
  using Kind = std::filesystem::file_type;
  if (kind == Kind::regular || kind == Kind::fifo || kind == Kind::character) {
    NFP_ASSIGN_OR_RETURN(facts.chat_template, read_text_file(name));
    facts.chat_template_file = name;
    facts.chat_template_json.clear();
    return ok_status();
  }
  if (!facts.chat_template_json.empty()) {
    NFP_ASSIGN_OR_RETURN(const Json list, parse_json(facts.chat_template_json));
    auto named = pick_chat_template(list, /*has_tools=*/false, name);
    if (named.ok()) {
      facts.chat_template = std::move(*named);
      facts.chat_template_json.clear();
      return ok_status();
    }
  }
  if (name == "chatml") {
    facts.chat_template =
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' "
        "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    facts.chat_template_json.clear();
    return ok_status();
  }
  return error(ErrorCode::kUsage, "--chat-template {}: is no file, none of the model's named templates, and not chatml",
               name);
}

Status check_chat_template(const ServedModel::Facts& facts) {
  NFP_RETURN_IF_ERROR(parse_templates(facts));
  return ok_status();
}

bool ServedModel::knows(std::string_view model) const {
  return std::find(facts_.names.begin(), facts_.names.end(), model) != facts_.names.end();
}

Result<std::string> ServedModel::render_chat(const GenerationRequest& request, bool with_tools,
                                             std::stop_token stop) const {
  if (!chat_) {
    return error(ErrorCode::kUnsupported,
                 "the model '{}' has no chat template, so it only completes text: use /v1/completions", name());
  }
  with_tools = with_tools && request.tools.is_array();
  const ChatTemplate& chat = with_tools && chat_tools_ ? *chat_tools_ : *chat_;
  ChatTemplateInput input;
  input.messages = request.messages;
  name_thoughts(input.messages);
  if (request.continue_final_message) input.messages.back()["content"].get_ref<std::string&>() += kMark;
  if (with_tools) input.tools = request.tools;
  input.add_generation_prompt = request.add_generation_prompt;
  set_special_tokens(tokenizer(), &input);
  input.extra = request.template_variables;
  input.limits.max_output_bytes = 64u << 20;
  input.limits.stop = std::move(stop);
  NFP_ASSIGN_OR_RETURN(std::string text, render_with_tools(chat, std::move(input)));
  if (request.continue_final_message && !end_at_mark(&text)) {
    return error(ErrorCode::kInvalidInput,
                 "'continue_final_message': the chat template does not show the last message's content");
  }
  return text;
}

Result<std::vector<int32_t>> ServedModel::encode(std::string_view text, bool add_special, std::stop_token stop) const {
  // A normalizer may shorten a text; four times is more than any does to what is not made of spaces.
  const uint64_t most = 4 * uint64_t{longest_token_} * static_cast<uint64_t>(std::max(1, bounds_.max_context));
  if (text.size() > most) {
    return error(ErrorCode::kInvalidInput,
                 "This model's maximum context length is {} tokens. However, the prompt has {} bytes, which are more "
                 "tokens in any case. Please reduce its length.",
                 bounds_.max_context, text.size());
  }
  return tokenizer().encode(
      text, EncodeOptions{.add_special_tokens = add_special, .parse_special = true, .stop = std::move(stop)});
}

Result<std::vector<int32_t>> ServedModel::encode_prompt(std::string_view text, bool add_special,
                                                        std::stop_token stop) const {
  NFP_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, encode(text, add_special, std::move(stop)));
  if (!tokens.empty()) return tokens;
  const auto first = tokenizer().bos_id() ? tokenizer().bos_id() : tokenizer().eos_id();
  if (!first) return error(ErrorCode::kInvalidInput, "the text is empty, and this model has no token to start from");
  tokens.push_back(*first);
  return tokens;
}

void ServedModel::tell_unread(GenerationRequest* request) const {
  for (const auto& [field, variables] : request->template_fields) {
    const auto read = [this](const std::string& name) { return chat_ && chat_->mentions(name); };
    if (std::none_of(variables.begin(), variables.end(), read)) request->ignored.push_back(field);
  }
}

MaybeError truncate_prompts(const GenerationRequest& request, int32_t context,
                            std::vector<std::vector<int32_t>>* prompts) {
  if (!request.truncate_prompt) return std::nullopt;
  const int32_t most = *request.truncate_prompt;
  if (most > context) {
    return bad_request(
        "truncate_prompt_tokens",
        fmt::format("'truncate_prompt_tokens' is {}, and this model's context {} tokens", most, context));
  }
  const auto kept = static_cast<size_t>(most < 0 ? std::max(1, context - request.wanted_tokens()) : most);
  for (auto& prompt : *prompts) {
    if (prompt.size() <= kept) continue;
    if (request.keep_prompt_start) {
      prompt.resize(kept);
    } else {
      prompt.erase(prompt.begin(), prompt.end() - static_cast<std::ptrdiff_t>(kept));
    }
  }
  return std::nullopt;
}

}  // namespace nfp::server
