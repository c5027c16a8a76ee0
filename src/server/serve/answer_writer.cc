#include "server/serve/answer_writer.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

#include "server/api/json_text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::server {
namespace {

void separate(std::string& list) {
  if (!list.empty()) list += ',';
}

std::string token_id_text(int32_t token) { return fmt::format("token_id:{}", token); }

int64_t code_points(std::string_view text) { return static_cast<int64_t>(text::count_code_points(text)); }

// What each token adds to the text, in code points of it: a character at its first byte, and bytes that are no UTF-8 as
// they are shown.
std::vector<int64_t> added_widths(StreamingDetokenizer& text, std::span<const OutputToken> tokens) {
  std::vector<int64_t> widths;
  widths.reserve(tokens.size());
  for (const OutputToken& token : tokens) {
    const int64_t begun = text.within_character() ? 1 : 0;
    const int64_t whole = code_points(text.append(token.token));
    widths.push_back(whole - begun + (text.within_character() ? 1 : 0));
  }
  return widths;
}

bool is_object(const std::string& arguments) {
  const auto parsed = parse_json(arguments);
  return parsed.ok() && parsed->is_object();
}

}  // namespace

void append_logprob(std::string& out, double logprob) { append_number(out, std::max(logprob, -9999.0)); }

void LogprobLists::clear() {
  for (std::string* list : {&tokens, &logprobs, &tops, &offsets, &content}) list->clear();
}

void LogprobLists::move_content(std::string* list) {
  if (content.empty()) return;
  separate(*list);
  *list += std::exchange(content, {});
}

void LogprobLists::prepend(const LogprobLists& others) {
  for (const auto list :
       {&LogprobLists::tokens, &LogprobLists::logprobs, &LogprobLists::tops, &LogprobLists::offsets}) {
    std::string all = others.*list;
    if (!(this->*list).empty()) separate(all);
    (this->*list).insert(0, all);
  }
}

AnswerWriter::AnswerWriter(const GenerationRequest* request, const ServedModel* model, std::string id, int64_t created)
    : request_(request), model_(model), id_(std::move(id)), created_(created) {}

// A token as a person reads it; one that is not text by itself as OpenAI writes it: "bytes:\xe2\x82".
std::string AnswerWriter::token_text(int32_t token) const {
  if (request_->tokens_as_ids) return token_id_text(token);
  const Tokenizer& tokenizer = model_->tokenizer();
  if (tokenizer.is_special(token)) return std::string(tokenizer.id_to_token(token).value_or(""));
  const std::string_view bytes = tokenizer.token_bytes(token);
  if (text::is_utf8(bytes)) return std::string(bytes);
  std::string out = "bytes:";
  for (const char c : bytes) out += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
  return out;
}

void AnswerWriter::add_logprobs(std::span<const OutputToken> tokens, std::optional<std::string_view> echo,
                                LogprobLists* lists) const {
  std::vector<int64_t> widths;
  if (!request_->chat) {
    if (echo) {
      StreamingDetokenizer prompt(model_->facts().tokenizer, {.skip_special = false});
      widths = added_widths(prompt, tokens);
      // The answer begins where the echo ends. What the tokens have beyond it stands before: a BOS, or the space that
      // SentencePiece begins with.
      if (prompt.within_character()) widths.back() += code_points(prompt.finish()) - 1;
      lists->offset = code_points(*echo) - std::accumulate(widths.begin(), widths.end(), int64_t{0});
    } else {
      if (!lists->text) {
        lists->text.emplace(model_->facts().tokenizer,
                            DetokenizerOptions{.skip_special = request_->skip_special_tokens});
      }
      widths = added_widths(*lists->text, tokens);
    }
  }
  const auto chat_entry = [&](std::string& out, int32_t token, double logprob) {
    out += "{\"token\":";
    const std::string text = token_text(token);
    append_string(out, text);
    out += ",\"logprob\":";
    append_logprob(out, logprob);
    out += ",\"bytes\":[";
    const Tokenizer& tokenizer = model_->tokenizer();
    const std::string_view bytes =
        tokenizer.is_special(token) ? tokenizer.id_to_token(token).value_or("") : tokenizer.token_bytes(token);
    for (size_t i = 0; i < bytes.size(); ++i) {
      fmt::format_to(std::back_inserter(out), "{}{}", i > 0 ? "," : "", static_cast<uint8_t>(bytes[i]));
    }
    out += ']';
  };
  for (size_t i = 0; i < tokens.size(); ++i) {
    const OutputToken& token = tokens[i];
    const bool none = echo && i == 0;
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
    fmt::format_to(std::back_inserter(lists->offsets), "{}", std::max<int64_t>(lists->offset, 0));
    lists->offset += widths[i];
    separate(lists->logprobs);
    separate(lists->tops);
    if (none) {
      lists->logprobs += "null";
      lists->tops += "null";
      continue;
    }
    append_logprob(lists->logprobs, token.logprob);
    // The chosen token is always in the map by its text, also when it is not among the likeliest. Of others with the
    // same text the likeliest has it.
    std::unordered_set<std::string> texts = {text};
    std::string& out = lists->tops;
    out += '{';
    const auto entry = [&](int32_t id, double logprob) {
      std::string key = id == token.token ? text : token_text(id);
      if (id != token.token && !texts.insert(key).second) key = token_id_text(id);
      if (out.back() != '{') out += ',';
      append_string(out, key);
      out += ':';
      append_logprob(out, logprob);
    };
    bool chosen = false;
    for (size_t t = 0; t < tops; ++t) {
      chosen = chosen || token.top[t].token == token.token;
      entry(token.top[t].token, token.top[t].logprob);
    }
    if (!chosen) entry(token.token, token.logprob);
    out += '}';
  }
}

void AnswerWriter::append_precision(std::string& out, const Usage& usage) {
  fmt::format_to(std::back_inserter(out),
                 "{{\"prompt\":{{\"fp16_tokens\":{},\"fp8_tokens\":{}}},"
                 "\"completion\":{{\"fp16_tokens\":{},\"fp8_tokens\":{}}}",
                 usage.prompt.fp16, usage.prompt.fp8, usage.completion.fp16, usage.completion.fp8);
  if (usage.slo_met) out += *usage.slo_met ? ",\"slo_met\":true" : ",\"slo_met\":false";
  out += '}';
}

std::string join(const Choice& choice, ToolEvent::Kind kind) {
  std::string all;
  for (const AnswerPart& part : choice.parts) {
    if (part.kind == kind) all += part.text;
  }
  return all;
}

std::string object_or_empty(const std::string& arguments) { return is_object(arguments) ? arguments : "{}"; }

std::string object_so_far(const std::string& arguments) {
  if (is_object(arguments)) return arguments;
  const Json whole = parse_cut_json(arguments);
  return whole.is_object() ? dump(whole) : "{}";
}

bool has_cut_call(const Choice& choice) {
  return !choice.calls.empty() && choice.stop_reason != "null" && !is_object(choice.calls.back().arguments);
}

Usage AnswerWriter::sum(std::span<const Choice> choices) const {
  Usage sum;
  for (const Choice& choice : choices) {
    if (choice.sample == 0) {
      sum.prompt_tokens += choice.usage.prompt_tokens;
      sum.cached_tokens += choice.usage.cached_tokens;
      sum.prompt.fp16 += choice.usage.prompt.fp16;
      sum.prompt.fp8 += choice.usage.prompt.fp8;
    }
    if (choice.usage.slo_met) sum.slo_met = sum.slo_met.value_or(true) && *choice.usage.slo_met;
    sum.completion_tokens += choice.usage.completion_tokens;
    sum.completion.fp16 += choice.usage.completion.fp16;
    sum.completion.fp8 += choice.usage.completion.fp8;
  }
  return sum;
}

}  // namespace nfp::server
