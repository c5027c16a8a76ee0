#include "model/config.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "io/fp8_checkpoint.h"
#include "io/model_json.h"
#include "model/families/families.h"

namespace nfp {
namespace {

using Json = nlohmann::json;

// Reads fields of one JSON object; the first bad one is remembered and the rest read as defaults.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(const char* field) const { return object_.contains(field) && !object_[field].is_null(); }
  // Of a field where null is a value too: `null` for that, `left_out` where there is no such field.
  int32_t null_or(const char* field, int32_t null, int32_t left_out) const {
    return object_.contains(field) ? null : left_out;
  }

  int32_t integer(const char* field, std::optional<int32_t> fallback, int32_t least, int32_t most) {
    if (!has(field)) return absent(field, fallback);
    const Json& value = object_[field];
    if (!value.is_number_integer()) return wrong(field, value, "a whole number", least);
    const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(most)
                                                 : value.get<int64_t>() <= most;
    if (!fits || value.get<int64_t>() < least) {
      return wrong(field, value, fmt::format("a whole number from {} to {}", least, most), least);
    }
    return value.get<int32_t>();
  }

  float number(const char* field, std::optional<float> fallback, double least, double most) {
    if (!has(field)) return absent(field, fallback);
    const Json& value = object_[field];
    const double number = value.is_number() ? value.get<double>() : NAN;
    if (!(number >= least && number <= most)) {
      return wrong(field, value, fmt::format("a number from {} to {}", least, most), static_cast<float>(least));
    }
    return static_cast<float>(number);
  }

  // 0 for null.
  float number_or_null(const char* field, float left_out, double least, double most) {
    return object_.contains(field) && object_[field].is_null() ? 0.0f : number(field, left_out, least, most);
  }

  std::vector<float> numbers(const char* field, int32_t count, double least, double most) {
    std::vector<float> found;
    const bool is_list = has(field) && object_[field].is_array() && object_[field].size() == static_cast<size_t>(count);
    for (const Json& entry : is_list ? object_[field] : Json::array()) {
      const double value = entry.is_number() ? entry.get<double>() : NAN;
      if (value >= least && value <= most) found.push_back(static_cast<float>(value));
    }
    if (!is_list || found.size() != static_cast<size_t>(count)) {
      fail(field, fmt::format("must be a list of {} numbers from {} to {}", count, least, most));
    }
    return found;
  }

  bool boolean(const char* field, bool fallback) {
    if (!has(field)) return fallback;
    const Json& value = object_[field];
    if (!value.is_boolean()) return wrong(field, value, "true or false", fallback);
    return value.get<bool>();
  }

  std::string text(const char* field, std::optional<std::string> fallback) {
    if (!has(field)) return absent(field, std::move(fallback));
    const Json& value = object_[field];
    if (!value.is_string()) return wrong(field, value, "a string", std::string());
    return value.get<std::string>();
  }

  // An id, a list of ids, or nothing.
  std::vector<int32_t> ids(const char* field) {
    std::vector<int32_t> found;
    if (!has(field)) return found;
    const Json& value = object_[field];
    const Json list = value.is_array() ? value : Json::array({value});
    for (const Json& entry : list) {
      if (!entry.is_number_integer() || entry.get<int64_t>() < 0 || entry.get<int64_t>() > INT32_MAX) {
        wrong(field, value, "a token id or a list of token ids", 0);
        return {};
      }
      found.push_back(entry.get<int32_t>());
    }
    return found;
  }

  // A list of whole numbers from `least` to `most`, or nothing.
  std::vector<int32_t> integers(const char* field, int32_t least, int32_t most) {
    std::vector<int32_t> found;
    if (!has(field)) return found;
    const Json& value = object_[field];
    for (const Json& entry : value.is_array() ? value : Json::array()) {
      const bool whole = entry.is_number_integer() && entry.get<double>() >= least && entry.get<double>() <= most;
      if (whole) found.push_back(entry.get<int32_t>());
    }
    if (!value.is_array() || found.size() != value.size()) {
      fail(field, fmt::format("must be a list of whole numbers from {} to {}", least, most));
    }
    return found;
  }

  // One name a layer; which of them are "sliding_attention". Nothing where the field is not there.
  std::vector<bool> sliding_layers(const char* field, int32_t layers) {
    std::vector<bool> slides;
    if (!has(field)) return slides;
    const Json& value = object_[field];
    if (!value.is_array() || value.size() != static_cast<size_t>(layers)) {
      fail(field, fmt::format("must be a list with one entry for each of the {} layers", layers));
      return slides;
    }
    for (const Json& entry : value) {
      if (entry != "full_attention" && entry != "sliding_attention") {
        fail(field, fmt::format("has the entry {}; supported are full_attention and sliding_attention", shown(entry)));
        return {};
      }
      slides.push_back(entry == "sliding_attention");
    }
    return slides;
  }

  bool is_text(const char* field) const { return has(field) && object_[field].is_string(); }
  // The same of letters that the layers take in turn, L those that slide. The last layer never does.
  std::vector<bool> lettered_layers(const char* field, int32_t layers) {
    const std::string letters = text(field, std::nullopt);
    if (letters.empty() || letters.find_first_not_of("LG") != std::string::npos) {
      fail(field, fmt::format("is \"{}\"; as a text it is of the letters L, layers with a window, and G", letters));
      return {};
    }
    std::vector<bool> slides;
    slides.reserve(static_cast<size_t>(layers));
    for (int32_t i = 0; i < layers; ++i) {
      slides.push_back(i + 1 < layers && letters[static_cast<size_t>(i) % letters.size()] == 'L');
    }
    return slides;
  }

  void fail(const char* field, std::string_view message) {
    if (!error_) error_ = nfp::error(ErrorCode::kInvalidInput, "{}: field '{}' {}", where_, field, message);
  }
  Status status() const { return error_ ? Status(*error_) : ok_status(); }
  const std::string& where() const { return where_; }

 private:
  template <typename T>
  T absent(const char* field, std::optional<T> fallback) {
    if (!fallback) fail(field, "is missing; this does not look like a complete model configuration");
    return fallback.value_or(T());
  }
  static std::string shown(const Json& value) {
    if (value.is_number_float() && std::isnan(value.get<double>())) return "NaN";
    if (value.is_number_float() && std::isinf(value.get<double>())) return value < 0 ? "-Infinity" : "Infinity";
    std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    return text;
  }
  template <typename T>
  T wrong(const char* field, const Json& value, std::string_view expected, T fallback) {
    fail(field, fmt::format("is {}; it must be {}", shown(value), expected));
    return fallback;
  }

  const Json& object_;
  std::string where_;
  std::optional<Error> error_;
};

void read_llama3(Fields& fields, RopeScaling& rope) {
  rope.low_freq_factor = fields.number("low_freq_factor", std::nullopt, 1e-3, 1e6);
  rope.high_freq_factor = fields.number("high_freq_factor", std::nullopt, 1e-3, 1e6);
  if (rope.high_freq_factor <= rope.low_freq_factor) fields.fail("high_freq_factor", "must be above low_freq_factor");
}

void read_yarn(Fields& fields, RopeScaling& rope) {
  rope.beta_fast = fields.number("beta_fast", 32.0f, 1e-3, 1e6);
  rope.beta_slow = fields.number("beta_slow", 1.0f, 1e-3, 1e6);
  rope.truncate = fields.boolean("truncate", true);
  // YaRN's temperature of attention, as a factor of cosines and sines.
  const auto temperature = [&](float scale) {
    return rope.factor <= 1.0f ? 1.0f : 0.1f * scale * std::log(rope.factor) + 1.0f;
  };
  if (fields.number("llama_4_scaling_beta", 0.0f, -1e6, 1e6) != 0) {
    fields.fail("llama_4_scaling_beta", "is not 0; queries that grow with their position are not supported");
  }
  const float mscale = fields.number("mscale", 0.0f, 0.0, 1e3), all = fields.number("mscale_all_dim", 0.0f, 0.0, 1e3);
  const float implied = mscale > 0 && all > 0 ? temperature(mscale) / temperature(all) : temperature(1.0f);
  rope.attention_factor = fields.number("attention_factor", implied, 1e-3, 1e3);
}

void read_longrope(Fields& fields, RopeScaling& rope, const ModelConfig& config) {
  for (const char* field : {"short_mscale", "long_mscale"}) {
    if (fields.has(field)) fields.fail(field, "is not supported; attention_factor holds for both sets of factors");
  }
  rope.short_factors = fields.numbers("short_factor", config.rope.dim / 2, 1e-3, 1e6);
  rope.long_factors = fields.numbers("long_factor", config.rope.dim / 2, 1e-3, 1e6);
  const double given = fields.number("factor", 0.0f, 0.0, 1e6);
  const double extension = given > 0 ? given : static_cast<double>(config.max_context) / rope.original_context;
  const double implied = extension <= 1 ? 1 : std::sqrt(1 + std::log(extension) / std::log(rope.original_context));
  rope.attention_factor = fields.number("attention_factor", static_cast<float>(implied), 1e-3, 1e3);
}

// The rope of layers with a window, as "rope_parameters" has it. `part`: that of the other layers.
Status read_local_rope(const Json& object, const Fields& fields, const char* key, const FamilyDefaults& defaults,
                       float part, float& local_theta) {
  Fields local(object, fmt::format("{}: {}: sliding_attention", fields.where(), key));
  local_theta = local.number("rope_theta", std::nullopt, 1.0, 1e12);
  if (local.text("rope_type", "default") != "default") local.fail("rope_type", "must be default");
  if (const float own = local.number("partial_rotary_factor", part, 1e-3, 1.0); own != part) {
    local.fail("partial_rotary_factor", fmt::format("is {}, but {} in full_attention; it must be the same", own, part));
  }
  NFP_RETURN_IF_ERROR(local.status());
  if (defaults.local_rope) return ok_status();
  return error(ErrorCode::kUnsupported,
               "{}: {}: field 'sliding_attention' is set, but all layers of this model rotate alike", fields.where(),
               key);
}

// "rope_scaling" up to transformers 4, "rope_parameters" (which also holds rope_theta, and partial_rotary_factor) from
// 5 on; there, where layers with a window have their own, under "full_attention" and "sliding_attention".
Status read_rope(const Json& root, Fields& fields, const FamilyDefaults& defaults, ModelConfig& config,
                 float& local_theta) {
  const char* key = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  Json both;  // "rope_scaling" counts where there are both, as in transformers 5; the rest is of the other
  if (fields.has("rope_parameters") && fields.has("rope_scaling") && !root["rope_scaling"].empty()) {
    const Json &parameters = root["rope_parameters"], &scaling = root["rope_scaling"];
    if (!parameters.is_object() || !scaling.is_object() || parameters.contains("full_attention")) {
      return error(ErrorCode::kUnsupported,
                   "{}: fields 'rope_parameters' and 'rope_scaling' are both set; leave one out", fields.where());
    }
    both = scaling;
    for (const char* name : {"rope_theta", "partial_rotary_factor"}) {
      if (parameters.contains(name) && !both.contains(name)) both[name] = parameters[name];
    }
    key = "rope_scaling";
  }
  Rope& rope = config.rope;
  rope.theta = fields.number("rope_theta", defaults.rope_theta, 1.0, 1e12);
  const float usual = defaults.partial_rotary > 0 ? defaults.partial_rotary : 1.0f;
  float part = fields.number("partial_rotary_factor", usual, 1e-3, 1.0);
  const Json none = Json::object();
  const Json* object = both.is_object() ? &both : fields.has(key) ? &root[key] : &none;
  if (!object->is_object()) {
    return error(ErrorCode::kInvalidInput, "{}: field '{}' must be an object or null", fields.where(), key);
  }
  const Json* local = nullptr;
  if (object->contains("full_attention") || object->contains("sliding_attention")) {
    const auto not_an_object = [&](const char* name) {
      return error(ErrorCode::kInvalidInput, "{}: {}: field '{}' must be an object", fields.where(), key, name);
    };
    const auto full = object->find("full_attention"), slides = object->find("sliding_attention");
    if (full == object->end() || !full->is_object()) return not_an_object("full_attention");
    if (slides != object->end() && !slides->is_null()) {
      if (!slides->is_object()) return not_an_object("sliding_attention");
      local = &*slides;
    }
    object = &*full;
  }
  Fields scaling(*object, fmt::format("{}: {}", fields.where(), key));
  rope.theta = scaling.number("rope_theta", rope.theta, 1.0, 1e12);
  part = scaling.number("partial_rotary_factor", part, 1e-3, 1.0);
  if (local != nullptr) NFP_RETURN_IF_ERROR(read_local_rope(*local, fields, key, defaults, part, local_theta));
  if (part != 1.0f && defaults.partial_rotary == 0) {
    scaling.fail("partial_rotary_factor", fmt::format("is {}; heads of {} rotate as a whole", part, config.model_type));
  }
  rope.dim = static_cast<int32_t>(static_cast<double>(part) * config.head_dim + 1e-4);
  if (rope.dim % 2 != 0 || rope.dim < 2) {
    scaling.fail("partial_rotary_factor", fmt::format("makes {} features of a head rotate; it must be even", rope.dim));
  }
  std::string kind = scaling.text("rope_type", scaling.text("type", "default"));
  if (defaults.has_su_scaling && kind == "su") kind = "longrope";
  if (kind == "linear" || kind == "llama3" || kind == "yarn") {
    rope.scaling.factor = scaling.number("factor", std::nullopt, 1e-3, 1e6);
  }
  if (kind == "llama3" || kind == "yarn" || kind == "longrope") {
    // As in transformers: what stands beside the object, or the family's, goes before what is in it.
    const char* original = "original_max_position_embeddings";
    const int32_t least = kind == "longrope" ? 2 : 1;
    rope.scaling.original_context = fields.has(original) || defaults.original_context > 0
                                        ? fields.integer(original, defaults.original_context, least, 1 << 30)
                                        : scaling.integer(original, config.max_context, least, 1 << 30);
  }
  if (kind == "linear") {
    rope.scaling.kind = RopeScaling::Kind::kLinear;
  } else if (kind == "llama3") {
    rope.scaling.kind = RopeScaling::Kind::kLlama3;
    read_llama3(scaling, rope.scaling);
  } else if (kind == "yarn") {
    rope.scaling.kind = RopeScaling::Kind::kYarn;
    read_yarn(scaling, rope.scaling);
    // Those who add it for long texts leave max_position_embeddings as it was (Qwen2.5's and Qwen3's model cards).
    const double extended = static_cast<double>(rope.scaling.original_context) * rope.scaling.factor;
    config.max_context = std::max(config.max_context, static_cast<int32_t>(std::min(extended, 0x1p30)));
  } else if (kind == "longrope") {
    rope.scaling.kind = RopeScaling::Kind::kLongrope;
    read_longrope(scaling, rope.scaling, config);
  } else if (kind == "dynamic") {
    // It stretches sequences beyond max_position_embeddings, as far as each has come; a context ends there.
    scaling.number("factor", std::nullopt, 1e-3, 1e6);
  } else if (kind != "default") {
    scaling.fail("rope_type",
                 fmt::format("is '{}'; supported are default, linear, dynamic, llama3, yarn and longrope", kind));
  }
  return scaling.status();
}

// Mixtral writes num_local_experts, others num_experts.
void read_experts(Fields& fields, const FamilyDefaults& defaults, const ModelConfig& config, FamilyFields& extra) {
  if (defaults.experts == 0) return;
  const char* count = fields.has("num_local_experts") ? "num_local_experts" : "num_experts";
  extra.experts = fields.integer(count, defaults.experts, 1, kMaxExperts);
  extra.top_experts = fields.integer("num_experts_per_tok", defaults.top_experts, 1, kMaxTopExperts);
  if (extra.top_experts > extra.experts) {
    fields.fail("num_experts_per_tok", fmt::format("is {}, more than {} {}", extra.top_experts, count, extra.experts));
  }
  constexpr int32_t kMost = 1 << 22;
  extra.expert_intermediate = fields.integer("moe_intermediate_size", defaults.expert_intermediate, 0, kMost);
  extra.shared_intermediate = fields.integer("shared_expert_intermediate_size", defaults.shared_intermediate, 0, kMost);
  extra.norm_topk_prob = fields.boolean("norm_topk_prob", false);
  extra.sparse_step = fields.integer("decoder_sparse_step", 1, 1, 4096);
  extra.mlp_only_layers = fields.integers("mlp_only_layers", 0, config.layers - 1);
}

// Fields that change what attention sees in some model of another family, and that no model here computes.
void refuse_other_attention(Fields& fields) {
  const bool causal = fields.null_or("is_causal", 0, 1) != 0;  // transformers takes a null for false
  if (!fields.boolean("is_causal", causal)) fields.fail("is_causal", "is not true; tokens see earlier ones only");
  if (fields.boolean("use_bidirectional_attention", false)) {
    fields.fail("use_bidirectional_attention", "is true; tokens see earlier ones only");
  }
  if (fields.integer("attention_chunk_size", 0, 0, INT32_MAX) != 0) {
    fields.fail("attention_chunk_size", "is not null; attention in chunks is not supported");
  }
}

// What every decoder has: its sizes, and its activation.
void read_sizes(Fields& fields, const FamilyDefaults& defaults, ModelConfig& config) {
  constexpr int32_t kMaxDim = 1 << 20;
  config.hidden = fields.integer("hidden_size", std::nullopt, 1, kMaxDim);
  config.layers = fields.integer("num_hidden_layers", std::nullopt, 1, 4096);
  const auto given = [](int32_t value) { return value > 0 ? std::optional(value) : std::nullopt; };
  config.heads = fields.integer("num_attention_heads", given(defaults.heads), 1, 4096);
  const int32_t kv_heads = defaults.kv_heads > 0 ? defaults.kv_heads : config.heads;
  config.kv_heads =
      fields.integer("num_key_value_heads", fields.null_or("num_key_value_heads", config.heads, kv_heads), 1, 4096);
  const int32_t even_share = config.heads > 0 && config.hidden % config.heads == 0 ? config.hidden / config.heads : 0;
  const int32_t head_dim = defaults.head_dim > 0 ? defaults.head_dim : even_share;
  config.head_dim = fields.integer("head_dim", fields.null_or("head_dim", even_share, head_dim), 1, 4096);
  config.intermediate = fields.integer("intermediate_size", std::nullopt, 1, kMaxDim * 4);
  config.vocab = fields.integer("vocab_size", given(defaults.vocab), 1, 1 << 24);
  config.max_context = fields.integer("max_position_embeddings", defaults.max_context, 1, 1 << 30);
  config.norm_eps = fields.number("rms_norm_eps", defaults.norm_eps, 0.0, 1.0);
  config.tied_embeddings = fields.boolean("tie_word_embeddings", defaults.tied_embeddings) || !config.has_head;
  if (fields.status().ok() && config.head_dim == 0) {
    fields.fail("num_attention_heads",
                fmt::format("is {}, which does not divide hidden_size {}; give head_dim", config.heads, config.hidden));
  }
  if (fields.status().ok() && config.heads % config.kv_heads != 0) {
    fields.fail("num_key_value_heads",
                fmt::format("is {}; it must divide num_attention_heads {}", config.kv_heads, config.heads));
  }
  if (fields.status().ok() && config.head_dim % 2 != 0) {
    fields.fail("head_dim", fmt::format("is {}; it must be even", config.head_dim));
  }
  const char* field = fields.has("hidden_activation") ? "hidden_activation" : "hidden_act";
  // Gemma's first config.json had "gelu" for what the model was trained with; hidden_activation came to say it right.
  const bool tanh = defaults.activation == "gelu_pytorch_tanh" && field == std::string_view("hidden_act");
  if (const std::string act = fields.text(field, std::string(defaults.activation)); act == "silu") {
    config.activation = Activation::kSilu;
  } else if (act == "gelu_pytorch_tanh" || (tanh && act == "gelu")) {
    config.activation = Activation::kGeluTanh;
  } else {
    fields.fail(field, fmt::format("is '{}'; supported are silu and gelu_pytorch_tanh", act));
  }
}

}  // namespace

Result<ModelConfig> parse_config(std::string_view text, const std::string& name) {
  NFP_ASSIGN_OR_RETURN(const Json root, parse_model_json<Json>(text, name));
  Fields fields(root, name);
  ModelConfig config;
  config.model_type = fields.text("model_type", "");
  if (fields.has("architectures") && root["architectures"].is_array() && !root["architectures"].empty() &&
      root["architectures"][0].is_string()) {
    config.architecture = root["architectures"][0].get<std::string>();
  }
  const auto family = find_family(config.architecture, config.model_type);
  if (!family.ok()) return error(family.error().code, "{}: {}", name, family.error().message);
  config.family = family->family;
  config.has_head = family->has_head;
  config.architecture =
      config.has_head ? std::string(config.family->architecture) : config.family->headless_architecture();
  config.norm_offset = config.family->norm_offset;
  if (const auto fp8 = find_fp8_scheme(text, name); !fp8.ok()) return fp8.error();
  const FamilyRules& rules = rules_of(config.family->id);
  const FamilyDefaults& defaults = rules.defaults;

  read_sizes(fields, defaults, config);
  NFP_RETURN_IF_ERROR(fields.status());
  FamilyFields extra;
  if (defaults.local_base_freq) extra.local_rope_theta = fields.number("rope_local_base_freq", 0.0f, 0.0, 1e12);
  NFP_RETURN_IF_ERROR(read_rope(root, fields, defaults, config, extra.local_rope_theta));
  config.attention_scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  const auto bos = fields.ids("bos_token_id");
  if (!bos.empty()) config.bos_id = bos.front();
  config.eos_ids = fields.ids("eos_token_id");

  // transformers takes a null for false.
  extra.attention_bias =
      fields.boolean("attention_bias", fields.null_or("attention_bias", 0, defaults.attention_bias ? 1 : 0) != 0);
  extra.attention_out_bias = fields.boolean("attention_out_bias", false);
  extra.mlp_bias = fields.boolean("mlp_bias", false);
  extra.use_bias = fields.boolean("use_bias", false);
  extra.use_sliding_window = fields.boolean("use_sliding_window", false);
  extra.sliding_window =
      fields.integer("sliding_window", fields.null_or("sliding_window", 0, defaults.sliding_window), 0, INT32_MAX);
  extra.max_window_layers = fields.integer("max_window_layers", extra.max_window_layers, 0, INT32_MAX);
  const float query_scalar = defaults.query_scalar > 0 ? defaults.query_scalar : static_cast<float>(config.head_dim);
  extra.query_scalar = fields.number("query_pre_attn_scalar", query_scalar, 1e-3, 1e6);
  extra.attention_cap = fields.number_or_null("attn_logit_softcapping", defaults.attention_cap, 0.0, 1e6);
  extra.logit_cap = fields.number_or_null("final_logit_softcapping", defaults.logit_cap, 0.0, 1e6);
  for (const auto& [field, value] : {std::pair{"embedding_multiplier", &extra.embedding_multiplier},
                                     {"residual_multiplier", &extra.residual_multiplier},
                                     {"attention_multiplier", &extra.attention_multiplier},
                                     {"logits_scaling", &extra.logits_scaling}}) {
    *value = fields.number(field, 1.0f, 1e-4, 1e4);
  }
  extra.layer_slides = fields.sliding_layers("layer_types", config.layers);
  if (defaults.sliding_window_pattern > 0 && extra.layer_slides.empty()) {
    extra.sliding_window_pattern = defaults.sliding_window_pattern;
    if (!fields.is_text("sliding_window_pattern")) {
      extra.sliding_window_pattern = fields.integer("sliding_window_pattern", defaults.sliding_window_pattern, 1, 4096);
    } else if (extra.sliding_window > 0) {
      extra.layer_slides = fields.lettered_layers("sliding_window_pattern", config.layers);
    }
  }
  extra.qkv_bias = fields.boolean("qkv_bias", true);
  extra.clip_qkv = fields.number_or_null("clip_qkv", 0.0f, 0.0, 1e6);
  extra.no_rope_interval = fields.integer("no_rope_layer_interval", 4, 1, 4096);
  const std::vector<int32_t> rope_layers = fields.integers("no_rope_layers", 0, 1);
  if (!rope_layers.empty() && rope_layers.size() != static_cast<size_t>(config.layers)) {
    fields.fail("no_rope_layers", fmt::format("has {} entries for {} layers", rope_layers.size(), config.layers));
  }
  extra.rope_layers.assign(rope_layers.begin(), rope_layers.end());
  read_experts(fields, defaults, config, extra);
  refuse_other_attention(fields);
  NFP_RETURN_IF_ERROR(fields.status());
  config.windows.assign(static_cast<size_t>(config.layers), 0);
  if (const Status configured = rules.configure(extra, config); !configured.ok()) {
    return error(configured.error().code, "{}: {}", name, configured.error().message);
  }
  // Families that do not read layer_types have the same attention in every layer.
  for (size_t i = 0; i < extra.layer_slides.size(); ++i) {
    if (extra.layer_slides[i] == (config.windows[i] > 0)) continue;
    return error(ErrorCode::kUnsupported, "{}: field 'layer_types' gives layer {} {}, but {} has {} there", name, i,
                 extra.layer_slides[i] ? "sliding_attention" : "full_attention", config.architecture,
                 config.windows[i] > 0 ? fmt::format("a window of {}", config.windows[i]) : "no window");
  }
  if (config.experts.count > 0 && config.experts.intermediate < 1) {
    return error(ErrorCode::kInvalidInput, "{}: field 'moe_intermediate_size' must be at least 1", name);
  }
  return config;
}

Status apply_generation_config(std::string_view text, const std::string& name, ModelConfig& config) {
  NFP_ASSIGN_OR_RETURN(const Json root, parse_model_json<Json>(text, name));
  Fields fields(root, name);
  for (int32_t id : fields.ids("eos_token_id")) {
    if (std::find(config.eos_ids.begin(), config.eos_ids.end(), id) == config.eos_ids.end())
      config.eos_ids.push_back(id);
  }
  return fields.status();
}

}  // namespace nfp
