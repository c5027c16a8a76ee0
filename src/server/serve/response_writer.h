// Writes OpenAI's answers to /v1/completions and /v1/chat/completions. Chunks of a stream are put together without a
// JSON tree, as there may be tens of thousands of them a second.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "server/serve/answer_writer.h"

namespace nfp::server {

class ResponseWriter final : public AnswerWriter {
 public:
  ResponseWriter(const GenerationRequest* request, const ServedModel* model, std::string id, int64_t created);

  void begin(std::string& out, Choice& choice) override;
  void events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) override;
  void end(std::string& out, std::span<const Choice> choices) override;
  void failure(std::string& out, const ApiError& error) override;
  std::string whole(std::span<const Choice* const> choices, std::span<const Choice> all) override;
  http::Response refusal(const ApiError& error) const override { return error_response(error); }

 private:
  void chunk_head(std::string& out, int index) const;          // up to the inside of the choice
  void chunk_end(std::string& out, const Usage& usage) const;  // behind the choices
  void text_chunk(std::string& out, const Choice& choice, std::string_view text, bool final, Choice* takes) const;
  void reasoning_chunk(std::string& out, const Choice& choice, std::string_view text) const;
  void tool_chunk(std::string& out, const Choice& choice, const ToolEvent& event, const std::string& call_id) const;
  void usage_chunk(std::string& out, std::span<const Choice> choices) const;
  std::string_view finish_name(const Choice& choice) const;
  void append_logprobs(std::string& out, const LogprobLists& lists) const;
  void append_prompt_logprobs(std::string& out, const Choice& choice) const;
  void append_usage(std::string& out, std::span<const Choice> choices) const;
  void append_chat_message(std::string& out, const Choice& choice) const;

  std::string chunk_start_;
};

}  // namespace nfp::server
