#include "server/api/dialects.h"

#include <algorithm>

namespace nfp::server::dialect {
namespace {

// Whether a place in the body is this field or within it.
bool is_in(std::string_view place, std::string_view field) {
  if (!place.starts_with(field)) return false;
  return place.size() == field.size() || place[field.size()] == '.' || place[field.size()] == '[';
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

}  // namespace

void pass_on(Fields& fields, Json* chat) {
  for (const char* name : {"model",
                           "stream",
                           "temperature",
                           "top_p",
                           "top_k",
                           "min_p",
                           "presence_penalty",
                           "frequency_penalty",
                           "repetition_penalty",
                           "seed",
                           "stop_token_ids",
                           "include_stop_str_in_output",
                           "ignore_eos",
                           "min_tokens",
                           "logit_bias",
                           "allowed_token_ids",
                           "bad_words",
                           "structured_outputs",
                           "guided_json",
                           "guided_regex",
                           "guided_choice",
                           "guided_grammar",
                           "grammar",
                           "json_schema",
                           "documents",
                           "include_reasoning",
                           "skip_special_tokens",
                           "truncate_prompt_tokens",
                           "truncation_side",
                           "precision",
                           "cache_salt",
                           "chat_template_kwargs",
                           "user",
                           "metadata",
                           "safety_identifier",
                           "prompt_cache_key",
                           "prompt_cache_retention",
                           "priority",
                           "slo_ttft_ms",
                           "slo_itl_ms"}) {
    if (const Json* value = fields.find(name)) (*chat)[name] = *value;
  }
}

std::string text_field(const Json& object, const char* name) {
  return object.is_object() && object.contains(name) && object[name].is_string() ? object[name].get<std::string>()
                                                                                 : std::string();
}

MaybeError parse_as_chat(const Json& chat, const RequestLimits& limits, std::initializer_list<Renamed> names,
                         GenerationRequest* out) {
  MaybeError error = parse_chat(chat, limits, out);
  for (const auto& [from, to] : names) {
    if (is_in(out->grammar.param, from)) {
      out->grammar.param.replace(0, from.size(), to);
      break;
    }
  }
  if (!error) return error;
  for (const auto& [from, to] : names) {
    if (from.starts_with(']') && error->param.starts_with("tools[")) {
      replace_all(error->message, from, to);
      replace_all(error->param, from, to);
    } else if (is_in(error->param, from)) {
      replace_all(error->message, "'" + std::string(from), "'" + std::string(to));
      error->param.replace(0, from.size(), to);
      break;
    }
  }
  return error;
}

}  // namespace nfp::server::dialect
