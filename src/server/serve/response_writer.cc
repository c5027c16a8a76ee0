#include "server/serve/response_writer.h"

#include <utility>

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

// By both names that clients look for: llama.cpp's and SGLang's, and vLLM's.
void append_thoughts(std::string& out, std::string_view text) {
  out += "\"reasoning_content\":";
  append_string(out, text);
  out += ",\"reasoning\":";
  append_string(out, text);
}

void append_ids(std::string& out, std::span<const int32_t> ids) {
  out += '[';
  for (size_t i = 0; i < ids.size(); ++i) fmt::format_to(std::back_inserter(out), "{}{}", i > 0 ? "," : "", ids[i]);
  out += ']';
}

}  // namespace

ResponseWriter::ResponseWriter(const GenerationRequest* request, const ServedModel* model, std::string id,
                               int64_t created)
    : AnswerWriter(request, model, std::move(id), created) {
  chunk_start_ = "data: {\"id\":\"" + id_ + "\",\"object\":\"" +
                 (request->chat ? "chat.completion.chunk" : "text_completion") +
                 fmt::format("\",\"created\":{},\"model\":", created_);
  append_string(chunk_start_, model->name());
  chunk_start_ += ",\"choices\":[";
}

void ResponseWriter::append_logprobs(std::string& out, const LogprobLists& lists) const {
  if (request_->chat) {
    out += "{\"content\":[" + lists.content + "],\"refusal\":null}";
  } else {
    out += "{\"tokens\":[" + lists.tokens + "],\"token_logprobs\":[" + lists.logprobs + "],\"top_logprobs\":[" +
           lists.tops + "],\"text_offset\":[" + lists.offsets + "]}";
  }
}

std::string_view ResponseWriter::finish_name(const Choice& choice) const {
  if (!choice.finish) return "";
  const bool calls = *choice.finish == FinishReason::kStop && !choice.calls.empty() && !has_cut_call(choice);
  return calls ? "tool_calls" : name_of(*choice.finish);
}

void ResponseWriter::append_usage(std::string& out, std::span<const Choice> choices) const {
  const Usage all = sum(choices);
  fmt::format_to(std::back_inserter(out),
                 "{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{},"
                 "\"prompt_tokens_details\":{{\"cached_tokens\":{}}},\"nestedfp\":",
                 all.prompt_tokens, all.prompt_tokens + all.completion_tokens, all.completion_tokens,
                 all.cached_tokens);
  append_precision(out, all);
  out += '}';
}

void ResponseWriter::chunk_head(std::string& out, int index) const {
  out += chunk_start_;
  fmt::format_to(std::back_inserter(out), "{{\"index\":{},", index);
}

void ResponseWriter::begin(std::string& out, Choice& choice) {
  if (!request_->chat) return;
  chunk_head(out, choice.index);
  out += "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]";
  if (request_->return_token_ids) {
    out += ",\"prompt_token_ids\":";
    append_ids(out, choice.prompt_ids);
  }
  Usage before = choice.usage;  // the first token is that of the next chunk
  before.completion_tokens = 0;
  chunk_end(out, before);
}

void ResponseWriter::events(std::string& out, Choice& choice, std::span<const ToolEvent> events, bool final) {
  std::string text;
  if (!choice.prompt_text.empty()) text = std::exchange(choice.prompt_text, {});  // echo
  for (const ToolEvent& event : events) {
    if (event.kind == ToolEvent::Kind::kText) {
      text += event.text;
      continue;
    }
    if (!text.empty()) text_chunk(out, choice, text, false, nullptr);
    text.clear();
    if (event.kind == ToolEvent::Kind::kReasoning) {
      reasoning_chunk(out, choice, event.text);
    } else {
      tool_chunk(out, choice, event, choice.calls[static_cast<size_t>(event.call)].id);
    }
  }
  if (!final && text.empty() && choice.logprobs.empty() && choice.ids.empty()) return;
  text_chunk(out, choice, text, final, &choice);
  choice.logprobs.clear();
  choice.ids.clear();
}

void ResponseWriter::end(std::string& out, std::span<const Choice> choices) {
  if (request_->include_usage) usage_chunk(out, choices);
  out += "data: [DONE]\n\n";
}

void ResponseWriter::failure(std::string& out, const ApiError& error) {
  out += "data: " + error_json(error) + "\n\ndata: [DONE]\n\n";
}

// `takes`: the choice whose log-probabilities and token ids go with this chunk; null = none do.
void ResponseWriter::text_chunk(std::string& out, const Choice& choice, std::string_view text, bool final,
                                Choice* takes) const {
  chunk_head(out, choice.index);
  if (request_->chat) {
    out += "\"delta\":{";
    if (!text.empty()) {
      out += "\"content\":";
      append_string(out, text);
    }
    out += "},\"logprobs\":";
  } else {
    out += "\"text\":";
    append_string(out, text);
    out += ",\"logprobs\":";
  }
  if (takes != nullptr && !takes->logprobs.empty()) {
    append_logprobs(out, takes->logprobs);
  } else {
    out += "null";
  }
  if (takes != nullptr && request_->return_token_ids) {
    out += ",\"token_ids\":";
    append_ids(out, takes->ids);
    if (!request_->chat && !takes->prompt_ids.empty()) {
      out += ",\"prompt_token_ids\":";
      append_ids(out, std::exchange(takes->prompt_ids, {}));
    }
  }
  if (final) {
    out += ",\"finish_reason\":\"";
    out += finish_name(choice);
    out += "\",\"stop_reason\":" + choice.stop_reason + "}],\"nestedfp\":";
    append_precision(out, choice.usage);
  } else {
    out += ",\"finish_reason\":null}]";
  }
  chunk_end(out, choice.usage);
}

void ResponseWriter::chunk_end(std::string& out, const Usage& usage) const {
  if (request_->continuous_usage) {
    fmt::format_to(std::back_inserter(out),
                   ",\"usage\":{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{}}}",
                   usage.prompt_tokens, usage.prompt_tokens + usage.completion_tokens, usage.completion_tokens);
  }
  out += "}\n\n";
}

void ResponseWriter::reasoning_chunk(std::string& out, const Choice& choice, std::string_view text) const {
  chunk_head(out, choice.index);
  out += "\"delta\":{";
  append_thoughts(out, text);
  out += "},\"logprobs\":null,\"finish_reason\":null}]";
  chunk_end(out, choice.usage);
}

void ResponseWriter::tool_chunk(std::string& out, const Choice& choice, const ToolEvent& event,
                                const std::string& call_id) const {
  chunk_head(out, choice.index);
  fmt::format_to(std::back_inserter(out), "\"delta\":{{\"tool_calls\":[{{\"index\":{},", event.call);
  if (event.kind == ToolEvent::Kind::kCall) {
    out += "\"id\":";
    append_string(out, call_id);
    out += ",\"type\":\"function\",\"function\":{\"name\":";
    append_string(out, event.text);
    out += ",\"arguments\":\"\"}";
  } else {
    out += "\"function\":{\"arguments\":";
    append_string(out, event.text);
    out += '}';
  }
  out += "}]},\"logprobs\":null,\"finish_reason\":null}]";
  chunk_end(out, choice.usage);
}

void ResponseWriter::usage_chunk(std::string& out, std::span<const Choice> choices) const {
  out += chunk_start_;
  out += "],\"usage\":";
  append_usage(out, choices);
  out += "}\n\n";
}

void ResponseWriter::append_chat_message(std::string& out, const Choice& choice) const {
  const std::string text = choice.prompt_text + join(choice, ToolEvent::Kind::kText);
  const std::string reasoning = join(choice, ToolEvent::Kind::kReasoning);
  out += "{\"role\":\"assistant\",\"content\":";
  if (text.empty() && !choice.calls.empty()) {
    out += "null";
  } else {
    append_string(out, text);
  }
  out += ",\"refusal\":null";
  if (!reasoning.empty()) {
    out += ',';
    append_thoughts(out, reasoning);
  }
  if (!choice.calls.empty()) {
    out += ",\"tool_calls\":[";
    for (size_t i = 0; i < choice.calls.size(); ++i) {
      const ToolCall& call = choice.calls[i];
      out += i > 0 ? ",{\"id\":" : "{\"id\":";
      append_string(out, call.id);
      out += ",\"type\":\"function\",\"function\":{\"name\":";
      append_string(out, call.name);
      out += ",\"arguments\":";
      append_string(out, call.arguments);
      out += "}}";
    }
    out += ']';
  }
  out += '}';
}

// vLLM's form: a list with, for each prompt token, a map from token ids to their log-probability and rank.
void ResponseWriter::append_prompt_logprobs(std::string& out, const Choice& choice) const {
  const auto entry = [&](int32_t token, double logprob, int64_t rank) {
    fmt::format_to(std::back_inserter(out), "\"{}\":{{\"logprob\":", token);
    append_logprob(out, logprob);
    fmt::format_to(std::back_inserter(out), ",\"rank\":{},\"decoded_token\":", rank);
    append_string(out, token_text(token));
    out += '}';
  };
  out += '[';
  for (size_t i = 0; i < choice.prompt_logprobs.size(); ++i) {
    const OutputToken& token = choice.prompt_logprobs[i];
    if (i == 0) {
      out += "null";
      continue;
    }
    out += ",{";
    entry(token.token, token.logprob, token.rank);
    for (size_t t = 0; t < token.top.size() && t < static_cast<size_t>(*request_->prompt_logprobs); ++t) {
      if (token.top[t].token == token.token) continue;
      out += ',';
      entry(token.top[t].token, token.top[t].logprob, static_cast<int64_t>(t) + 1);
    }
    out += '}';
  }
  out += ']';
}

std::string ResponseWriter::whole(std::span<const Choice* const> choices, std::span<const Choice> all) {
  std::string out = "{\"id\":\"" + id_ + "\",\"object\":\"" + (request_->chat ? "chat.completion" : "text_completion") +
                    fmt::format("\",\"created\":{},\"model\":", created_);
  append_string(out, model_->name());
  out += ",\"choices\":[";
  for (size_t i = 0; i < choices.size(); ++i) {
    const Choice& choice = *choices[i];
    fmt::format_to(std::back_inserter(out), "{}{{\"index\":{},", i > 0 ? "," : "", choice.index);
    if (request_->chat) {
      out += "\"message\":";
      append_chat_message(out, choice);
    } else {
      out += "\"text\":";
      append_string(out, choice.prompt_text + join(choice, ToolEvent::Kind::kText));
    }
    out += ",\"logprobs\":";
    if (request_->wants_logprobs) {
      append_logprobs(out, choice.logprobs);
    } else {
      out += "null";
    }
    out += ",\"finish_reason\":\"";
    out += finish_name(choice);
    out += "\",\"stop_reason\":" + choice.stop_reason;
    if (request_->return_token_ids) {
      out += ",\"token_ids\":";
      append_ids(out, choice.ids);
      if (!request_->chat) {
        out += ",\"prompt_token_ids\":";
        append_ids(out, choice.prompt_ids);
      }
    }
    if (!request_->chat && request_->prompt_logprobs) {
      out += ",\"prompt_logprobs\":";
      append_prompt_logprobs(out, choice);
    }
    out += '}';
  }
  out += "],\"usage\":";
  append_usage(out, all);
  if (request_->chat && request_->prompt_logprobs) {
    out += ",\"prompt_logprobs\":";
    append_prompt_logprobs(out, *choices.front());
  }
  if (request_->chat && request_->return_token_ids) {
    out += ",\"prompt_token_ids\":";
    append_ids(out, choices.front()->prompt_ids);
  }
  out += '}';
  return out;
}

}  // namespace nfp::server
