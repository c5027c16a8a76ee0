#include "io/gguf_families.h"

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

void add_experts(const GgufFacts& facts, Json& config) {
  const GgufFile& gguf = facts.gguf;
  const FamilyId id = facts.family.id;
  const int64_t count = gguf.integer(facts.key("expert_count")).value_or(0);
  const int64_t used = gguf.integer(facts.key("expert_used_count")).value_or(0);
  config[id == FamilyId::kMixtral ? "num_local_experts" : "num_experts"] = count;
  config["num_experts_per_tok"] = used;
  const int64_t intermediate = config["intermediate_size"];
  config["moe_intermediate_size"] =
      gguf.integer(facts.key("expert_feed_forward_length")).value_or(used > 0 ? intermediate / used : 0);
  config["shared_expert_intermediate_size"] =
      gguf.integer(facts.key("expert_shared_feed_forward_length")).value_or(intermediate);
  // Files do not say whether a token's weights are made to sum to 1.
  config["norm_topk_prob"] = id == FamilyId::kQwen3Moe;
  config["mlp_only_layers"] = facts.dense_layers;
}

// The window, and which layers have it: all but each n-th, or what the file says of each one. Where it says neither,
// the configuration's default is llama.cpp's. `otherwise`: the window where it names none.
void add_windows(const GgufFacts& facts, Json& config, int64_t otherwise) {
  const int64_t window = facts.gguf.integer(facts.key("attention.sliding_window")).value_or(otherwise);
  config["sliding_window"] = window > 0 ? Json(window) : Json();
  const std::string key = facts.key("attention.sliding_window_pattern");
  const auto* slides = facts.gguf.array<int64_t>(key);
  const auto period = facts.gguf.integer(key);
  if (window > 0 && slides == nullptr && !period) return;
  const int64_t layers = config["num_hidden_layers"];
  Json& types = config["layer_types"] = Json::array();  // refused where it stays empty
  if (window > 0 && slides != nullptr && static_cast<int64_t>(slides->size()) != layers) return;
  for (int64_t i = 0; i < std::min(layers, kMostLayers); ++i) {
    const bool has = window > 0 && (slides != nullptr ? (*slides)[static_cast<size_t>(i)] != 0
                                                      : *period == 0 || (i + 1) % *period != 0);
    types.push_back(has ? "sliding_attention" : "full_attention");
  }
}

void add_gemma(const GgufFacts& facts, Json& config) {
  const GgufFile& gguf = facts.gguf;
  const bool third = facts.family.id == FamilyId::kGemma3;
  const int64_t layers = config["num_hidden_layers"], heads = config["num_attention_heads"];
  const int64_t hidden = config["hidden_size"];
  add_windows(facts, config, third ? 0 : 4096);
  if (third) config["rope_local_base_freq"] = gguf.number(facts.key("rope.freq_base_swa")).value_or(10000.0);
  // Only the models of 27 B parameters scale by another size than a head's.
  config["query_pre_attn_scalar"] =
      layers == (third ? 62 : 46) ? hidden / heads : config.value("head_dim", hidden / heads);
  // 0 is none.
  const auto cap = [&](const char* key, double otherwise) {
    return gguf.number(facts.key(key)).value_or(third ? 0.0 : otherwise);
  };
  config["attn_logit_softcapping"] = third ? 0.0 : cap("attn_logit_softcapping", 50.0);
  config["final_logit_softcapping"] = cap("final_logit_softcapping", 30.0);
  config["hidden_activation"] = "gelu_pytorch_tanh";
}

// Without a size all of a head rotates.
void add_partial_rotation(const GgufFacts& facts, Json& config) {
  const int64_t head_dim = config.value("head_dim", int64_t{0});
  const int64_t rotating = facts.gguf.integer(facts.key("rope.dimension_count")).value_or(head_dim);
  if (head_dim > 0) config["partial_rotary_factor"] = static_cast<double>(rotating) / static_cast<double>(head_dim);
}

void add_phi3(const GgufFacts& facts, Json& config) {
  const GgufFile& gguf = facts.gguf;
  const int64_t window = gguf.integer(facts.key("attention.sliding_window")).value_or(0);
  config["sliding_window"] = window > 0 ? Json(window) : Json();
  add_partial_rotation(facts, config);
  const int64_t context = config.value("max_position_embeddings", int64_t{0});
  config["original_max_position_embeddings"] =
      gguf.integer(facts.key("rope.scaling.original_context_length")).value_or(context);
  if (facts.long_factors.empty() && facts.short_factors.empty()) return;
  Json scaling = {{"type", "longrope"}, {"short_factor", facts.short_factors}, {"long_factor", facts.long_factors}};
  if (const auto factor = gguf.number(facts.key("rope.scaling.attn_factor"))) scaling["attention_factor"] = *factor;
  config["rope_scaling"] = scaling;
}

void add_granite(const GgufFacts& facts, Json& config) {
  const int64_t hidden = config["hidden_size"], heads = config["num_attention_heads"];
  const double head_dim = config.value("head_dim", hidden / heads);
  const auto number = [&](const char* key, double otherwise) {  // a 0 counts as none
    const double value = facts.gguf.number(facts.key(key)).value_or(0.0);
    return value == 0 ? otherwise : value;
  };
  config["embedding_multiplier"] = number("embedding_scale", 1.0);
  config["residual_multiplier"] = number("residual_scale", 1.0);
  config["attention_multiplier"] = number("attention.scale", 1.0 / std::sqrt(head_dim));
  config["logits_scaling"] = number("logit_scale", 1.0);
}

enum class Kind : uint8_t { kWhole, kNumber, kBoolean, kText };
struct KindOfKey {
  const char* key;  // behind the architecture, but for the tokenizer's
  Kind kind;
};
// Keys that a file may leave out, and so are read as absent where they are of another kind.
constexpr KindOfKey kKinds[] = {
    {"context_length", Kind::kWhole},
    {"attention.head_count_kv", Kind::kWhole},
    {"attention.key_length", Kind::kWhole},
    {"attention.layer_norm_rms_epsilon", Kind::kNumber},
    {"attention.causal", Kind::kBoolean},
    {"attention.clamp_kqv", Kind::kNumber},
    {"attention.scale", Kind::kNumber},
    {"attention.temperature_scale", Kind::kNumber},
    {"attention.sliding_window", Kind::kWhole},
    {"attn_logit_softcapping", Kind::kNumber},
    {"final_logit_softcapping", Kind::kNumber},
    {"embedding_scale", Kind::kNumber},
    {"residual_scale", Kind::kNumber},
    {"logit_scale", Kind::kNumber},
    {"expert_count", Kind::kWhole},
    {"expert_used_count", Kind::kWhole},
    {"expert_feed_forward_length", Kind::kWhole},
    {"expert_shared_feed_forward_length", Kind::kWhole},
    {"expert_gating_func", Kind::kWhole},
    {"expert_weights_scale", Kind::kNumber},
    {"nextn_predict_layers", Kind::kWhole},
    {"rope.freq_base", Kind::kNumber},
    {"rope.freq_base_swa", Kind::kNumber},
    {"rope.dimension_count", Kind::kWhole},
    {"rope.scale_linear", Kind::kNumber},
    {"rope.scaling.type", Kind::kText},
    {"rope.scaling.factor", Kind::kNumber},
    {"rope.scaling.attn_factor", Kind::kNumber},
    {"rope.scaling.original_context_length", Kind::kWhole},
    {"rope.scaling.finetuned", Kind::kBoolean},
    {"rope.scaling.yarn_ext_factor", Kind::kNumber},
    {"rope.scaling.yarn_attn_factor", Kind::kNumber},
    {"rope.scaling.yarn_log_multiplier", Kind::kNumber},
    {"rope.scaling.yarn_beta_fast", Kind::kNumber},
    {"rope.scaling.yarn_beta_slow", Kind::kNumber},
};
constexpr KindOfKey kTokenizerKinds[] = {
    {"tokenizer.ggml.bos_token_id", Kind::kWhole},       {"tokenizer.ggml.eos_token_id", Kind::kWhole},
    {"tokenizer.ggml.eot_token_id", Kind::kWhole},       {"tokenizer.ggml.eom_token_id", Kind::kWhole},
    {"tokenizer.ggml.unknown_token_id", Kind::kWhole},   {"tokenizer.ggml.padding_token_id", Kind::kWhole},
    {"tokenizer.ggml.add_bos_token", Kind::kBoolean},    {"tokenizer.ggml.add_eos_token", Kind::kBoolean},
    {"tokenizer.ggml.add_space_prefix", Kind::kBoolean},
};

// llama.cpp's converter copies a configuration's attention_factor, which OLMo 3's has although it is what YaRN's factor
// implies. As another number the key is ambiguous: llama.cpp multiplies by it what the factor implies.
bool is_implied_by_yarn(const GgufFacts& facts, double attention) {
  const double factor = facts.gguf.number(facts.key("rope.scaling.factor")).value_or(0.0);
  return facts.gguf.text(facts.key("rope.scaling.type")) == "yarn" && factor > 1 &&
         std::abs(attention - (0.1 * std::log(factor) + 1)) < 1e-4;
}

Status check_kind(const GgufFile& gguf, const std::string& path, const std::string& key, Kind kind) {
  if (!gguf.metadata.contains(key)) return ok_status();
  const auto refuse = [&](const char* what) {
    return error(ErrorCode::kInvalidInput, "{}: metadata '{}' is not {}", path, key, what);
  };
  switch (kind) {
    case Kind::kWhole:
      return gguf.integer(key) ? ok_status() : refuse("a whole number");
    case Kind::kNumber:
      return gguf.number(key) ? ok_status() : refuse("a number");
    case Kind::kBoolean:
      return gguf.boolean(key) ? ok_status() : refuse("true or false");
    case Kind::kText:
      return gguf.text(key) ? ok_status() : refuse("a text");
  }
  return ok_status();
}

}  // namespace

Status check_kinds(const Family& family, const GgufFile& gguf, const std::string& path) {
  for (const KindOfKey& row : kKinds) {
    NFP_RETURN_IF_ERROR(check_kind(gguf, path, fmt::format("{}.{}", family.gguf, row.key), row.kind));
  }
  for (const KindOfKey& row : kTokenizerKinds) NFP_RETURN_IF_ERROR(check_kind(gguf, path, row.key, row.kind));
  const std::string pattern = fmt::format("{}.attention.sliding_window_pattern", family.gguf);
  if (!gguf.array<int64_t>(pattern)) return check_kind(gguf, path, pattern, Kind::kWhole);
  return ok_status();
}

std::string GgufFacts::key(std::string_view suffix) const { return fmt::format("{}.{}", family.gguf, suffix); }

Result<const Family*> family_of_gguf(const GgufFile& gguf, const std::string& path) {
  const auto name = gguf.text("general.architecture");
  if (!name) return error(ErrorCode::kInvalidInput, "{}: metadata 'general.architecture' is missing", path);
  const bool experts = gguf.integer(fmt::format("{}.expert_count", *name)).value_or(0) > 0;
  const bool windows = gguf.integer(fmt::format("{}.attention.sliding_window", *name)).value_or(0) > 0;
  std::set<std::string_view> supported;
  const Family* found = nullptr;
  for (const Family& known : families()) {
    if (known.gguf == *name && known.has(TensorRole::kRouter) == experts && (found == nullptr || windows)) {
      found = &known;
    }
    if (!known.gguf.empty()) supported.insert(known.gguf);
  }
  if (found != nullptr) return found;
  if (supported.contains(*name)) {
    return error(ErrorCode::kUnsupported, "{}: metadata '{}.expert_count' is {}, which is not supported", path, *name,
                 experts ? "above 0" : "0 or missing");
  }
  return error(ErrorCode::kUnsupported, "{}: architecture '{}' is not supported in GGUF files; supported are {}", path,
               *name, fmt::join(supported, ", "));
}

void add_family_fields(const GgufFacts& facts, Json& config) {
  switch (facts.family.id) {
    case FamilyId::kGemma:
      config["hidden_activation"] = "gelu_pytorch_tanh";
      return;
    case FamilyId::kGemma2:
    case FamilyId::kGemma3:
      return add_gemma(facts, config);
    case FamilyId::kGranite:
      return add_granite(facts, config);
    case FamilyId::kExaone4:
    case FamilyId::kOlmo3:
      return add_windows(facts, config, 0);
    case FamilyId::kGlm4:
      return add_partial_rotation(facts, config);
    case FamilyId::kPhi3:
      return add_phi3(facts, config);
    case FamilyId::kMistral:
      config["sliding_window"] = nullptr;
      return;
    case FamilyId::kSmolLm3:
      config["no_rope_layer_interval"] = 4;
      return;
    case FamilyId::kMixtral:
    case FamilyId::kQwen2Moe:
    case FamilyId::kQwen3Moe:
    case FamilyId::kOlmoe:
      config["sliding_window"] = nullptr;
      return add_experts(facts, config);
    default:
      return;
  }
}

Status check_metadata(const GgufFacts& facts, const Json& config) {
  const GgufFile& gguf = facts.gguf;
  const auto refuse = [&](const char* suffix, const auto& value) {
    return error(ErrorCode::kUnsupported, "{}: metadata '{}' is {}, which is not supported for {}", facts.path,
                 facts.key(suffix), value, facts.family.gguf);
  };
  if (!gguf.boolean(facts.key("attention.causal")).value_or(true)) return refuse("attention.causal", false);
  const bool long_rope = facts.family.id == FamilyId::kPhi3;
  const bool partial = long_rope || facts.family.id == FamilyId::kGlm4;
  const auto rotating = gguf.integer(facts.key("rope.dimension_count"));
  const int64_t head_dim = config.value("head_dim", int64_t{0});
  if (rotating && head_dim > 0 && *rotating != head_dim && !partial) return refuse("rope.dimension_count", *rotating);
  const bool has_factors = !facts.long_factors.empty() || !facts.short_factors.empty();
  if (!long_rope && has_factors) {
    return error(ErrorCode::kUnsupported,
                 "{}: tensors 'rope_factors_long' and 'rope_factors_short' are not supported for {}", facts.path,
                 facts.family.gguf);
  }
  const double attention = gguf.number(facts.key("rope.scaling.attn_factor")).value_or(1.0);
  if (attention != 1 && !has_factors && !is_implied_by_yarn(facts, attention)) {
    return refuse("rope.scaling.attn_factor", attention);
  }
  // GLM 4.1V's; the rows of q and k are in another order there than in GLM 4's.
  if (gguf.metadata.contains(facts.key("rope.dimension_sections"))) return refuse("rope.dimension_sections", "given");
  // The last of its layers then predict tokens further on, and are none of the model's own.
  const auto predicting = gguf.integer(facts.key("nextn_predict_layers")).value_or(0);
  if (predicting != 0) return refuse("nextn_predict_layers", predicting);
  const double clamp = gguf.number(facts.key("attention.clamp_kqv")).value_or(0.0);
  if (clamp != 0) return refuse("attention.clamp_kqv", clamp);
  // Ministral 3's queries grow with their position.
  const double growth = gguf.number(facts.key("attention.temperature_scale")).value_or(0.0);
  if (growth != 0) return refuse("attention.temperature_scale", growth);
  // llama.cpp takes it for whether the heads of a Granite rotate at all.
  if (facts.family.id == FamilyId::kGranite && !gguf.boolean(facts.key("rope.scaling.finetuned")).value_or(true)) {
    return refuse("rope.scaling.finetuned", false);
  }
  const auto gating = gguf.integer(facts.key("expert_gating_func")).value_or(0);
  if (gating > 1) return refuse("expert_gating_func", gating);  // 1: softmax
  const double scale = gguf.number(facts.key("expert_weights_scale")).value_or(0.0);
  if (scale != 0 && scale != 1) return refuse("expert_weights_scale", scale);
  return ok_status();
}

Status refuse_rope_scaling(const GgufFacts& facts) {
  const std::string key = facts.key("rope.scaling.factor");
  const auto type = facts.gguf.text(facts.key("rope.scaling.type")).value_or("linear");
  const double factor = facts.gguf.number(key).value_or(0.0);
  if (factor == 0 || factor == 1 || (type != "linear" && type != "yarn")) return ok_status();
  return error(ErrorCode::kUnsupported, "{}: metadata '{}' is {} ({}), which is not supported beside rope factors",
               facts.path, key, factor, type);
}

Status add_rope_scaling(const GgufFacts& facts, Json& config) {
  const GgufFile& gguf = facts.gguf;
  const std::string type_key = facts.key("rope.scaling.type");
  const auto type = gguf.text(type_key).value_or("linear");
  // The older name is of linear scaling; 0 is none.
  auto factor = gguf.number(facts.key("rope.scaling.factor")).value_or(0.0);
  if (factor == 0 && type == "linear") factor = gguf.number(facts.key("rope.scale_linear")).value_or(0.0);
  if (factor == 0) factor = 1;
  if (type == "none" || (type == "linear" && factor == 1)) return ok_status();
  if (type != "linear" && type != "yarn") {
    return error(ErrorCode::kUnsupported, "{}: metadata '{}' is '{}', which is not supported for {}", facts.path,
                 type_key, type, facts.family.gguf);
  }
  Json scaling = {{"rope_type", std::string(type)}, {"factor", factor}};
  if (type == "yarn") {
    for (const char* field : {"yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"}) {
      const std::string key = facts.key(fmt::format("rope.scaling.{}", field));
      const auto value = gguf.number(key);
      if (!value || (field == std::string_view("yarn_attn_factor") && is_implied_by_yarn(facts, *value))) continue;
      return error(ErrorCode::kUnsupported, "{}: metadata '{}' is not supported", facts.path, key);
    }
    if (const auto original = gguf.integer(facts.key("rope.scaling.original_context_length"))) {
      scaling["original_max_position_embeddings"] = *original;
    }
    for (const auto& [hf, name] :
         {std::pair("beta_fast", "yarn_beta_fast"), std::pair("beta_slow", "yarn_beta_slow")}) {
      const auto value = gguf.number(facts.key(fmt::format("rope.scaling.{}", name)));
      if (value) scaling[hf] = *value;
    }
  }
  config["rope_scaling"] = scaling;
  return ok_status();
}

}  // namespace nfp
