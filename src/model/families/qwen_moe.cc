// Qwen2 and Qwen3 with experts in some layers. Qwen2's have one more expert that every token has, by a gate of its own.
#include <algorithm>

#include "model/families/families.h"

namespace nfp {
namespace {

void configure_experts(const FamilyFields& fields, ModelConfig& config) {
  Experts& experts = config.experts;
  experts.count = fields.experts;
  experts.top = fields.top_experts;
  experts.intermediate = fields.expert_intermediate;
  experts.renormalise = fields.norm_topk_prob;
  for (int32_t i = 0; i < config.layers; ++i) {
    const auto& dense = fields.mlp_only_layers;
    experts.layers.push_back((i + 1) % fields.sparse_step == 0 &&
                             std::find(dense.begin(), dense.end(), i) == dense.end());
  }
}

Status configure_qwen2_moe(const FamilyFields& fields, ModelConfig& config) {
  if (fields.use_sliding_window) {
    // transformers has the window on every layer or from max_window_layers on, depending on its attention kernel.
    return error(ErrorCode::kUnsupported, "field 'use_sliding_window' is true, which is not supported for {}",
                 config.model_type);
  }
  config.qkv_bias = fields.qkv_bias;
  configure_experts(fields, config);
  config.experts.shared_intermediate = fields.shared_intermediate;
  return ok_status();
}

Status configure_qwen3_moe(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = true;
  if (fields.use_sliding_window) config.windows.assign(config.windows.size(), fields.sliding_window);
  configure_experts(fields, config);
  return ok_status();
}

}  // namespace

// As transformers' Qwen2MoeConfig and Qwen3MoeConfig have them.
const FamilyRules kQwen2MoeRules = {{.kv_heads = 16,
                                     .max_context = 32768,
                                     .sliding_window = 4096,
                                     .experts = 60,
                                     .top_experts = 4,
                                     .expert_intermediate = 1408,
                                     .shared_intermediate = 5632},
                                    configure_qwen2_moe};
const FamilyRules kQwen3MoeRules = {{.kv_heads = 4,
                                     .max_context = 32768,
                                     .sliding_window = 4096,
                                     .experts = 128,
                                     .top_experts = 8,
                                     .expert_intermediate = 768},
                                    configure_qwen3_moe};

}  // namespace nfp
