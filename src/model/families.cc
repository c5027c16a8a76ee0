#include "model/families.h"

#include "model/llama.h"

namespace nfp {
namespace {

Status configure_llama(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.mlp_bias = fields.mlp_bias;
  return ok_status();
}

Status configure_mistral(const FamilyFields& fields, ModelConfig& config) {
  config.windows.assign(config.windows.size(), fields.sliding_window);
  return ok_status();
}

// Windows on some layers: transformers' Qwen2Config and Qwen3Config.
Status configure_qwen_windows(const FamilyFields& fields, ModelConfig& config) {
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
  return configure_qwen_windows(fields, config);
}

Status configure_qwen3(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = true;
  return configure_qwen_windows(fields, config);
}

constexpr Family kFamilies[] = {
    {"LlamaForCausalLM", "llama", {}, configure_llama, load_llama},
    {"MistralForCausalLM",
     "mistral",
     {.kv_heads = 8, .max_context = 131072, .sliding_window = 4096},
     configure_mistral,
     load_llama},
    {"Qwen2ForCausalLM",
     "qwen2",
     {.kv_heads = 32, .max_context = 32768, .sliding_window = 4096},
     configure_qwen2,
     load_llama},
    {"Qwen3ForCausalLM",
     "qwen3",
     {.kv_heads = 32, .head_dim = 128, .max_context = 32768, .sliding_window = 4096},
     configure_qwen3,
     load_llama},
};

}  // namespace

const Family* find_family(std::string_view architecture, std::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (architecture.empty() ? model_type == family.model_type : architecture == family.architecture) return &family;
  }
  return nullptr;
}

std::string family_names() {
  std::string names;
  for (const Family& family : kFamilies) {
    if (!names.empty()) names += ", ";
    names += family.architecture;
  }
  return names;
}

}  // namespace nfp
