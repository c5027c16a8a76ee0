// A conversation: messages, the model's chat template around them, and one answer at a time. The engine's prefix cache
// makes a turn cost only its new tokens.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>

#include "base/result.h"
#include "runtime/generation.h"
#include "runtime/loaded_model.h"
#include "text/jinja/chat_template.h"

namespace nfp {

// The template of a model as transformers would choose it. kNotFound: it has none.
Result<ChatTemplate> load_chat_template(const LoadedModel& loaded, bool has_tools);

// The special tokens that a template may name.
void set_special_tokens(const Tokenizer& tokenizer, ChatTemplateInput* input);

// Token ids of a conversation. The template writes BOS itself, so none is added.
Result<std::vector<int32_t>> encode_chat(const LoadedModel& loaded, const ChatTemplate& chat_template,
                                         const nlohmann::ordered_json& messages, const nlohmann::ordered_json& tools,
                                         const nlohmann::ordered_json& extra);

class ChatSession {
 public:
  static Result<ChatSession> create(LoadedModel& loaded, Engine& engine, std::string system);

  // Adds the message, answers it and adds the answer. A cancelled answer is kept as far as it came; after an error the
  // message is taken back.
  Result<Generation> say(std::string message, const SamplingParams& sampling, const GenerationCallback& on_output,
                         const std::atomic<bool>* stop);
  // Forgets everything but the system message.
  void reset();

 private:
  ChatSession(LoadedModel& loaded, Engine& engine, ChatTemplate chat_template, std::string system);
  LoadedModel* loaded_;
  Engine* engine_;
  ChatTemplate template_;
  std::string system_;
  nlohmann::ordered_json messages_;
  uint64_t next_id_ = 0;
};

}  // namespace nfp
