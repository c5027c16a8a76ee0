// Answers of Anthropic's Messages API: blocks of content (thinking, text, use of tools), and in a stream the events
// that build them.
#pragma once

#include <string>
#include <string_view>

#include "server/serve/answer_writer.h"

namespace nfp::server {

class MessagesWriter final : public AnswerWriter {
 public:
  using AnswerWriter::AnswerWriter;

  void begin(std::string& out, Choice& choice) override;
  void events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) override;
  void end(std::string& out, std::span<const Choice> choices) override;
  void failure(std::string& out, const ApiError& error) override;
  std::string whole(std::span<const Choice* const> choices, std::span<const Choice> all) override;
  http::Response refusal(const ApiError& error) const override;

 private:
  enum class Block { kNone, kThinking, kText, kTool };
  void open(std::string& out, Block kind, const ToolCall* call);
  void close(std::string& out);
  void delta(std::string& out, std::string_view type, std::string_view field, std::string_view text) const;
  void append_head(std::string& out) const;  // a message up to its content
  void append_end(std::string& out, const Choice& choice) const;
  void append_counts(std::string& out, const Usage& usage) const;  // of usage, which stays open
  void append_usage(std::string& out, const Usage& usage) const;

  Block block_ = Block::kNone;
  int index_ = -1;
};

// The error as Anthropic's clients expect it: {"type": "error", "error": {"type", "message"}}.
std::string anthropic_error_json(const ApiError& error);
http::Response anthropic_error_response(const ApiError& error);

}  // namespace nfp::server
