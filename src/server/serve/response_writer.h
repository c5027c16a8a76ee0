// Writes OpenAI's response objects: the text that goes to the client. Chunks of a stream are put together without a
// JSON tree, as there may be tens of thousands of them a second.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/api/generation_request.h"
#include "server/serve/served_model.h"
#include "server/tools/tool_call_parser.h"

namespace nfp::server {

// Log-probabilities as parallel lists of JSON (completions) or a list of objects (chat), grown token by token.
struct LogprobLists {
  std::string tokens, logprobs, tops, offsets;  // completions
  std::string content;                          // chat
  int64_t offset = 0;                           // code points so far
  bool empty() const { return tokens.empty() && content.empty(); }
  void clear();  // but for `offset`
};

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;
};

// One answer: what has come of it.
struct Choice {
  size_t prompt = 0;  // index of the prompt
  int sample = 0;     // which of its answers
  int index = 0;      // as told to the client
  std::string engine_id;
  std::string text;
  std::string prompt_text;  // with echo
  std::vector<OutputToken> prompt_logprobs;
  LogprobLists logprobs;
  std::unique_ptr<ToolCallParser> parser;
  std::vector<ToolCall> calls;
  std::optional<FinishReason> finish;
  std::string stop_reason;  // JSON: null, a number, a string
  Usage usage;
  double score = 0;  // sum of log-probabilities
  bool started = false;
};

class ResponseWriter {
 public:
  ResponseWriter(const GenerationRequest* request, const ServedModel* model, std::string id, int64_t created);

  // Adds tokens to the lists. `first_has_none`: the first token has no log-probability (start of a prompt).
  void add_logprobs(std::span<const OutputToken> tokens, bool first_has_none, LogprobLists* lists) const;

  // Server-sent events, each with its end.
  void chunk_head(std::string& out, int index) const;  // up to the inside of the choice
  void text_chunk(std::string& out, const Choice& choice, std::string_view text, const LogprobLists* logprobs,
                  bool final, const Usage* usage) const;
  void role_chunk(std::string& out, const Choice& choice) const;
  void tool_chunk(std::string& out, const Choice& choice, const ToolEvent& event) const;
  void usage_chunk(std::string& out, std::span<const Choice> choices) const;

  // The whole response. `choices` are those to be shown; `all` also those that best_of dropped.
  std::string whole(std::span<const Choice* const> choices, std::span<const Choice> all) const;

  std::string_view finish_name(const Choice& choice) const;
  const std::string& id() const { return id_; }

 private:
  void append_logprobs(std::string& out, const LogprobLists& lists) const;
  void append_prompt_logprobs(std::string& out, const Choice& choice) const;
  void append_usage(std::string& out, std::span<const Choice> choices) const;
  void append_precision(std::string& out, const Usage& usage) const;
  void append_chat_message(std::string& out, const Choice& choice) const;
  std::string token_text(int32_t token) const;

  const GenerationRequest* request_;
  const ServedModel* model_;
  std::string id_;
  int64_t created_;
  std::string chunk_start_;
};

}  // namespace nfp::server
