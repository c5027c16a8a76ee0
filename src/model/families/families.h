// What a family's config.json means, where that is the family's own: one file a family, and one row in families.cc.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace nfp {

// What transformers takes for fields that a family's config.json leaves out. A null there is not left out.
struct FamilyDefaults {
  bool tied_embeddings = false;
  bool attention_bias = false;
  int32_t heads = 0;     // 0 = must be given
  int32_t vocab = 0;     // likewise
  int32_t kv_heads = 0;  // 0 = as many as query heads
  int32_t head_dim = 0;  // 0 = hidden_size / num_attention_heads
  int32_t max_context = 2048;
  int32_t original_context = 0;  // original_max_position_embeddings, also where only rope_scaling has it; 0 = none
  int32_t sliding_window = 0;    // 0 = none
  int32_t sliding_window_pattern = 0;  // 0 = not read
  float partial_rotary = 0;            // partial_rotary_factor, how much of a head rotates; 0 = all, always
  bool local_rope = false;             // layers with a window have a rotary base of their own
  bool local_base_freq = false;        // which rope_local_base_freq gives too
  bool has_su_scaling = false;         // LongRoPE also by its first name, "su"
  float norm_eps = 1e-6f;
  float rope_theta = 10000.0f;
  std::string_view activation = "silu";
  float query_scalar = 0;   // query_pre_attn_scalar; 0 = head_dim
  float attention_cap = 0;  // attn_logit_softcapping; 0 = none
  float logit_cap = 0;      // final_logit_softcapping; 0 = none
  // Experts.
  int32_t experts = 0;  // num_experts, or num_local_experts; 0 = the family has none
  int32_t top_experts = 0;
  int32_t expert_intermediate = 0;  // moe_intermediate_size
  int32_t shared_intermediate = 0;  // shared_expert_intermediate_size
};

// Optional fields of config.json whose meaning is a family's own.
struct FamilyFields {
  bool attention_bias = false;
  bool attention_out_bias = false;  // of o_proj, where attention_bias is not
  bool mlp_bias = false;
  bool use_bias = false;  // of all linear layers but the head
  bool use_sliding_window = false;
  int32_t sliding_window = 0;          // 0 = none
  int32_t max_window_layers = 28;      // layers from this one on have the window, unless layer_types says which
  std::vector<bool> layer_slides;      // layer_types: one entry a layer, or none at all
  int32_t sliding_window_pattern = 0;  // read where layer_types does not say which layers have the window
  float local_rope_theta = 0;          // rope_local_base_freq, or rope_parameters' sliding_attention; 0 = not given
  float query_scalar = 0;
  float attention_cap = 0;
  float logit_cap = 0;
  float embedding_multiplier = 1;
  float residual_multiplier = 1;
  float attention_multiplier = 1;  // not one of 1 / sqrt(head_dim): in its place
  float logits_scaling = 1;        // logits are divided by it
  bool qkv_bias = true;
  float clip_qkv = 0;             // 0 = not clipped
  std::vector<bool> rope_layers;  // no_rope_layers, whose ones rotate: one entry a layer, or none at all
  int32_t no_rope_interval = 4;   // else each such layer does not rotate
  // Experts.
  int32_t experts = 0;
  int32_t top_experts = 0;
  int32_t expert_intermediate = 0;
  int32_t shared_intermediate = 0;
  bool norm_topk_prob = false;
  int32_t sparse_step = 1;               // decoder_sparse_step: each such layer has experts
  std::vector<int32_t> mlp_only_layers;  // but these
};

struct FamilyRules {
  FamilyDefaults defaults;
  // Fills in what the fields mean. An error's message begins with the field's name.
  Status (*configure)(const FamilyFields& fields, ModelConfig& config);
};

extern const FamilyRules kLlamaRules, kMistralRules, kQwen2Rules, kQwen3Rules, kSmolLm3Rules, kPhi3Rules, kGemmaRules,
    kGemma2Rules, kGemma3Rules, kGraniteRules, kMixtralRules, kQwen2MoeRules, kQwen3MoeRules, kOlmo2Rules, kOlmo3Rules,
    kOlmoeRules, kSeedOssRules, kExaone4Rules, kGlmRules, kGlm4Rules, kErnie4_5Rules, kMinistralRules, kHeliumRules;

const FamilyRules& rules_of(FamilyId family);

// Gives sliding_window to the layers that layer_types names; where it is left out, to all but each `pattern`-th layer
// (0: to all, 1: to none).
Status set_windows(const FamilyFields& fields, int32_t pattern, ModelConfig& config);

}  // namespace nfp
