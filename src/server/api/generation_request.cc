#include "server/api/generation_request.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "server/api/json_schema.h"

namespace nfp::server {
namespace {

MaybeError check_object(const Json& body) {
  if (body.is_object()) return std::nullopt;
  return bad_request("", "the body must be a JSON object");
}

MaybeError parse_stop(Fields& fields, const RequestLimits& limits, SamplingParams* sampling) {
  const Json* stop = fields.find("stop");
  if (stop == nullptr) return std::nullopt;
  if (stop->is_string()) {
    sampling->stop = {stop->get<std::string>()};
  } else if (stop->is_array()) {
    for (const Json& item : *stop) {
      if (!item.is_string()) return bad_request("stop", "'stop' must be a string or a list of strings");
      sampling->stop.push_back(item.get<std::string>());
    }
  } else {
    return bad_request("stop", "'stop' must be a string or a list of strings");
  }
  if (sampling->stop.size() > static_cast<size_t>(limits.max_stop_strings)) {
    return bad_request("stop", fmt::format("'stop' has {} strings; at most {} are allowed", sampling->stop.size(),
                                           limits.max_stop_strings));
  }
  for (const std::string& text : sampling->stop) {
    if (text.size() > static_cast<size_t>(limits.max_stop_bytes)) {
      return bad_request("stop", fmt::format("a string of 'stop' is longer than {} bytes", limits.max_stop_bytes));
    }
  }
  // An empty stop string would end everything at once; clients send "" for none.
  std::erase(sampling->stop, std::string());
  return std::nullopt;
}

MaybeError check_entries(const Json& list, std::string_view param, size_t most) {
  if (list.size() <= most) return std::nullopt;
  return bad_request(std::string(param),
                     fmt::format("'{}' has {} entries; at most {} are allowed", param, list.size(), most));
}

MaybeError parse_token_list(const Json& list, std::string_view param, size_t most, std::vector<int32_t>* out) {
  NFP_API_TRY(check_entries(list, param, most));
  out->reserve(list.size());
  for (const Json& item : list) {
    // Negative and too large ids are named by the engine's check against the vocabulary.
    if (!item.is_number_integer()) {
      return bad_request(std::string(param), fmt::format("'{}' must hold token ids (integers)", param));
    }
    const bool fits = item.is_number_unsigned() ? item.get<uint64_t>() <= INT32_MAX : item.get<int64_t>() >= INT32_MIN;
    if (!fits) return bad_request(std::string(param), fmt::format("'{}' holds a number that is no token id", param));
    out->push_back(static_cast<int32_t>(item.get<int64_t>()));
  }
  return std::nullopt;
}

MaybeError parse_logit_bias(Fields& fields, const RequestLimits& limits, SamplingParams* sampling) {
  const Json* bias = fields.find("logit_bias");
  if (bias == nullptr) return std::nullopt;
  if (!bias->is_object()) return bad_request("logit_bias", "'logit_bias' must map token ids to numbers");
  NFP_API_TRY(check_entries(*bias, "logit_bias", static_cast<size_t>(limits.max_logit_bias)));
  for (const auto& [key, value] : bias->items()) {
    int32_t token = 0;
    const auto [end, failure] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (failure != std::errc() || end != key.data() + key.size()) {
      return bad_request("logit_bias", fmt::format("'logit_bias': '{}' is not a token id", key.substr(0, 32)));
    }
    if (!value.is_number() || !(value.get<double>() >= -100 && value.get<double>() <= 100)) {
      return bad_request("logit_bias",
                         fmt::format("'logit_bias' of token {} must be a number from -100 to 100", token));
    }
    sampling->logit_bias.emplace_back(token, value.get<float>());
  }
  return std::nullopt;
}

MaybeError parse_allowed_tokens(Fields& fields, std::vector<int32_t>* out) {
  const Json* ids = fields.find("allowed_token_ids");
  if (ids == nullptr) return std::nullopt;
  if (!ids->is_array()) return bad_request("allowed_token_ids", "'allowed_token_ids' must be a list of token ids");
  if (ids->empty()) {
    return bad_request("allowed_token_ids",
                       "'allowed_token_ids' is empty: no token could come; leave it out to allow all");
  }
  return parse_token_list(*ids, "allowed_token_ids", SIZE_MAX, out);
}

MaybeError parse_bad_words(Fields& fields, const RequestLimits& limits, std::vector<std::string>* out) {
  const Json* words = fields.find("bad_words");
  if (words == nullptr) return std::nullopt;
  if (!words->is_array()) return bad_request("bad_words", "'bad_words' must be a list of strings");
  NFP_API_TRY(check_entries(*words, "bad_words", static_cast<size_t>(limits.max_bad_words)));
  for (const Json& word : *words) {
    const std::string param = fmt::format("bad_words[{}]", out->size());
    if (!word.is_string()) return bad_request(param, fmt::format("'{}' must be a string", param));
    out->push_back(word.get<std::string>());
    if (out->back().size() > static_cast<size_t>(limits.max_bad_word_bytes)) {
      return bad_request(param, fmt::format("'{}' is longer than {} bytes", param, limits.max_bad_word_bytes));
    }
  }
  return std::nullopt;
}

ApiError too_large_grammar(std::string_view param, const RequestLimits& limits) {
  return bad_request(std::string(param), fmt::format("'{}' is larger than {} bytes", param, limits.max_grammar_bytes));
}

// A schema arrives as an object or as text that holds one. Its size and depth are checked before anything walks it.
MaybeError set_schema(const Json& schema, std::string_view param, const RequestLimits& limits, bool strict,
                      GrammarSpec* out) {
  const auto is_schema = [](const Json& value) { return value.is_object() || value.is_boolean(); };
  const auto refuse = [&] {
    return bad_request(std::string(param), fmt::format("'{}' must be a JSON schema (an object)", param));
  };
  if (!schema.is_string() && !is_schema(schema)) return refuse();
  std::string text = schema.is_string() ? schema.get<std::string>() : dump(schema);
  if (text.size() > static_cast<size_t>(limits.max_grammar_bytes)) return too_large_grammar(param, limits);
  Json read;
  if (schema.is_string()) {
    auto parsed = parse_json(text);
    if (!parsed.ok() || !is_schema(*parsed)) return refuse();
    read = std::move(*parsed);
  }
  if (json_depth(text, limits.max_schema_depth) > limits.max_schema_depth) {
    return bad_request(std::string(param), fmt::format("the schema in '{}' is nested deeper than {} levels", param,
                                                       limits.max_schema_depth));
  }
  out->unenforced = unenforced_keywords(schema.is_string() ? read : schema);
  if (strict && !out->unenforced.empty()) return unenforced_error(out->unenforced, param);
  out->kind = GrammarSpec::Kind::kJsonSchema;
  out->text = std::move(text);
  return std::nullopt;
}

// Empty = there is none here.
struct GrammarFields {
  std::string_view json, regex, choice, grammar, json_object;
};

// One of several ways to say it; two at once are an error.
MaybeError parse_grammar_fields(Fields& fields, const GrammarFields& names, const RequestLimits& limits,
                                GrammarSpec* out) {
  int given = out->kind == GrammarSpec::Kind::kNone ? 0 : 1;
  const auto find = [&](std::string_view name) { return name.empty() ? nullptr : fields.find(name); };
  const auto text_field = [&](std::string_view name, GrammarSpec::Kind kind) -> MaybeError {
    const Json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string() || value->get_ref<const std::string&>().empty()) {
      return bad_request(fields.path(name), fmt::format("'{}' must be a non-empty string", fields.path(name)));
    }
    ++given;
    out->kind = kind;
    out->text = value->get<std::string>();
    out->param = fields.path(name);
    return std::nullopt;
  };
  if (const Json* schema = find(names.json)) {
    ++given;
    out->param = fields.path(names.json);
    NFP_API_TRY(set_schema(*schema, out->param, limits, false, out));
  }
  NFP_API_TRY(text_field(names.regex, GrammarSpec::Kind::kRegex));
  NFP_API_TRY(text_field(names.grammar, GrammarSpec::Kind::kEbnf));
  if (const Json* choices = find(names.choice)) {
    ++given;
    out->kind = GrammarSpec::Kind::kChoice;
    out->param = fields.path(names.choice);
    if (!choices->is_array() || choices->empty()) {
      return bad_request(out->param, fmt::format("'{}' must be a non-empty list of strings", out->param));
    }
    for (const Json& choice : *choices) {
      if (!choice.is_string() || choice.get_ref<const std::string&>().empty()) {
        return bad_request(out->param, fmt::format("'{}' must be a non-empty list of strings", out->param));
      }
      out->choices.push_back(choice.get<std::string>());
    }
  }
  bool any_object = false;
  if (!names.json_object.empty()) NFP_API_TRY(fields.get(names.json_object, &any_object));
  if (any_object) {
    ++given;
    out->kind = GrammarSpec::Kind::kJsonObject;
    out->param = fields.path(names.json_object);
  }
  if (given > 1) {
    return bad_request(
        out->param,
        "more than one constraint on the output is given (a format, guided_*, structured_outputs, grammar, "
        "json_schema); choose one");
  }
  return std::nullopt;
}

MaybeError parse_response_format(Fields& fields, const RequestLimits& limits, GrammarSpec* out,
                                 std::vector<std::string>* ignored) {
  const Json* format = fields.find("response_format");
  if (format == nullptr) return std::nullopt;
  if (!format->is_object()) return bad_request("response_format", "'response_format' must be an object with a 'type'");
  Fields inner(*format, "response_format");
  std::string type;
  NFP_API_TRY(inner.get("type", &type));
  out->param = "response_format";
  if (type == "text") return inner.rest(limits, ignored);
  if (type != "json_object" && type != "json_schema") {
    return bad_request("response_format", "'response_format.type' must be text, json_object or json_schema");
  }
  const Json* wrapper = type == "json_schema" ? inner.find("json_schema") : nullptr;
  // llama.cpp, Together and Fireworks take the schema here.
  if (const Json* schema = wrapper == nullptr ? inner.find("schema") : nullptr) {
    out->param = "response_format.schema";
    NFP_API_TRY(inner.rest(limits, ignored));
    return set_schema(*schema, out->param, limits, false, out);
  }
  if (type == "json_object") {
    out->kind = GrammarSpec::Kind::kJsonObject;
    return inner.rest(limits, ignored);
  }
  if (wrapper == nullptr || !wrapper->is_object() || !wrapper->contains("schema")) {
    return bad_request("response_format.json_schema.schema",
                       "'response_format.json_schema.schema' must be a JSON schema (an object)");
  }
  out->param = "response_format.json_schema.schema";
  bool strict = false;
  Fields described(*wrapper, "response_format.json_schema");
  NFP_API_TRY(described.get("strict", &strict));
  for (const char* name : {"schema", "name", "description"}) described.without_effect(name);
  NFP_API_TRY(described.rest(limits, ignored));
  NFP_API_TRY(inner.rest(limits, ignored));
  return set_schema((*wrapper)["schema"], out->param, limits, strict, out);
}

MaybeError parse_grammar(Fields& fields, const RequestLimits& limits, GrammarSpec* out,
                         std::vector<std::string>* ignored) {
  NFP_API_TRY(parse_response_format(fields, limits, out, ignored));
  NFP_API_TRY(parse_grammar_fields(fields, {"guided_json", "guided_regex", "guided_choice", "guided_grammar", ""},
                                   limits, out));
  // llama.cpp's, where an empty grammar is none.
  const Json* grammar = fields.find("grammar");
  const bool is_set = grammar != nullptr && *grammar != "";
  NFP_API_TRY(parse_grammar_fields(fields, {"json_schema", "", "", is_set ? "grammar" : "", ""}, limits, out));
  if (const Json* structured = fields.find("structured_outputs")) {
    if (!structured->is_object()) {
      return bad_request("structured_outputs", "'structured_outputs' must be an object");
    }
    Fields inner(*structured, "structured_outputs");
    NFP_API_TRY(parse_grammar_fields(inner, {"json", "regex", "choice", "grammar", "json_object"}, limits, out));
    // vLLM's clients send all that its class has, most of it false or null.
    for (const char* name : {"structural_tag", "whitespace_pattern", "disable_any_whitespace",
                             "disable_additional_properties", "disable_fallback"}) {
      NFP_API_TRY(inner.unsupported(name, "this server does not implement it; leave it out"));
    }
    NFP_API_TRY(inner.rest());  // a constraint that is misspelt must not be none
  }
  size_t bytes = out->text.size();
  for (const std::string& choice : out->choices) bytes += choice.size();
  if (bytes > static_cast<size_t>(limits.max_grammar_bytes)) return too_large_grammar(out->param, limits);
  return std::nullopt;
}

MaybeError parse_max_tokens(Fields& fields, bool chat, GenerationRequest* out) {
  // The older name first: the newer one wins.
  for (const std::string_view name : {"max_tokens", "max_completion_tokens"}) {
    if (!chat && name == "max_completion_tokens") continue;
    int64_t value = -1;
    NFP_API_TRY(fields.get(name, 0, INT32_MAX, &value));
    if (value < 0) continue;
    out->no_output = value == 0;
    out->sampling.max_tokens = static_cast<int32_t>(std::max<int64_t>(value, 1));
  }
  if (!chat && !out->sampling.max_tokens) out->sampling.max_tokens = 16;  // OpenAI's default
  return std::nullopt;
}

MaybeError parse_sampling(Fields& fields, const RequestLimits& limits, GenerationRequest* out) {
  SamplingParams& s = out->sampling;
  NFP_API_TRY(fields.get("temperature", &s.temperature));
  NFP_API_TRY(fields.get("top_p", &s.top_p));
  NFP_API_TRY(fields.get("min_p", &s.min_p));
  int top_k = s.top_k;  // what the server has as a default
  NFP_API_TRY(fields.get("top_k", -1, INT32_MAX, &top_k));
  s.top_k = std::max(top_k, 0);  // -1 is vLLM's "off"
  NFP_API_TRY(fields.get("presence_penalty", &s.presence_penalty));
  NFP_API_TRY(fields.get("frequency_penalty", &s.frequency_penalty));
  NFP_API_TRY(fields.get("repetition_penalty", &s.repetition_penalty));
  if (fields.find("seed") != nullptr) {
    int64_t seed = 0;
    NFP_API_TRY(fields.get("seed", INT64_MIN, INT64_MAX, &seed));
    if (seed != -1) s.seed = static_cast<uint64_t>(seed);  // -1 is vLLM's and llama.cpp's "none"
  }
  NFP_API_TRY(fields.get("min_tokens", 0, INT32_MAX, &s.min_tokens));
  NFP_API_TRY(fields.get("ignore_eos", &s.ignore_eos));
  NFP_API_TRY(fields.get("include_stop_str_in_output", &s.include_stop));
  NFP_API_TRY(parse_stop(fields, limits, &s));
  if (const Json* ids = fields.find("stop_token_ids")) {
    if (!ids->is_array()) return bad_request("stop_token_ids", "'stop_token_ids' must be a list of token ids");
    NFP_API_TRY(
        parse_token_list(*ids, "stop_token_ids", static_cast<size_t>(limits.max_stop_token_ids), &s.stop_token_ids));
  }
  NFP_API_TRY(parse_logit_bias(fields, limits, &s));
  NFP_API_TRY(parse_allowed_tokens(fields, &out->allowed_token_ids));
  return parse_bad_words(fields, limits, &out->bad_words);
}

constexpr double kMostSloMs = 86'400'000;

MaybeError parse_slo(Fields& fields, GenerationRequest* out) {
  const std::pair<const char*, std::optional<double>*> names[] = {{"slo_ttft_ms", &out->slo_ttft_ms},
                                                                  {"slo_itl_ms", &out->slo_itl_ms}};
  for (const auto& [name, value] : names) {
    const Json* found = fields.find(name);
    if (found == nullptr) continue;
    const double ms = found->is_number() ? found->get<double>() : 0;
    if (!(ms > 0) || ms > kMostSloMs) {
      return bad_request(name, fmt::format("'{}' must be a number of milliseconds, more than 0 and at most {}", name,
                                           static_cast<int64_t>(kMostSloMs)));
    }
    *value = ms;
  }
  return fields.get("priority", INT32_MIN, INT32_MAX, &out->priority);
}

// What both endpoints share. `out->chat` is set.
MaybeError parse_common(Fields& fields, const RequestLimits& limits, GenerationRequest* out) {
  NFP_API_TRY(fields.get("model", &out->model));
  NFP_API_TRY(parse_max_tokens(fields, out->chat, out));
  NFP_API_TRY(parse_sampling(fields, limits, out));
  NFP_API_TRY(fields.get("n", 1, limits.max_n, &out->n));
  NFP_API_TRY(fields.get("stream", &out->stream));
  if (const Json* options = fields.find("stream_options")) {
    if (!options->is_object()) return bad_request("stream_options", "'stream_options' must be an object");
    if (!out->stream) return bad_request("stream_options", "'stream_options' is only allowed when 'stream' is true");
    Fields inner(*options, "stream_options");
    NFP_API_TRY(inner.get("include_usage", &out->include_usage));
    NFP_API_TRY(inner.get("continuous_usage_stats", &out->continuous_usage));
    inner.without_effect("include_obfuscation");
    NFP_API_TRY(inner.rest(limits, &out->ignored));
  }
  if (fields.find("prompt_logprobs") != nullptr) {
    int value = 0;
    NFP_API_TRY(fields.get("prompt_logprobs", 0, limits.max_logprobs, &value));
    // As with vLLM, which takes 0 and sends none.
    if (out->stream && (value > 0 || limits.strict)) {
      return bad_request("prompt_logprobs", "'prompt_logprobs' is not available when 'stream' is true");
    }
    if (out->stream) {
      out->ignored.emplace_back("prompt_logprobs");
    } else {
      out->prompt_logprobs = value;
    }
  }
  bool flag = false;
  if (fields.find("add_special_tokens") != nullptr) {
    NFP_API_TRY(fields.get("add_special_tokens", &flag));
    out->add_special_tokens = flag;
  }
  NFP_API_TRY(fields.get("skip_special_tokens", &out->skip_special_tokens));
  NFP_API_TRY(parse_serving(fields, out));
  NFP_API_TRY(fields.get("return_token_ids", &out->return_token_ids));
  NFP_API_TRY(fields.get("return_tokens_as_token_ids", &out->tokens_as_ids));
  NFP_API_TRY(parse_grammar(fields, limits, &out->grammar, &out->ignored));

  bool spaces = true;
  NFP_API_TRY(fields.get("spaces_between_special_tokens", &spaces));
  if (!spaces) {
    return bad_request("spaces_between_special_tokens", "'spaces_between_special_tokens': only true is supported",
                       "unsupported_parameter");
  }
  fields.without_effect("length_penalty");  // of beam search; vLLM's clients send its default, 1
  for (const std::string_view name :
       {"use_beam_search", "logits_processors", "kv_transfer_params", "vllm_xargs", "guided_decoding_backend",
        "guided_whitespace_pattern", "prompt_embeds", "mm_processor_kwargs"}) {
    NFP_API_TRY(fields.unsupported(name, "this server does not implement it; leave it out"));
  }
  return std::nullopt;
}

// What the model's template is told; chat_template_kwargs wins.
MaybeError parse_template_fields(Fields& fields, GenerationRequest* out) {
  Json& variables = out->template_variables;
  const auto level = [&](const char* name, std::initializer_list<std::string_view> allowed) -> MaybeError {
    std::string value;
    NFP_API_TRY(fields.get(name, &value));
    if (value.empty()) return std::nullopt;
    if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
      return bad_request(name, fmt::format("'{}' must be one of {}", name, fmt::join(allowed, ", ")));
    }
    GenerationRequest::TemplateField acts{name, {name}};
    if (!variables.contains(name)) variables[name] = value;
    if (value == "none") {  // as templates spell it
      for (const char* switch_name : {"enable_thinking", "thinking"}) {
        if (!variables.contains(switch_name)) variables[switch_name] = false;
        acts.variables.emplace_back(switch_name);
      }
    }
    out->template_fields.push_back(std::move(acts));
    return std::nullopt;
  };
  NFP_API_TRY(level("reasoning_effort", {"none", "minimal", "low", "medium", "high", "xhigh", "max"}));
  NFP_API_TRY(level("verbosity", {"low", "medium", "high"}));
  if (const Json* documents = fields.find("documents")) {
    if (!documents->is_array()) return bad_request("documents", "'documents' must be a list of objects");
    for (const Json& one : *documents) {
      if (!one.is_object()) return bad_request("documents", "'documents' must be a list of objects");
    }
    if (!documents->empty()) {
      if (!variables.contains("documents")) variables["documents"] = *documents;
      out->template_fields.push_back({"documents", {"documents"}});
    }
  }
  return std::nullopt;
}

// Goes on as if the functions that are not named were not there.
MaybeError parse_allowed_tools(const Json& choice, const RequestLimits& limits, GenerationRequest* out) {
  const auto allowed = choice.find("allowed_tools");
  if (allowed == choice.end() || !allowed->is_object()) {
    return bad_request("tool_choice.allowed_tools",
                       "'tool_choice.allowed_tools' must be an object with 'mode' and 'tools'");
  }
  Fields inner(*allowed, "tool_choice.allowed_tools");
  std::string mode = "auto";
  NFP_API_TRY(inner.get("mode", &mode));
  if (mode != "auto" && mode != "required") {
    return bad_request(inner.path("mode"), fmt::format("'{}' must be auto or required", inner.path("mode")));
  }
  const Json* tools = inner.find("tools");
  if (tools == nullptr || !tools->is_array()) {
    return bad_request(inner.path("tools"), fmt::format("'{}' must be a list of functions", inner.path("tools")));
  }
  std::set<std::string_view> names;  // of `choice`; the list may be long
  for (const Json& tool : *tools) {
    if (!tool.is_object() || !tool.contains("function") || !tool["function"].is_object()) continue;
    const auto name = tool["function"].find("name");
    if (name != tool["function"].end() && name->is_string()) names.insert(name->get_ref<const std::string&>());
  }
  NFP_API_TRY(inner.rest(limits, &out->ignored));
  Json kept = Json::array();
  for (const Json& tool : out->tools) {
    if (names.contains(tool["function"]["name"].get_ref<const std::string&>())) kept.push_back(tool);
  }
  if (kept.empty()) return bad_request("tool_choice", "'tool_choice' allows no function of 'tools'");
  out->tool_choice = mode == "auto" ? ToolChoice::kAuto : ToolChoice::kRequired;
  out->unenforced.clear();
  return parse_tools(kept, limits, &out->tools, &out->ignored, &out->unenforced);
}

MaybeError parse_tool_choice(Fields& fields, const RequestLimits& limits, GenerationRequest* out) {
  const Json* choice = fields.find("tool_choice");
  const bool have_tools = out->tools.is_array() && !out->tools.empty();
  if (choice == nullptr) {
    out->tool_choice = have_tools ? ToolChoice::kAuto : ToolChoice::kNone;
    return std::nullopt;
  }
  if (choice->is_string()) {
    const auto& text = choice->get_ref<const std::string&>();
    if (text == "none") {
      out->tool_choice = ToolChoice::kNone;
      return std::nullopt;
    }
    if (text != "auto" && text != "required") {
      return bad_request("tool_choice", "'tool_choice' must be none, auto, required, a function, or allowed_tools");
    }
    if (!have_tools) return bad_request("tool_choice", "'tool_choice' needs 'tools'");
    out->tool_choice = text == "auto" ? ToolChoice::kAuto : ToolChoice::kRequired;
    return std::nullopt;
  }
  const Unknown unknown = {limits, &out->ignored};
  if (choice->is_object() && choice->value("type", Json()) == "allowed_tools") {
    NFP_API_TRY(unknown.check(*choice, "tool_choice", {"type", "allowed_tools"}));
    return parse_allowed_tools(*choice, limits, out);
  }
  const Json* function = nullptr;
  if (choice->is_object() && choice->value("type", Json("function")) == "function" && choice->contains("function")) {
    function = &(*choice)["function"];
  }
  if (function == nullptr || !function->is_object() || !function->contains("name") ||
      !(*function)["name"].is_string()) {
    return bad_request("tool_choice", "'tool_choice' must be none, auto, required, a function, or allowed_tools");
  }
  NFP_API_TRY(unknown.check(*choice, "tool_choice", {"type", "function"}));
  NFP_API_TRY(unknown.check(*function, "tool_choice.function", {"name"}));
  out->tool_choice = ToolChoice::kNamed;
  out->tool_name = (*function)["name"].get<std::string>();
  if (have_tools) {
    for (const Json& tool : out->tools) {
      if (tool["function"]["name"] == out->tool_name) return std::nullopt;
    }
  }
  return bad_request("tool_choice", fmt::format("'tool_choice' names the function '{}', which is not in 'tools'",
                                                out->tool_name.substr(0, 64)));
}

}  // namespace

MaybeError parse_serving(Fields& fields, GenerationRequest* out) {
  int truncate = 0;
  NFP_API_TRY(fields.get("truncate_prompt_tokens", -1, INT32_MAX, &truncate));
  if (truncate != 0) out->truncate_prompt = truncate;
  std::string side;
  NFP_API_TRY(fields.get("truncation_side", &side));
  if (!side.empty() && side != "left" && side != "right") {
    return bad_request("truncation_side", "'truncation_side' must be left or right");
  }
  out->keep_prompt_start = side == "right";
  std::string precision;
  NFP_API_TRY(fields.get("precision", &precision));
  if (!precision.empty()) NFP_API_TRY(parse_precision(precision, "precision", &out->precision));
  NFP_API_TRY(fields.get("user", &out->user));
  NFP_API_TRY(fields.get("cache_salt", &out->cache_salt));
  if (out->cache_salt.size() > 256) return bad_request("cache_salt", "'cache_salt' is longer than 256 bytes");
  for (const std::string_view name : {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}) {
    fields.without_effect(name);
  }
  return parse_slo(fields, out);
}

MaybeError parse_prompt(const Json& prompt, std::string_view param, const RequestLimits& limits,
                        std::vector<PromptInput>* out) {
  const auto refuse = [&] {
    return bad_request(std::string(param),
                       fmt::format("'{}' must be a string, a list of strings, a list of token ids, or a list of lists "
                                   "of token ids, and not empty",
                                   param));
  };
  constexpr size_t kMostTokens = 4u << 20;
  if (prompt.is_string()) {
    out->push_back({prompt.get<std::string>(), {}});
    return std::nullopt;
  }
  if (!prompt.is_array() || prompt.empty()) return refuse();
  if (prompt.front().is_number()) {
    PromptInput& input = out->emplace_back();
    return parse_token_list(prompt, param, kMostTokens, &input.tokens);
  }
  NFP_API_TRY(check_entries(prompt, param, static_cast<size_t>(limits.max_prompts)));
  for (const Json& item : prompt) {
    PromptInput& input = out->emplace_back();
    if (item.is_string()) {
      input.text = item.get<std::string>();
    } else if (item.is_array() && !item.empty()) {
      NFP_API_TRY(parse_token_list(item, param, kMostTokens, &input.tokens));
    } else {
      return refuse();
    }
  }
  return std::nullopt;
}

MaybeError parse_slo_header(std::string_view text, std::string_view header, std::optional<double>* out) {
  double ms = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), ms);
  if (code != std::errc() || end != text.data() + text.size() || !(ms > 0) || ms > kMostSloMs) {
    return bad_request(std::string(header),
                       fmt::format("'{}' must be a number of milliseconds, more than 0 and at most {}", header,
                                   static_cast<int64_t>(kMostSloMs)));
  }
  *out = ms;
  return std::nullopt;
}

MaybeError parse_precision(std::string_view text, std::string_view param, std::optional<PrecisionClass>* out) {
  const auto named = precision_class_from_name(text);
  if (!named) return bad_request(std::string(param), fmt::format("'{}' must be exact, auto or fast", param));
  *out = named;
  return std::nullopt;
}

MaybeError parse_completion(const Json& body, const RequestLimits& limits, GenerationRequest* out) {
  NFP_API_TRY(check_object(body));
  Fields fields(body);
  out->chat = false;
  NFP_API_TRY(parse_common(fields, limits, out));
  const Json* prompt = fields.find("prompt");
  if (prompt == nullptr) return bad_request("prompt", "'prompt' is missing");
  NFP_API_TRY(parse_prompt(*prompt, "prompt", limits, &out->prompts));
  NFP_API_TRY(fields.get("echo", &out->echo));
  if (fields.find("logprobs") != nullptr) {
    // vLLM's clients may send a truth value here as chat does; OpenAI's completions take a number.
    NFP_API_TRY(fields.get("logprobs", 0, limits.max_logprobs, &out->top_logprobs));
    out->wants_logprobs = true;
  }
  out->best_of = out->n;
  NFP_API_TRY(fields.get("best_of", 1, limits.max_n, &out->best_of));
  if (out->best_of < out->n) {
    return bad_request("best_of", fmt::format("'best_of' ({}) must be at least 'n' ({})", out->best_of, out->n));
  }
  if (out->stream && out->best_of > out->n) {
    return bad_request("best_of", "'best_of' above 'n' is not available when 'stream' is true");
  }
  if (out->prompts.size() * static_cast<size_t>(out->best_of) > static_cast<size_t>(limits.max_choices)) {
    return bad_request("n", fmt::format("{} prompts with {} answers each are more than {} choices", out->prompts.size(),
                                        out->best_of, limits.max_choices));
  }
  NFP_API_TRY(fields.unsupported("suffix", "inserting text in the middle needs a model trained for it"));
  return fields.rest(limits, &out->ignored);
}

MaybeError check_service_tier(Fields& fields) {
  const Json* tier = fields.find("service_tier");
  if (tier == nullptr || *tier == "auto" || *tier == "default") return std::nullopt;
  return bad_request("service_tier", "'service_tier' must be auto or default", "unsupported_parameter");
}

MaybeError parse_chat(const Json& body, const RequestLimits& limits, GenerationRequest* out) {
  NFP_API_TRY(check_object(body));
  Fields fields(body);
  out->chat = true;
  NFP_API_TRY(parse_common(fields, limits, out));
  const Json* messages = fields.find("messages");
  if (messages == nullptr) return bad_request("messages", "'messages' is missing");
  NFP_API_TRY(parse_messages(*messages, limits, &out->messages, &out->ignored));
  if (const Json* tools = fields.find("tools")) {
    NFP_API_TRY(parse_tools(*tools, limits, &out->tools, &out->ignored, &out->unenforced));
  }
  NFP_API_TRY(parse_tool_choice(fields, limits, out));
  NFP_API_TRY(fields.get("parallel_tool_calls", &out->parallel_tool_calls));
  NFP_API_TRY(fields.get("include_reasoning", &out->include_reasoning));
  NFP_API_TRY(fields.get("logprobs", &out->wants_logprobs));
  if (fields.find("top_logprobs") != nullptr) {
    NFP_API_TRY(fields.get("top_logprobs", 0, limits.max_logprobs, &out->top_logprobs));
    if (!out->wants_logprobs && out->top_logprobs > 0) {
      return bad_request("top_logprobs", "'top_logprobs' needs 'logprobs' to be true");
    }
  }
  NFP_API_TRY(parse_turn(fields, out));
  NFP_API_TRY(fields.get("echo", &out->echo));
  NFP_API_TRY(parse_template_variables(fields, &out->template_variables));
  NFP_API_TRY(parse_template_fields(fields, out));
  out->best_of = out->n;
  if (out->grammar.kind != GrammarSpec::Kind::kNone) {
    // A response_format is for answers in text, of which a forced call has none.
    const bool of_text = out->grammar.param.starts_with("response_format");
    if (out->tool_choice == ToolChoice::kRequired || out->tool_choice == ToolChoice::kNamed) {
      if (!of_text) {
        return bad_request("tool_choice", "a forced tool call and another constraint on the output exclude each other");
      }
      out->grammar = {};
    }
    out->call_or_grammar = of_text && out->tool_choice == ToolChoice::kAuto;
  }

  bool store = false;
  NFP_API_TRY(fields.get("store", &store));
  if (store) return bad_request("store", "'store' is not supported: answers are not kept", "unsupported_parameter");
  NFP_API_TRY(check_service_tier(fields));
  if (const Json* modalities = fields.find("modalities"); modalities != nullptr && *modalities != Json({"text"})) {
    return bad_request("modalities", "'modalities': only [\"text\"] is supported", "unsupported_parameter");
  }
  for (const std::string_view name : {"functions", "function_call"}) {
    NFP_API_TRY(fields.unsupported(name, "use 'tools' and 'tool_choice'"));
  }
  for (const std::string_view name :
       {"audio", "prediction", "web_search_options", "chat_template", "best_of", "media_io_kwargs"}) {
    NFP_API_TRY(fields.unsupported(name, "this server does not implement it; leave it out"));
  }
  return fields.rest(limits, &out->ignored);
}

}  // namespace nfp::server
