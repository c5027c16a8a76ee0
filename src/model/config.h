// What a model's config.json says, checked and with defaults filled in. One struct for all families of decoder-only
// transformers; io/family.h says which are known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "io/family.h"

namespace nfp {

struct RopeScaling {
  enum class Kind : uint8_t { kNone, kLinear, kLlama3, kYarn, kLongrope };
  Kind kind = Kind::kNone;
  float factor = 1.0f;
  // kLlama3 (Llama 3.1 model card): wavelengths beyond original_context / low_freq_factor are stretched by `factor`,
  // those under original_context / high_freq_factor are kept, and between them it is interpolated.
  float low_freq_factor = 1.0f;
  float high_freq_factor = 4.0f;
  int32_t original_context = 8192;  // also of kYarn and kLongrope
  // kYarn (arXiv 2309.00071): pairs that turn more often than beta_fast over the original context are kept, those that
  // turn less often than beta_slow are stretched by `factor`, and between them it is interpolated.
  float beta_fast = 32.0f;
  float beta_slow = 1.0f;
  bool truncate = true;  // the borders are rounded to whole pairs
  // kLongrope (LongRoPE, arXiv 2402.13753): divisors of each pair's frequency, within and beyond the original context.
  std::vector<float> short_factors, long_factors;
  float attention_factor = 1.0f;  // of cosines and sines (kYarn, kLongrope)
};

struct Rope {
  int32_t dim = 0;  // features of a head that rotate
  float theta = 10000.0f;
  RopeScaling scaling;
};

// Of layers with experts.
struct Experts {
  int32_t count = 0;  // 0 = the model has none
  int32_t top = 0;    // experts of a token
  int32_t intermediate = 0;
  int32_t shared_intermediate = 0;  // of the expert that every token has; 0 = there is none
  bool renormalise = false;         // the weights of a token's experts are made to sum to 1
  std::vector<bool> layers;         // [layers] which have experts; the others have a dense MLP
};

struct ModelConfig {
  const Family* family = nullptr;
  std::string architecture;  // "LlamaForCausalLM", or without a head "LlamaModel"
  std::string model_type;    // "llama"
  int32_t hidden = 0;        // features of the residual stream
  int32_t layers = 0;
  int32_t heads = 0;     // query heads
  int32_t kv_heads = 0;  // key and value heads; heads % kv_heads == 0
  int32_t head_dim = 0;
  int32_t intermediate = 0;  // features between up and down
  int32_t vocab = 0;
  int32_t max_context = 0;  // tokens
  float norm_eps = 1e-5f;
  float norm_offset = 0.0f;  // norms multiply by weight + offset
  Rope rope;
  bool rotates_neighbours = false;  // features 2i and 2i + 1 of a head turn together, not i and i + rope.dim / 2
  std::vector<bool> nope_layers;    // [layers] whose heads do not rotate; empty = none
  float local_rope_theta = 0.0f;    // of layers with a window, whose rope is not scaled; 0 = they have the others' rope
  float embedding_scale = 1.0f;
  float attention_scale = 0.0f;  // of q k^T
  float attention_cap = 0.0f;    // soft cap of q k^T; 0 = none
  float logit_scale = 1.0f;      // of logits
  float logit_cap = 0.0f;        // of logits; 0 = none
  std::vector<int32_t> windows;  // [layers] sliding-window attention: keys seen by a token; 0 = all
  bool has_head = true;          // false: hidden states are all that is wanted of it
  bool tied_embeddings = false;  // no head of its own: the embedding multiplies in its place
  bool qkv_bias = false;
  bool output_bias = false;  // of o_proj
  bool mlp_bias = false;
  bool qk_norm = false;           // RMSNorm of each query and key head before rotation
  bool norm_spans_heads = false;  // and of all heads together
  Experts experts;
  Activation activation = Activation::kSilu;
  bool wide_stream = false;  // the residual stream leaves FP16's range (65504)
  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;  // any of them ends generation

  int64_t query_features() const { return int64_t{heads} * head_dim; }
  int64_t kv_features() const { return int64_t{kv_heads} * head_dim; }
  bool has_experts(int32_t layer) const { return experts.count > 0 && experts.layers[static_cast<size_t>(layer)]; }
  // Blocks read the residual stream itself, no norm of it. It must not be wide then: inputs of linear layers are not.
  bool reads_stream() const { return !family->has(TensorRole::kAttentionNorm); }
  bool rotates(int32_t layer) const { return nope_layers.empty() || !nope_layers[static_cast<size_t>(layer)]; }
  // Tokens of context where nobody says: all, but where a longer one changes what short texts get, as with LongRoPE,
  // only as many as do not.
  int32_t default_context() const {
    const RopeScaling& scaling = rope.scaling;
    const bool longrope = scaling.kind == RopeScaling::Kind::kLongrope;
    return longrope ? std::min(max_context, scaling.original_context) : max_context;
  }
};

// `name` is the file, for messages. Every number is checked: an absurd or missing field is an error that names it.
Result<ModelConfig> parse_config(std::string_view json, const std::string& name);

// What generation_config.json adds: its end-of-generation ids. Absent fields leave `config` as it is.
Status apply_generation_config(std::string_view json, const std::string& name, ModelConfig& config);

}  // namespace nfp
