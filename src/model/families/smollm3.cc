// Llama with layers whose heads do not rotate (NoPE, arXiv 2501.18795).
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_smollm3(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.mlp_bias = fields.mlp_bias;
  const int32_t window = fields.use_sliding_window ? fields.sliding_window : 0;
  for (int32_t i = 0; i < config.layers; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool rotates = fields.rope_layers.empty() ? (i + 1) % fields.no_rope_interval != 0 : fields.rope_layers[at];
    config.nope_layers.push_back(!rotates);
    const bool slides = fields.layer_slides.empty() ? !rotates : fields.layer_slides[at];
    config.windows[at] = slides ? window : 0;
  }
  return ok_status();
}

}  // namespace

const FamilyRules kSmolLm3Rules = {
    {.tied_embeddings = true, .kv_heads = 4, .max_context = 32768, .rope_theta = 2000000.0f}, configure_smollm3};

}  // namespace nfp
