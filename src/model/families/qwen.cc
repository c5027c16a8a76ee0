// Llama with windows on some layers. Qwen2 has biases on q, k and v; Qwen3 a norm of each query and key head.
#include "model/families/families.h"

namespace nfp {
namespace {

// transformers' Qwen2Config and Qwen3Config.
Status configure_windows(const FamilyFields& fields, ModelConfig& config) {
  const int32_t window = fields.use_sliding_window ? fields.sliding_window : 0;
  for (size_t i = 0; i < config.windows.size(); ++i) {
    const bool slides = fields.layer_slides.empty() ? window > 0 && static_cast<int32_t>(i) >= fields.max_window_layers
                                                    : fields.layer_slides[i];
    if (slides && window == 0) {
      return error(ErrorCode::kInvalidInput,
                   "field 'layer_types' gives layer {} sliding_attention, but there is no window; that takes "
                   "use_sliding_window true and a sliding_window above 0",
                   i);
    }
    config.windows[i] = slides ? window : 0;
  }
  return ok_status();
}

// Biases on q, k and v are part of the architecture, not of its configuration.
Status configure_qwen2(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = true;
  return configure_windows(fields, config);
}

Status configure_qwen3(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = true;
  return configure_windows(fields, config);
}

}  // namespace

const FamilyRules kQwen2Rules = {{.kv_heads = 32, .max_context = 32768, .sliding_window = 4096}, configure_qwen2};
const FamilyRules kQwen3Rules = {{.kv_heads = 32, .head_dim = 128, .max_context = 32768, .sliding_window = 4096},
                                 configure_qwen3};

}  // namespace nfp
