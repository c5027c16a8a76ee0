#include "runtime/chat_session.h"

#include <utility>

#include "base/json_depth.h"
#include "runtime/tool_fallback.h"

namespace nfp {

Result<ChatTemplate> load_chat_template(const LoadedModel& loaded, bool has_tools) {
  const std::string name = loaded.source->path();
  if (!loaded.chat_template.empty()) return ChatTemplate::parse(loaded.chat_template, name);
  if (!loaded.chat_template_json.empty()) {
    const auto list = parse_file_json<nlohmann::ordered_json>(loaded.chat_template_json);
    NFP_ASSIGN_OR_RETURN(const std::string source, pick_chat_template(list, has_tools));
    return ChatTemplate::parse(source, name);
  }
  return error(ErrorCode::kNotFound,
               "{}: this model has no chat template (it may not be a chat model); use `nestedfp generate` instead",
               name);
}

void set_special_tokens(const Tokenizer& tokenizer, ChatTemplateInput* input) {
  const auto token_text = [&](std::optional<int32_t> id) -> std::optional<std::string> {
    if (!id) return std::nullopt;
    const auto text = tokenizer.id_to_token(*id);
    return text ? std::optional<std::string>(*text) : std::nullopt;
  };
  input->bos_token = token_text(tokenizer.bos_id());
  input->eos_token = token_text(tokenizer.eos_id());
  input->named_tokens.assign(tokenizer.named_tokens().begin(), tokenizer.named_tokens().end());
  const auto additional = tokenizer.additional_special_tokens();
  input->additional_special_tokens.assign(additional.begin(), additional.end());
}

Result<std::vector<int32_t>> encode_chat(const LoadedModel& loaded, const ChatTemplate& chat_template,
                                         const nlohmann::ordered_json& messages, const nlohmann::ordered_json& tools,
                                         const nlohmann::ordered_json& extra) {
  const Tokenizer& tokenizer = *loaded.tokenizer;
  ChatTemplateInput input;
  input.messages = messages;
  input.tools = tools;
  input.extra = extra;
  input.add_generation_prompt = true;
  set_special_tokens(tokenizer, &input);
  NFP_ASSIGN_OR_RETURN(const std::string prompt, render_with_tools(chat_template, std::move(input)));
  return tokenizer.encode(prompt, {.add_special_tokens = false, .parse_special = true});
}

Result<ChatSession> ChatSession::create(LoadedModel& loaded, Engine& engine, std::string system) {
  NFP_ASSIGN_OR_RETURN(ChatTemplate chat_template, load_chat_template(loaded, false));
  return ChatSession(loaded, engine, std::move(chat_template), std::move(system));
}

ChatSession::ChatSession(LoadedModel& loaded, Engine& engine, ChatTemplate chat_template, std::string system)
    : loaded_(&loaded), engine_(&engine), template_(std::move(chat_template)), system_(std::move(system)) {
  reset();
}

void ChatSession::reset() {
  messages_ = nlohmann::ordered_json::array();
  if (!system_.empty()) messages_.push_back({{"role", "system"}, {"content", system_}});
}

Result<Generation> ChatSession::say(std::string message, const SamplingParams& sampling,
                                    const GenerationCallback& on_output, const std::atomic<bool>* stop) {
  messages_.push_back({{"role", "user"}, {"content", std::move(message)}});
  const auto answer = [&]() -> Result<Generation> {
    Request request;
    request.id = fmt::format("turn-{}", next_id_++);
    NFP_ASSIGN_OR_RETURN(request.prompt,
                         encode_chat(*loaded_, template_, messages_, nullptr, nlohmann::ordered_json::object()));
    request.sampling = sampling;
    return generate(*engine_, std::move(request), on_output, stop);
  };
  Result<Generation> result = answer();
  if (!result.ok()) {
    messages_.erase(messages_.size() - 1);
    return result;
  }
  messages_.push_back({{"role", "assistant"}, {"content", result->text}});
  return result;
}

}  // namespace nfp
