#include "capi/engine_json.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "backend/sampling.h"
#include "base/json_depth.h"
#include "engine/allowed_tokens.h"
#include "text/bad_word.h"

namespace nfp::capi {
namespace {

using Json = nlohmann::ordered_json;

Error bad(std::string_view field, std::string_view rule) {
  return error(ErrorCode::kUsage, "field '{}' {}", field, rule);
}

// One reader for each field of an object: they are what the object may have.
class Fields {
 public:
  template <typename T>
  void integer(std::string_view name, T& into, int64_t least, int64_t most) {
    readers_[std::string(name)] = [&into, least, most, name](const Json& value) -> Status {
      const bool fits = value.is_number_integer() && value >= least && value <= most &&
                        !(value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX});
      if (!fits) return bad(name, fmt::format("must be a whole number from {} to {}", least, most));
      into = static_cast<T>(value.get<int64_t>());
      return ok_status();
    };
  }
  template <typename T>
  void number(std::string_view name, T& into) {
    readers_[std::string(name)] = [&into, name](const Json& value) -> Status {
      if (!value.is_number() || !std::isfinite(value.get<double>())) return bad(name, "must be a number");
      into = static_cast<T>(value.get<double>());
      return ok_status();
    };
  }
  void boolean(std::string_view name, bool& into) {
    readers_[std::string(name)] = [&into, name](const Json& value) -> Status {
      if (!value.is_boolean()) return bad(name, "must be true or false");
      into = value.get<bool>();
      return ok_status();
    };
  }
  void text(std::string_view name, std::string& into) {
    readers_[std::string(name)] = [&into, name](const Json& value) -> Status {
      if (!value.is_string()) return bad(name, "must be a text");
      into = value.get<std::string>();
      return ok_status();
    };
  }
  void other(std::string_view name, std::function<Status(const Json&)> reader) {
    readers_[std::string(name)] = std::move(reader);
  }
  bool has(std::string_view name) const { return readers_.contains(name); }
  // Null means that a field is not given.
  Status read(const Json& object) const {
    for (const auto& [name, value] : object.items()) {
      const auto reader = readers_.find(name);
      if (reader == readers_.end()) return bad(name, "is unknown");
      if (!value.is_null()) NFP_RETURN_IF_ERROR(reader->second(value));
    }
    return ok_status();
  }

 private:
  std::map<std::string, std::function<Status(const Json&)>, std::less<>> readers_;
};

// `into`: a T, or one that may be absent.
template <typename T, typename Into>
std::function<Status(const Json&)> one_of(std::string_view name, Into& into,
                                          std::map<std::string, T, std::less<>> names) {
  return [name, &into, names = std::move(names)](const Json& value) -> Status {
    const auto found = value.is_string() ? names.find(value.get<std::string>()) : names.end();
    if (found != names.end()) {
      into = found->second;
      return ok_status();
    }
    std::string known;
    for (const auto& entry : names) known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.first);
    return bad(name, fmt::format("must be one of {}", known));
  };
}

constexpr int64_t kMost = 1 << 30;

Fields options_into(EngineSettings& settings) {
  Fields fields;
  fields.text("device", settings.model.device);
  fields.boolean("deterministic", settings.model.deterministic);
  fields.text("gemm_choices", settings.model.gemm_choices);
  fields.boolean("dummy", settings.model.dummy);
  fields.boolean("fp8_head", settings.model.fp8_head);
  fields.integer("threads", settings.model.threads, 0, 1024);
  fields.text("policy", settings.policy);
  fields.text("generation_config", settings.generation_config);
  fields.other("fp8",
               one_of<Precision>("fp8", settings.fp8, {{"fp8", Precision::kFp8}, {"fp8-w8a8", Precision::kFp8W8A8}}));
  fields.integer("max_model_len", settings.serving.max_context, 0, kMost);
  fields.integer("max_num_seqs", settings.serving.limits.max_sequences, 0, 65536);
  fields.integer("max_num_batched_tokens", settings.serving.limits.max_step_tokens, 0, kMost);
  fields.other("gpu_memory_utilization", [&settings](const Json& value) -> Status {
    const double share = value.is_number() ? value.get<double>() : 0;
    if (!(share >= 0.05 && share <= 1)) return bad("gpu_memory_utilization", "must be a number from 0.05 to 1");
    settings.serving.memory_share = share;
    return ok_status();
  });
  fields.boolean("enable_prefix_caching", settings.serving.prefix_caching);
  fields.integer("speculative_tokens", settings.serving.speculative_tokens, 0, kMaxDrafts);
  fields.other("kv_cache_dtype", one_of<DType>("kv_cache_dtype", settings.serving.kv_dtype,
                                               {{"f16", DType::kF16}, {"fp8", DType::kF8E4M3}, {"f32", DType::kF32}}));
  return fields;
}

Json tokens_json(const std::vector<OutputToken>& tokens) {
  Json out = Json::array();
  for (const OutputToken& token : tokens) {
    Json entry = {{"id", token.token}, {"precision", nfp::name_of(token.precision)}, {"logprob", token.logprob}};
    if (token.rank != 0) entry["rank"] = token.rank;
    for (const TokenLogprob& top : token.top) entry["top"].push_back({top.token, top.logprob});
    out.push_back(std::move(entry));
  }
  return out;
}

}  // namespace

Result<Json> parse_object(std::string_view text, std::string_view what) {
  if (json_too_deep(text)) return error(ErrorCode::kUsage, "{}: nested too deeply", what);
  auto json = parse_file_json<Json>(text);
  if (!json.is_object()) return error(ErrorCode::kUsage, "{}: is not a JSON object", what);
  return json;
}

Result<EngineSettings> parse_settings(const Json& json) {
  EngineSettings settings;
  settings.model.device = "auto";
  settings.serving.limits.max_sequences = 0;
  settings.serving.limits.max_step_tokens = 0;
  NFP_RETURN_IF_ERROR(options_into(settings).read(json));
  settings.model.context = settings.serving.max_context;
  settings.model.context_flag = "--max-model-len";
  settings.serving.limits.max_queue = kMost;  // the caller's list is the queue
  return settings;
}

std::string naming_options(std::string_view message) {
  constexpr std::string_view kWord = "-abcdefghijklmnopqrstuvwxyz0123456789";
  EngineSettings unused;
  const Fields options = options_into(unused);
  std::string out;
  for (size_t at = 0; at < message.size();) {
    const bool begins = at == 0 || message[at - 1] == ' ' || message[at - 1] == '(';
    const size_t end = std::min(message.find_first_not_of(kWord, at), message.size());
    std::string name;
    if (begins && message.substr(at).starts_with("--")) {
      name = message.substr(at + 2, end - at - 2);
      std::replace(name.begin(), name.end(), '-', '_');
      if (name == "dtype_kv") name = "kv_cache_dtype";
    }
    if (options.has(name)) {
      out += name;
      at = end;
    } else {
      out += message[at++];
    }
  }
  return out;
}

Result<std::vector<int32_t>> parse_ids(const Json& json, std::string_view field) {
  std::vector<int32_t> ids;
  bool fits = json.is_array();
  for (const Json& id : json) {
    fits = fits && id.is_number_integer() && id >= 0 && id <= INT32_MAX;
    if (!fits) break;
    ids.push_back(id.get<int32_t>());
  }
  if (!fits) return bad(field, "must be a list of token ids");
  return ids;
}

Result<Request> parse_request(const Json& json, const Tokenizer* tokenizer, int32_t vocab) {
  Request request;
  SamplingParams& p = request.sampling;
  Fields fields;
  fields.text("id", request.id);
  fields.other("prompt", [&](const Json& value) -> Status {
    NFP_ASSIGN_OR_RETURN(request.prompt, parse_ids(value, "prompt"));
    return ok_status();
  });
  fields.other("precision", one_of<PrecisionClass>("precision", request.precision,
                                                   {kPrecisionClassNames.begin(), kPrecisionClassNames.end()}));
  fields.number("temperature", p.temperature);
  fields.integer("top_k", p.top_k, 0, kMost);
  fields.number("top_p", p.top_p);
  fields.number("min_p", p.min_p);
  fields.number("repetition_penalty", p.repetition_penalty);
  fields.number("presence_penalty", p.presence_penalty);
  fields.number("frequency_penalty", p.frequency_penalty);
  fields.integer("seed", p.seed, INT64_MIN, INT64_MAX);
  fields.integer("max_tokens", p.max_tokens, 1, kMost);
  fields.integer("min_tokens", p.min_tokens, 0, kMost);
  fields.boolean("include_stop_str_in_output", p.include_stop);
  fields.boolean("ignore_eos", p.ignore_eos);
  fields.boolean("skip_special_tokens", request.skip_special_tokens);
  fields.other("stop", [&](const Json& value) -> Status {
    for (const Json& text : value) {
      if (!value.is_array() || !text.is_string()) return bad("stop", "must be a list of texts");
      p.stop.push_back(text.get<std::string>());
    }
    return ok_status();
  });
  fields.other("stop_token_ids", [&](const Json& value) -> Status {
    NFP_ASSIGN_OR_RETURN(p.stop_token_ids, parse_ids(value, "stop_token_ids"));
    return ok_status();
  });
  std::vector<int32_t> allowed_ids;
  std::vector<std::vector<int32_t>> bad_words;
  fields.other("allowed_token_ids", [&](const Json& value) -> Status {
    NFP_ASSIGN_OR_RETURN(allowed_ids, parse_ids(value, "allowed_token_ids"));
    if (allowed_ids.empty()) return bad("allowed_token_ids", "is empty; leave it out to allow all tokens");
    return ok_status();
  });
  fields.other("bad_words", [&](const Json& value) -> Status {
    if (tokenizer == nullptr) return bad("bad_words", "needs a tokenizer, and this model has none");
    for (const Json& text : value) {
      if (!value.is_array() || !text.is_string()) return bad("bad_words", "must be a list of texts");
      auto words = bad_word_tokens(*tokenizer, text.get<std::string>());
      if (!words.ok()) return bad("bad_words", fmt::format("has a word that cannot be: {}", words.error().message));
      for (std::vector<int32_t>& one : *words) bad_words.push_back(std::move(one));
    }
    return ok_status();
  });
  fields.other("logit_bias", [&](const Json& value) -> Status {
    for (const Json& pair : value) {
      const bool shaped = pair.is_array() && pair.size() == 2 && pair[0].is_number_integer() && pair[1].is_number();
      if (!shaped || pair[0] < 0 || pair[0] > INT32_MAX) {
        return bad("logit_bias", "must be a list of [token id, bias]");
      }
      p.logit_bias.emplace_back(pair[0].get<int32_t>(), pair[1].get<float>());
    }
    return ok_status();
  });
  fields.other("logprobs", [&](const Json& value) -> Status {
    if (!value.is_number_integer() || value < 0 || value > kMaxTopLogprobs) {
      return bad("logprobs", fmt::format("must be 0 to {}", kMaxTopLogprobs));
    }
    p.logprobs = true;
    p.top_logprobs = value.get<int32_t>();
    return ok_status();
  });
  fields.integer("prompt_logprobs", p.prompt_logprobs, 0, kMaxTopLogprobs);
  NFP_RETURN_IF_ERROR(fields.read(json));
  if (request.id.empty()) return bad("id", "is missing");
  if (!allowed_ids.empty() || !bad_words.empty()) {
    if (const auto wrong = AllowedTokens::make(allowed_ids, std::move(bad_words), vocab, &p.allowed)) {
      return Error{ErrorCode::kInvalidInput, wrong->message};
    }
  }
  return request;
}

Json to_json(const RequestOutput& output) {
  Json out = {{"id", output.id}, {"text", output.text}, {"tokens", tokens_json(output.tokens)}};
  if (!output.prompt_logprobs.empty()) out["prompt_logprobs"] = tokens_json(output.prompt_logprobs);
  if (output.finish) out["finish_reason"] = name_of(*output.finish);
  if (output.stop_token) out["stop_reason"] = *output.stop_token;
  if (output.stop_string) out["stop_reason"] = *output.stop_string;
  if (!output.error.empty()) out["error"] = naming_options(output.error);
  out["usage"] = {{"prompt_tokens", output.usage.prompt_tokens},
                  {"cached_tokens", output.usage.cached_tokens},
                  {"completion_tokens", output.usage.completion_tokens},
                  {"fp16_tokens", output.usage.prompt.fp16 + output.usage.completion.fp16},
                  {"fp8_tokens", output.usage.prompt.fp8 + output.usage.completion.fp8}};
  return out;
}

}  // namespace nfp::capi
