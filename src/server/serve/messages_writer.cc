#include "server/serve/messages_writer.h"

#include "server/api/dialects.h"
#include "server/api/json_text.h"

namespace nfp::server {
namespace {

std::string_view anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 500:
      return "api_error";
    case 503:
      return "overloaded_error";
    default:
      return "invalid_request_error";
  }
}

void start_event(std::string& out, std::string_view type) {
  fmt::format_to(std::back_inserter(out), "event: {}\ndata: {{\"type\":\"{}\"", type, type);
}

}  // namespace

std::string anthropic_error_json(const ApiError& error) {
  std::string out = "{\"type\":\"error\",\"error\":{\"type\":";
  append_string(out, anthropic_type(error.status));
  out += ",\"message\":";
  append_string(out, std::string_view(error.message).substr(0, kMaxErrorMessage));
  if (error.code == kThreadUnsupported) {
    fmt::format_to(std::back_inserter(out), R"(,"details":{{"error_code":"{}","unsupported":["{}"]}})",
                   kThreadUnsupported, error.param);
  }
  return out + "}}";
}

http::Response anthropic_error_response(const ApiError& error) {
  http::Response response = error_response(error);  // status and headers
  response.body = anthropic_error_json(error);
  return response;
}

http::Response MessagesWriter::refusal(const ApiError& error) const { return anthropic_error_response(error); }

void MessagesWriter::append_head(std::string& out) const {
  out += "{\"id\":\"" + id_ + "\",\"type\":\"message\",\"role\":\"assistant\",\"model\":";
  append_string(out, model_->name());
  out += ",\"content\":[";
}

// Tokens that the cache had are not input tokens here.
void MessagesWriter::append_counts(std::string& out, const Usage& usage) const {
  fmt::format_to(std::back_inserter(out),
                 "\"usage\":{{\"input_tokens\":{},\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":{},"
                 "\"output_tokens\":{}",
                 usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, usage.completion_tokens);
}

void MessagesWriter::append_usage(std::string& out, const Usage& usage) const {
  append_counts(out, usage);
  out += ",\"nestedfp\":";
  append_precision(out, usage);
  out += '}';
}

void MessagesWriter::append_end(std::string& out, const Choice& choice) const {
  const bool by_text = choice.stop_reason.starts_with('"');
  std::string_view reason = "end_turn";
  if (choice.finish == FinishReason::kLength) {
    reason = "max_tokens";
  } else if (!choice.calls.empty() && !has_cut_call(choice)) {
    reason = "tool_use";
  } else if (by_text) {
    reason = "stop_sequence";
  }
  fmt::format_to(std::back_inserter(out), "\"stop_reason\":\"{}\",\"stop_sequence\":{}", reason,
                 reason == "stop_sequence" ? choice.stop_reason : "null");
}

void MessagesWriter::begin(std::string& out, Choice& choice) {
  start_event(out, "message_start");
  out += ",\"message\":";
  append_head(out);
  out += "],\"stop_reason\":null,\"stop_sequence\":null,";
  append_counts(out, choice.usage);  // Anthropic's package would keep anything else as it is here to the end
  out += "}}}\n\n";
}

void MessagesWriter::open(std::string& out, Block kind, const ToolCall* call) {
  if (block_ == kind && call == nullptr) return;
  close(out);
  block_ = kind;
  ++index_;
  start_event(out, "content_block_start");
  fmt::format_to(std::back_inserter(out), ",\"index\":{},\"content_block\":", index_);
  if (call != nullptr) {
    out += "{\"type\":\"tool_use\",\"id\":";
    append_string(out, call->id);
    out += ",\"name\":";
    append_string(out, call->name);
    out += ",\"input\":{}}";
  } else {
    out +=
        kind == Block::kText ? R"({"type":"text","text":""})" : R"({"type":"thinking","thinking":"","signature":""})";
  }
  out += "}\n\n";
}

void MessagesWriter::close(std::string& out) {
  if (block_ == Block::kNone) return;
  block_ = Block::kNone;
  start_event(out, "content_block_stop");
  fmt::format_to(std::back_inserter(out), ",\"index\":{}}}\n\n", index_);
}

void MessagesWriter::delta(std::string& out, std::string_view type, std::string_view field,
                           std::string_view text) const {
  start_event(out, "content_block_delta");
  fmt::format_to(std::back_inserter(out), ",\"index\":{},\"delta\":{{\"type\":\"{}\",\"{}\":", index_, type, field);
  append_string(out, text);
  out += "}}\n\n";
}

void MessagesWriter::events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) {
  for (const ToolEvent& event : events) {
    switch (event.kind) {
      case ToolEvent::Kind::kText:
        if (event.text.empty()) break;
        open(out, Block::kText, nullptr);
        delta(out, "text_delta", "text", event.text);
        break;
      case ToolEvent::Kind::kReasoning:
        open(out, Block::kThinking, nullptr);
        delta(out, "thinking_delta", "thinking", event.text);
        break;
      case ToolEvent::Kind::kCall:
        open(out, Block::kTool, &choice.calls[static_cast<size_t>(event.call)]);
        break;
      case ToolEvent::Kind::kArguments:
        delta(out, "input_json_delta", "partial_json", event.text);
        break;
    }
  }
  if (!final) return;
  if (index_ < 0) open(out, Block::kText, nullptr);
  close(out);
}

void MessagesWriter::end(std::string& out, std::span<const Choice> choices) {
  start_event(out, "message_delta");
  out += ",\"delta\":{";
  append_end(out, choices.front());
  out += "},";
  append_usage(out, sum(choices));
  out += "}\n\n";
  start_event(out, "message_stop");
  out += "}\n\n";
}

void MessagesWriter::failure(std::string& out, const ApiError& error) {
  out += "event: error\ndata: " + anthropic_error_json(error) + "\n\n";
}

std::string MessagesWriter::whole(std::span<const Choice* const> choices, std::span<const Choice> all) {
  const Choice& choice = *choices.front();
  std::string out;
  append_head(out);
  for (const AnswerPart& part : choice.parts) {
    if (out.back() != '[') out += ',';
    if (part.kind == ToolEvent::Kind::kCall) {
      const ToolCall& call = choice.calls[part.call];
      out += R"({"type":"tool_use","id":)";
      append_string(out, call.id);
      out += ",\"name\":";
      append_string(out, call.name);
      out += ",\"input\":" + object_so_far(call.arguments) + '}';
      continue;
    }
    out += part.kind == ToolEvent::Kind::kText ? R"({"type":"text","text":)"
                                               : R"({"type":"thinking","signature":"","thinking":)";
    append_string(out, part.text);
    out += '}';
  }
  if (choice.parts.empty()) out += R"({"type":"text","text":""})";
  out += "],";
  append_end(out, choice);
  out += ',';
  append_usage(out, sum(all));
  return out + '}';
}

}  // namespace nfp::server
