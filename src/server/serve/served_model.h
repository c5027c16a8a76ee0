// What the server knows of its model: names, tokenizer, chat template, and what its engine allows.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/engine.h"
#include "runtime/sampling_defaults.h"
#include "server/api/generation_request.h"
#include "text/jinja/chat_template.h"
#include "text/tokenizer.h"

namespace nfp::server {

class ServedModel {
 public:
  struct Facts {
    std::vector<std::string> names;  // as clients may call it; the first is told to them. At least one
    std::string root;                // the path it was loaded from
    std::shared_ptr<const Tokenizer> tokenizer;
    std::string chat_template;       // source text; empty = none
    std::string chat_template_json;  // or a list of named templates
    std::string chat_template_file;  // where chat_template is from; empty = the model's own
    SamplingDefaults sampling;       // for requests that do not say
    bool has_head = true;            // false: embeddings are all that it gives
  };
  // `engine` says what requests may ask for. Error: the chat template does not parse.
  static Result<ServedModel> create(Facts facts, const Engine& engine);

  const std::string& name() const { return facts_.names.front(); }
  const Facts& facts() const { return facts_; }
  const RequestBounds& bounds() const { return bounds_; }
  const std::vector<int32_t>& end_ids() const { return bounds_.end_ids; }  // tokens that end an answer
  const Tokenizer& tokenizer() const { return *facts_.tokenizer; }
  bool has_chat() const { return chat_.has_value(); }
  bool knows(std::string_view model) const;
  int64_t created() const { return created_; }  // seconds since 1970

  // The conversation as the model's template writes it; null `tools` = none. Errors: no template, or its own complaint.
  Result<std::string> render_chat(const GenerationRequest& request, bool with_tools, std::stop_token stop = {}) const;
  // Adds to its ignored fields those that act through variables of which the chat template reads none.
  void tell_unread(GenerationRequest* request) const;
  // kInvalidInput: so long that no tokens of this model could fit it into the context; it is not tokenized then.
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_special, std::stop_token stop = {}) const;
  // The same, never empty: a tokenizer without BOS makes nothing of nothing, and the model then starts from its
  // end-of-text token.
  Result<std::vector<int32_t>> encode_prompt(std::string_view text, bool add_special, std::stop_token stop = {}) const;

 private:
  ServedModel() = default;
  Facts facts_;
  RequestBounds bounds_;
  size_t longest_token_ = 1;  // bytes
  std::optional<ChatTemplate> chat_;
  std::optional<ChatTemplate> chat_tools_;  // where the model has another one for tools
  int64_t created_ = 0;
};

// truncate_prompt_tokens: the last so many tokens of each prompt, or the first (truncation_side right); -1 = as many as
// the answer leaves room for.
MaybeError truncate_prompts(const GenerationRequest& request, int32_t context,
                            std::vector<std::vector<int32_t>>* prompts);

// --chat-template: a file with a template (or a pipe, which is read once), the name of one of the model's own, or
// "chatml". Empty: as it is.
Status choose_chat_template(const std::string& name, ServedModel::Facts& facts);
// Whether it can be followed: what ServedModel::create() would say later.
Status check_chat_template(const ServedModel::Facts& facts);

}  // namespace nfp::server
