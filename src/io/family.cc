#include "io/family.h"

#include <algorithm>

namespace nfp {
namespace {

using enum TensorRole;

constexpr LayerTensor kLlamaLayer[] = {
    {kAttentionNorm, "input_layernorm", "attn_norm"},
    {kQuery, "self_attn.q_proj", "attn_q"},
    {kKey, "self_attn.k_proj", "attn_k"},
    {kValue, "self_attn.v_proj", "attn_v"},
    {kQueryNorm, "self_attn.q_norm", "attn_q_norm"},
    {kKeyNorm, "self_attn.k_norm", "attn_k_norm"},
    {kOutput, "self_attn.o_proj", "attn_output"},
    {kMlpNorm, "post_attention_layernorm", "ffn_norm"},
    {kGate, "mlp.gate_proj", "ffn_gate"},
    {kUp, "mlp.up_proj", "ffn_up"},
    {kDown, "mlp.down_proj", "ffn_down"},
};

constexpr LayerTensor kPhi3Layer[] = {
    {kAttentionNorm, "input_layernorm", "attn_norm"}, {kQueryKeyValue, "self_attn.qkv_proj", "attn_qkv"},
    {kOutput, "self_attn.o_proj", "attn_output"},     {kMlpNorm, "post_attention_layernorm", "ffn_norm"},
    {kGateUp, "mlp.gate_up_proj", "ffn_up"},          {kDown, "mlp.down_proj", "ffn_down"},
};

constexpr LayerTensor kGemmaLayer[] = {
    {kAttentionNorm, "input_layernorm", "attn_norm"},
    {kQuery, "self_attn.q_proj", "attn_q"},
    {kKey, "self_attn.k_proj", "attn_k"},
    {kValue, "self_attn.v_proj", "attn_v"},
    {kQueryNorm, "self_attn.q_norm", "attn_q_norm"},
    {kKeyNorm, "self_attn.k_norm", "attn_k_norm"},
    {kOutput, "self_attn.o_proj", "attn_output"},
    {kAttentionPostNorm, "post_attention_layernorm", "post_attention_norm"},
    {kMlpNorm, "pre_feedforward_layernorm", "ffn_norm"},
    {kGate, "mlp.gate_proj", "ffn_gate"},
    {kUp, "mlp.up_proj", "ffn_up"},
    {kDown, "mlp.down_proj", "ffn_down"},
    {kMlpPostNorm, "post_feedforward_layernorm", "post_ffw_norm"},
};

constexpr Family kFamilies[] = {
    {FamilyId::kLlama, "LlamaForCausalLM", "llama", "llama", kLlamaLayer, /*gguf_permutes_qk=*/true},
    {FamilyId::kMistral, "MistralForCausalLM", "mistral", "", kLlamaLayer},
    {FamilyId::kQwen2, "Qwen2ForCausalLM", "qwen2", "qwen2", kLlamaLayer},
    {FamilyId::kQwen3, "Qwen3ForCausalLM", "qwen3", "qwen3", kLlamaLayer},
    {FamilyId::kPhi3, "Phi3ForCausalLM", "phi3", "", kPhi3Layer},
    {FamilyId::kGemma2, "Gemma2ForCausalLM", "gemma2", "", kGemmaLayer, false, /*norm_offset=*/1.0f},
    {FamilyId::kGemma3, "Gemma3ForCausalLM", "gemma3_text", "", kGemmaLayer, false, /*norm_offset=*/1.0f},
};

// Known, and not computed here: the part of the model that is missing.
struct Refusal {
  std::string_view architecture, model_type, why;
};
constexpr Refusal kRefusals[] = {
    {"GptOssForCausalLM", "gpt_oss", "attention sinks and experts (num_local_experts)"},
    {"Llama4ForConditionalGeneration", "llama4", "experts (num_local_experts) and chunked attention"},
    {"Llama4ForCausalLM", "llama4_text", "experts (num_local_experts) and chunked attention"},
    {"DeepseekV2ForCausalLM", "deepseek_v2", "latent attention (kv_lora_rank) and experts (n_routed_experts)"},
    {"DeepseekV3ForCausalLM", "deepseek_v3", "latent attention (kv_lora_rank) and experts (n_routed_experts)"},
    {"MixtralForCausalLM", "mixtral", "experts (num_local_experts)"},
    {"Qwen2MoeForCausalLM", "qwen2_moe", "experts (num_experts)"},
    {"Qwen3MoeForCausalLM", "qwen3_moe", "experts (num_experts)"},
    {"OlmoeForCausalLM", "olmoe", "experts (num_experts)"},
    {"PhimoeForCausalLM", "phimoe", "experts (num_local_experts)"},
};

constexpr std::string_view kLayers = "model.layers.";
constexpr std::string_view kWeight = ".weight";

// "PREFIX" "3" "." "PART" ".weight": the layer's number and the part.
struct LayerName {
  std::string_view number, part, suffix;
};
std::optional<LayerName> split(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  const size_t number = name.find('.');
  const size_t suffix = name.rfind('.');
  if (number == std::string_view::npos || suffix <= number) return std::nullopt;
  return LayerName{name.substr(0, number), name.substr(number + 1, suffix - number - 1), name.substr(suffix)};
}

}  // namespace

bool Family::has(TensorRole role) const {
  return std::any_of(layer.begin(), layer.end(), [&](const LayerTensor& tensor) { return tensor.role == role; });
}

std::string Family::name(TensorRole role, int32_t index) const {
  for (const LayerTensor& tensor : layer) {
    if (tensor.role == role) return fmt::format("{}{}.{}", kLayers, index, tensor.hf);
  }
  return {};
}

std::vector<std::string> Family::names(GemmType type, int32_t index) const {
  std::vector<std::string> found;
  for (const LayerTensor& tensor : layer) {
    if (gemm_type(tensor.role) == type) found.push_back(fmt::format("{}{}.{}", kLayers, index, tensor.hf));
  }
  return found;
}

std::span<const Family> families() { return kFamilies; }

Result<const Family*> find_family(std::string_view architecture, std::string_view model_type) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (architecture.empty() ? model_type == family.model_type : architecture == family.architecture) return &family;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", family.architecture);
  }
  for (const Refusal& refusal : kRefusals) {
    if (architecture.empty() ? model_type == refusal.model_type : architecture == refusal.architecture) {
      return error(ErrorCode::kUnsupported, "architecture '{}' (model_type '{}') is not supported: it has {}",
                   refusal.architecture, model_type, refusal.why);
    }
  }
  return error(ErrorCode::kUnsupported, "architecture '{}' (model_type '{}') is not supported; supported are {}",
               architecture, model_type, known);
}

std::optional<TensorRole> role_of(const Family& family, std::string_view tensor) {
  const auto name = split(tensor, kLayers);
  if (!name) return std::nullopt;
  for (const LayerTensor& known : family.layer) {
    if (name->part == known.hf) return known.role;
  }
  return std::nullopt;
}

std::optional<GemmType> gemm_type(std::string_view tensor) {
  if (!tensor.ends_with(kWeight)) return std::nullopt;
  if (tensor.substr(0, tensor.size() - kWeight.size()) == kHeadName) return GemmType::kHead;
  // A matrix has the same name in every family that has it.
  for (const Family& family : kFamilies) {
    const auto role = role_of(family, tensor);
    if (role && gemm_type(*role)) return gemm_type(*role);
  }
  return std::nullopt;
}

std::string hf_name(const Family& family, std::string_view gguf) {
  if (gguf == "token_embd.weight") return fmt::format("{}.weight", kEmbeddingName);
  if (gguf == "output_norm.weight") return fmt::format("{}.weight", kFinalNormName);
  if (gguf == "output.weight") return fmt::format("{}.weight", kHeadName);
  if (const auto name = split(gguf, "blk.")) {
    for (const LayerTensor& tensor : family.layer) {
      if (name->part == tensor.gguf) return fmt::format("{}{}.{}{}", kLayers, name->number, tensor.hf, name->suffix);
    }
  }
  return std::string(gguf);
}

}  // namespace nfp
