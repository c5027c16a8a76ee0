#include "model/families.h"

#include "model/llama.h"

namespace nfp {
namespace {

void configure_llama(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.mlp_bias = fields.mlp_bias;
}

void configure_mistral(const FamilyFields& fields, ModelConfig& config) { config.window = fields.sliding_window; }

// Biases on q, k and v are part of the architecture, not of its configuration.
void configure_qwen2(const FamilyFields&, ModelConfig& config) { config.qkv_bias = true; }

void configure_qwen3(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = true;
}

constexpr Family kFamilies[] = {
    {"LlamaForCausalLM", "llama", false, configure_llama, load_llama},
    {"MistralForCausalLM", "mistral", false, configure_mistral, load_llama},
    {"Qwen2ForCausalLM", "qwen2", false, configure_qwen2, load_llama},
    {"Qwen3ForCausalLM", "qwen3", false, configure_qwen3, load_llama},
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
