// Bodies of requests: parsers answer with a request or an error, and never fail otherwise. Half of the mutations keep
// the structure: they take a value out of the JSON, put another in its place (of the kinds that parsers are wrong
// about), or a field of any endpoint where it may not belong.
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include "server/api/dialects.h"
#include "server/api/embedding_request.h"
#include "server/api/generation_request.h"
#include "server/api/json_schema.h"

namespace {

using nfp::server::Json;

constexpr std::string_view kFields[] = {"model",
                                        "messages",
                                        "prompt",
                                        "tools",
                                        "tool_choice",
                                        "response_format",
                                        "guided_json",
                                        "guided_regex",
                                        "guided_grammar",
                                        "guided_choice",
                                        "grammar",
                                        "json_schema",
                                        "schema",
                                        "structured_outputs",
                                        "max_tokens",
                                        "max_completion_tokens",
                                        "temperature",
                                        "top_p",
                                        "top_k",
                                        "min_p",
                                        "n",
                                        "best_of",
                                        "stream",
                                        "stream_options",
                                        "stop",
                                        "stop_token_ids",
                                        "logit_bias",
                                        "allowed_token_ids",
                                        "bad_words",
                                        "logprobs",
                                        "top_logprobs",
                                        "prompt_logprobs",
                                        "echo",
                                        "seed",
                                        "min_tokens",
                                        "user",
                                        "metadata",
                                        "cache_salt",
                                        "precision",
                                        "chat_template_kwargs",
                                        "add_generation_prompt",
                                        "continue_final_message",
                                        "parallel_tool_calls",
                                        "service_tier",
                                        "modalities",
                                        "role",
                                        "content",
                                        "tool_calls",
                                        "function",
                                        "name",
                                        "arguments",
                                        "parameters",
                                        "strict",
                                        "type",
                                        "text",
                                        "json_schema",
                                        "schema",
                                        "properties",
                                        "required",
                                        "anyOf",
                                        "allOf",
                                        "$ref",
                                        "enum",
                                        "const",
                                        "items",
                                        "uniqueItems",
                                        "input",
                                        "instructions",
                                        "output",
                                        "call_id",
                                        "system",
                                        "input_schema",
                                        "stop_sequences",
                                        "thinking",
                                        "reasoning"};

Json strange_value(std::mt19937& source) {
  switch (source() % 20) {
    case 0:
      return nullptr;
    case 1:
      return true;
    case 2:
      return 0;
    case 3:
      return -1;
    case 4:
      return INT64_MIN;
    case 5:
      return UINT64_MAX;
    case 6:
      return 1e308;
    case 7:
      return 0.5;
    case 8:
      return "";
    case 9:
      return std::string(2000, 'x');
    case 10:
      return Json::array();
    case 11:
      return Json::object();
    case 12:
      return Json::array({nullptr});
    case 13:
      return "{\"type\":\"object\"}";
    case 14:
      return "\xF0\x9F\x98\x80";
    case 15:
      return "function";
    case 16:
      return "user";
    case 17:
      return Json({{"type", "json_schema"}, {"json_schema", {{"schema", {{"$ref", "#"}}}, {"strict", true}}}});
    case 18:
      return Json::array({{{"role", "user"}, {"content", "a"}}});
    default:
      return std::string(kFields[source() % std::size(kFields)]);
  }
}

// A value of the tree, each with some probability.
Json* pick(Json& at, std::mt19937& source, int depth = 0) {
  if (!at.is_structured() || at.empty() || depth > 20 || source() % 4 == 0) return &at;
  auto child = at.begin();
  std::advance(child, static_cast<std::ptrdiff_t>(source() % at.size()));
  return pick(*child, source, depth + 1);
}

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  std::mt19937 source(seed);
  if (source() % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
  auto parsed = nfp::server::parse_json(std::string_view(reinterpret_cast<const char*>(data), size));
  Json body = parsed.ok() ? std::move(*parsed) : Json::object();
  for (unsigned changes = 1 + source() % 3; changes > 0; --changes) {
    Json& at = *pick(body, source);
    const auto field = std::string(kFields[source() % std::size(kFields)]);
    switch (source() % 4) {
      case 0:
        at = strange_value(source);
        break;
      case 1:
        if (at.is_object()) at[field] = strange_value(source);
        if (at.is_array()) at.push_back(strange_value(source));
        break;
      case 2:
        if (at.is_object() && !at.empty()) at.erase(at.begin());
        if (at.is_array() && !at.empty()) at.push_back(at.front());
        break;
      default:
        if (body.is_object()) body[field] = at.dump().size() < 10'000 ? Json(at) : Json();
        break;
    }
  }
  const std::string text = nfp::server::dump(body);
  if (text.size() > max_size) return size;
  std::copy(text.begin(), text.end(), data);
  return text.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nfp::server;  // NOLINT(google-build-using-namespace)
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::string escaped;
  append_string(escaped, text);
  if (!parse_json(escaped).ok()) __builtin_trap();
  const auto json = parse_json(text);
  // Whatever the library reads within our limits we read alike, but that a byte 0 ends the text for it.
  const bool outside = nfp::json_depth(text, 64) > 64 || text.find('\0') != text.npos;
  const Json expected = outside ? Json(Json::value_t::discarded) : Json::parse(text, nullptr, false);
  if (json.ok() != !expected.is_discarded() && size < 4096) __builtin_trap();
  if (!json.ok()) return 0;
  if (size < 4096 && *json != expected) __builtin_trap();
  (void)unenforced_keywords(*json);
  const RequestLimits limits;
  using Parse = MaybeError (*)(const Json&, const RequestLimits&, GenerationRequest*);
  const Parse responses = [](const Json& body, const RequestLimits& most, GenerationRequest* out) -> MaybeError {
    if (!body.is_object()) return bad_request("", "no object");
    ResponsesRequest from;
    NFP_API_TRY(read_responses(body, most, &from));
    return parse_responses(from, Json::array(), most, out);
  };
  const Parse anthropic = [](const Json& body, const RequestLimits& most, GenerationRequest* out) -> MaybeError {
    if (!body.is_object()) return bad_request("", "no object");
    return parse_anthropic(body, most, body.size() % 2 == 0, out);
  };
  const Parse embedding = [](const Json& body, const RequestLimits& most, GenerationRequest* out) -> MaybeError {
    if (!body.is_object()) return bad_request("", "no object");
    EmbeddingRequest request;
    NFP_API_TRY(parse_embedding(body, most, &request));
    *out = std::move(request.common);
    return std::nullopt;
  };
  for (const Parse parse : {Parse(parse_completion), Parse(parse_chat), responses, anthropic, embedding}) {
    GenerationRequest request;
    if (auto failure = parse(*json, limits, &request)) {
      const std::string shown = error_json(*failure);
      if (!parse_json(shown).ok() || shown.size() > 20'000) __builtin_trap();
    } else if (request.best_of < request.n || request.n < 1 || request.grammar.text.size() > 1'000'000) {
      __builtin_trap();
    }
  }
  return 0;
}
