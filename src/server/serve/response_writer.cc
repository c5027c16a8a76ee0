#include "server/serve/response_writer.h"

#include <algorithm>
#include <unordered_set>

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

int64_t code_points(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0u) != 0x80u; });
}

bool valid_utf8(std::string_view text) {
  std::string escaped;
  append_escaped(escaped, text);
  return escaped.find("\xEF\xBF\xBD") == std::string::npos || text.find("\xEF\xBF\xBD") != std::string_view::npos;
}

void separate(std::string& list) {
  if (!list.empty()) list += ',';
}

void append_logprob(std::string& out, double logprob) { append_number(out, std::max(logprob, -9999.0)); }

}  // namespace

void LogprobLists::clear() {
  for (std::string* list : {&tokens, &logprobs, &tops, &offsets, &content}) list->clear();
}

ResponseWriter::ResponseWriter(const GenerationRequest* request, const ServedModel* model, std::string id,
                               int64_t created)
    : request_(request), model_(model), id_(std::move(id)), created_(created) {
  chunk_start_ = "data: {\"id\":\"" + id_ + "\",\"object\":\"" +
                 (request->chat ? "chat.completion.chunk" : "text_completion") +
                 fmt::format("\",\"created\":{},\"model\":", created_);
  append_string(chunk_start_, model->name());
  chunk_start_ += ",\"choices\":[";
}

// A token as a person reads it; one that is not text by itself as OpenAI writes it: "bytes:\xe2\x82".
std::string ResponseWriter::token_text(int32_t token) const {
  const Tokenizer& tokenizer = model_->tokenizer();
  if (tokenizer.is_special(token)) return std::string(tokenizer.id_to_token(token).value_or(""));
  const std::string_view bytes = tokenizer.token_bytes(token);
  if (valid_utf8(bytes)) return std::string(bytes);
  std::string out = "bytes:";
  for (const char c : bytes) out += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
  return out;
}

void ResponseWriter::add_logprobs(std::span<const OutputToken> tokens, bool first_has_none, LogprobLists* lists) const {
  const auto chat_entry = [&](std::string& out, int32_t token, double logprob) {
    out += "{\"token\":";
    const std::string text = token_text(token);
    append_string(out, text);
    out += ",\"logprob\":";
    append_logprob(out, logprob);
    out += ",\"bytes\":[";
    const Tokenizer& tokenizer = model_->tokenizer();
    const std::string_view bytes = tokenizer.is_special(token) ? std::string_view(text) : tokenizer.token_bytes(token);
    for (size_t i = 0; i < bytes.size(); ++i) {
      fmt::format_to(std::back_inserter(out), "{}{}", i > 0 ? "," : "", static_cast<uint8_t>(bytes[i]));
    }
    out += ']';
  };
  for (size_t i = 0; i < tokens.size(); ++i) {
    const OutputToken& token = tokens[i];
    const bool none = first_has_none && i == 0;
    // The model may rank more alternatives than were asked for here (best_of and echo share one engine request).
    const size_t tops = std::min(token.top.size(), static_cast<size_t>(request_->top_logprobs));
    if (request_->chat) {
      separate(lists->content);
      chat_entry(lists->content, token.token, token.logprob);
      lists->content += ",\"top_logprobs\":[";
      for (size_t t = 0; t < tops; ++t) {
        if (t > 0) lists->content += ',';
        chat_entry(lists->content, token.top[t].token, token.top[t].logprob);
        lists->content += '}';
      }
      lists->content += "]}";
      continue;
    }
    const std::string text = token_text(token.token);
    separate(lists->tokens);
    append_string(lists->tokens, text);
    separate(lists->offsets);
    fmt::format_to(std::back_inserter(lists->offsets), "{}", lists->offset);
    lists->offset += code_points(model_->tokenizer().token_bytes(token.token));
    separate(lists->logprobs);
    separate(lists->tops);
    if (none) {
      lists->logprobs += "null";
      lists->tops += "null";
      continue;
    }
    append_logprob(lists->logprobs, token.logprob);
    // The chosen token is always in the map, also when it is not among the likeliest.
    lists->tops += '{';
    std::unordered_set<std::string> seen;
    const auto entry = [&](int32_t id, double logprob) {
      std::string key = token_text(id);
      if (!seen.insert(key).second) return;
      if (seen.size() > 1) lists->tops += ',';
      append_string(lists->tops, key);
      lists->tops += ':';
      append_logprob(lists->tops, logprob);
    };
    for (size_t t = 0; t < tops; ++t) entry(token.top[t].token, token.top[t].logprob);
    entry(token.token, token.logprob);
    lists->tops += '}';
  }
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
  switch (*choice.finish) {
    case FinishReason::kStop:
      return choice.calls.empty() ? "stop" : "tool_calls";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "";
}

void ResponseWriter::append_precision(std::string& out, const Usage& usage) const {
  fmt::format_to(std::back_inserter(out),
                 "{{\"prompt\":{{\"fp16_tokens\":{},\"fp8_tokens\":{}}},"
                 "\"completion\":{{\"fp16_tokens\":{},\"fp8_tokens\":{}}}",
                 usage.prompt.fp16, usage.prompt.fp8, usage.completion.fp16, usage.completion.fp8);
  if (usage.slo_met) out += *usage.slo_met ? ",\"slo_met\":true" : ",\"slo_met\":false";
  out += '}';
}

// A prompt counts once, however many answers it gets.
void ResponseWriter::append_usage(std::string& out, std::span<const Choice> choices) const {
  Usage sum;
  for (const Choice& choice : choices) {
    if (choice.sample == 0) {
      sum.prompt_tokens += choice.usage.prompt_tokens;
      sum.cached_tokens += choice.usage.cached_tokens;
      sum.prompt.fp16 += choice.usage.prompt.fp16;
      sum.prompt.fp8 += choice.usage.prompt.fp8;
    }
    if (request_->no_output) continue;
    if (choice.usage.slo_met) sum.slo_met = sum.slo_met.value_or(true) && *choice.usage.slo_met;
    sum.completion_tokens += choice.usage.completion_tokens;
    sum.completion.fp16 += choice.usage.completion.fp16;
    sum.completion.fp8 += choice.usage.completion.fp8;
  }
  fmt::format_to(std::back_inserter(out),
                 "{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{},"
                 "\"prompt_tokens_details\":{{\"cached_tokens\":{}}},\"nestedfp\":",
                 sum.prompt_tokens, sum.prompt_tokens + sum.completion_tokens, sum.completion_tokens,
                 sum.cached_tokens);
  append_precision(out, sum);
  out += '}';
}

void ResponseWriter::chunk_head(std::string& out, int index) const {
  out += chunk_start_;
  fmt::format_to(std::back_inserter(out), "{{\"index\":{},", index);
}

void ResponseWriter::role_chunk(std::string& out, const Choice& choice) const {
  chunk_head(out, choice.index);
  out += "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
}

void ResponseWriter::text_chunk(std::string& out, const Choice& choice, std::string_view text,
                                const LogprobLists* logprobs, bool final, const Usage* usage) const {
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
  if (logprobs != nullptr && !logprobs->empty()) {
    append_logprobs(out, *logprobs);
  } else {
    out += "null";
  }
  if (final) {
    out += ",\"finish_reason\":\"";
    out += finish_name(choice);
    out += "\",\"stop_reason\":" + choice.stop_reason + "}],\"nestedfp\":";
    append_precision(out, choice.usage);
  } else {
    out += ",\"finish_reason\":null}]";
  }
  if (usage != nullptr) {
    fmt::format_to(std::back_inserter(out),
                   ",\"usage\":{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{}}}",
                   usage->prompt_tokens, usage->prompt_tokens + usage->completion_tokens, usage->completion_tokens);
  }
  out += "}\n\n";
}

void ResponseWriter::tool_chunk(std::string& out, const Choice& choice, const ToolEvent& event) const {
  chunk_head(out, choice.index);
  fmt::format_to(std::back_inserter(out), "\"delta\":{{\"tool_calls\":[{{\"index\":{},", event.call);
  if (event.kind == ToolEvent::Kind::kCall) {
    out += "\"id\":";
    append_string(out, choice.calls.back().id);
    out += ",\"type\":\"function\",\"function\":{\"name\":";
    append_string(out, event.text);
    out += ",\"arguments\":\"\"}";
  } else {
    out += "\"function\":{\"arguments\":";
    append_string(out, event.text);
    out += '}';
  }
  out += "}]},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
}

void ResponseWriter::usage_chunk(std::string& out, std::span<const Choice> choices) const {
  out += chunk_start_;
  out += "],\"usage\":";
  append_usage(out, choices);
  out += "}\n\n";
}

void ResponseWriter::append_chat_message(std::string& out, const Choice& choice) const {
  out += "{\"role\":\"assistant\",\"content\":";
  if (choice.text.empty() && !choice.calls.empty()) {
    out += "null";
  } else {
    append_string(out, choice.text);
  }
  out += ",\"refusal\":null";
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

std::string ResponseWriter::whole(std::span<const Choice* const> choices, std::span<const Choice> all) const {
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
      append_string(out, choice.prompt_text + choice.text);
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
  out += '}';
  return out;
}

}  // namespace nfp::server
