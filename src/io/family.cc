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

// Llama's, but for a norm's name in GGUF files.
constexpr LayerTensor kSeedOssLayer[] = {
    {kAttentionNorm, "input_layernorm", "attn_norm"},
    {kQuery, "self_attn.q_proj", "attn_q"},
    {kKey, "self_attn.k_proj", "attn_k"},
    {kValue, "self_attn.v_proj", "attn_v"},
    {kOutput, "self_attn.o_proj", "attn_output"},
    {kMlpNorm, "post_attention_layernorm", "post_attention_norm"},
    {kGate, "mlp.gate_proj", "ffn_gate"},
    {kUp, "mlp.up_proj", "ffn_up"},
    {kDown, "mlp.down_proj", "ffn_down"},
};

constexpr LayerTensor kMixtralLayer[] = {
    {kAttentionNorm, "input_layernorm", "attn_norm"},
    {kQuery, "self_attn.q_proj", "attn_q"},
    {kKey, "self_attn.k_proj", "attn_k"},
    {kValue, "self_attn.v_proj", "attn_v"},
    {kOutput, "self_attn.o_proj", "attn_output"},
    {kMlpNorm, "post_attention_layernorm", "ffn_norm"},
    {kRouter, "block_sparse_moe.gate", "ffn_gate_inp"},
    {kExpertGate, "block_sparse_moe.experts.#.w1", "ffn_gate_exps"},
    {kExpertUp, "block_sparse_moe.experts.#.w3", "ffn_up_exps"},
    {kExpertDown, "block_sparse_moe.experts.#.w2", "ffn_down_exps"},
};

// Which layers have experts and which a dense MLP is the configuration's.
constexpr LayerTensor kQwenMoeLayer[] = {
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
    {kRouter, "mlp.gate", "ffn_gate_inp"},
    {kExpertGate, "mlp.experts.#.gate_proj", "ffn_gate_exps"},
    {kExpertUp, "mlp.experts.#.up_proj", "ffn_up_exps"},
    {kExpertDown, "mlp.experts.#.down_proj", "ffn_down_exps"},
    {kSharedRouter, "mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
    {kSharedGate, "mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
    {kSharedUp, "mlp.shared_expert.up_proj", "ffn_up_shexp"},
    {kSharedDown, "mlp.shared_expert.down_proj", "ffn_down_shexp"},
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

// Norms stand after attention and MLP, and none before them.
constexpr LayerTensor kOlmo2Layer[] = {
    {kQuery, "self_attn.q_proj", "attn_q"},
    {kKey, "self_attn.k_proj", "attn_k"},
    {kValue, "self_attn.v_proj", "attn_v"},
    {kQueryNorm, "self_attn.q_norm", "attn_q_norm"},
    {kKeyNorm, "self_attn.k_norm", "attn_k_norm"},
    {kOutput, "self_attn.o_proj", "attn_output"},
    {kAttentionPostNorm, "post_attention_layernorm", "post_attention_norm"},
    {kGate, "mlp.gate_proj", "ffn_gate"},
    {kUp, "mlp.up_proj", "ffn_up"},
    {kDown, "mlp.down_proj", "ffn_down"},
    {kMlpPostNorm, "post_feedforward_layernorm", "post_ffw_norm"},
};

constexpr LayerTensor kGlmLayer[] = {
    {kAttentionNorm, "input_layernorm", ""}, {kQuery, "self_attn.q_proj", ""},
    {kKey, "self_attn.k_proj", ""},          {kValue, "self_attn.v_proj", ""},
    {kOutput, "self_attn.o_proj", ""},       {kMlpNorm, "post_attention_layernorm", ""},
    {kGateUp, "mlp.gate_up_proj", ""},       {kDown, "mlp.down_proj", ""},
};

constexpr LayerTensor kGlm4Layer[] = {
    {kAttentionNorm, "input_layernorm", "attn_norm"},
    {kQuery, "self_attn.q_proj", "attn_q"},
    {kKey, "self_attn.k_proj", "attn_k"},
    {kValue, "self_attn.v_proj", "attn_v"},
    {kOutput, "self_attn.o_proj", "attn_output"},
    {kAttentionPostNorm, "post_self_attn_layernorm", "post_attention_norm"},
    {kMlpNorm, "post_attention_layernorm", "ffn_norm"},
    {kGateUp, "mlp.gate_up_proj", "ffn_up"},
    {kDown, "mlp.down_proj", "ffn_down"},
    {kMlpPostNorm, "post_mlp_layernorm", "post_ffw_norm"},
};

constexpr Family kFamilies[] = {
    {FamilyId::kLlama, "LlamaForCausalLM", "llama", "llama", kLlamaLayer, /*gguf_permutes_qk=*/true},
    {FamilyId::kMistral, "MistralForCausalLM", "mistral", "mistral3", kLlamaLayer, /*gguf_permutes_qk=*/true},
    {FamilyId::kQwen2, "Qwen2ForCausalLM", "qwen2", "qwen2", kLlamaLayer},
    {FamilyId::kQwen3, "Qwen3ForCausalLM", "qwen3", "qwen3", kLlamaLayer},
    {FamilyId::kSmolLm3, "SmolLM3ForCausalLM", "smollm3", "smollm3", kLlamaLayer, /*gguf_permutes_qk=*/true},
    {FamilyId::kPhi3, "Phi3ForCausalLM", "phi3", "phi3", kPhi3Layer},
    {FamilyId::kGemma, "GemmaForCausalLM", "gemma", "gemma", kLlamaLayer, false, /*norm_offset=*/1.0f},
    {FamilyId::kGemma2, "Gemma2ForCausalLM", "gemma2", "gemma2", kGemmaLayer, false, /*norm_offset=*/1.0f},
    {FamilyId::kGemma3, "Gemma3ForCausalLM", "gemma3_text", "gemma3", kGemmaLayer, false, /*norm_offset=*/1.0f},
    {FamilyId::kGranite, "GraniteForCausalLM", "granite", "granite", kLlamaLayer, /*gguf_permutes_qk=*/true},
    {FamilyId::kMixtral, "MixtralForCausalLM", "mixtral", "llama", kMixtralLayer, /*gguf_permutes_qk=*/true},
    {FamilyId::kQwen2Moe, "Qwen2MoeForCausalLM", "qwen2_moe", "qwen2moe", kQwenMoeLayer},
    {FamilyId::kQwen3Moe, "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe", kQwenMoeLayer},
    {FamilyId::kOlmo2, "Olmo2ForCausalLM", "olmo2", "olmo2", kOlmo2Layer},
    {FamilyId::kOlmo3, "Olmo3ForCausalLM", "olmo3", "olmo2", kOlmo2Layer},
    {FamilyId::kOlmoe, "OlmoeForCausalLM", "olmoe", "olmoe", kQwenMoeLayer},
    {FamilyId::kSeedOss, "SeedOssForCausalLM", "seed_oss", "seed_oss", kSeedOssLayer},
    {FamilyId::kExaone4, "Exaone4ForCausalLM", "exaone4", "exaone4", kOlmo2Layer},
    {FamilyId::kGlm, "GlmForCausalLM", "glm", "", kGlmLayer},
    {FamilyId::kGlm4, "Glm4ForCausalLM", "glm4", "glm4", kGlm4Layer},
    {FamilyId::kErnie4_5, "Ernie4_5ForCausalLM", "ernie4_5", "ernie4_5", kLlamaLayer},
    {FamilyId::kMinistral, "MinistralForCausalLM", "ministral", "", kLlamaLayer},
    {FamilyId::kHelium, "HeliumForCausalLM", "helium", "", kLlamaLayer},
};

// Known, and not computed here: what of the model is missing, by the field that asks for it.
struct Refusal {
  std::string_view architecture, model_type, why;
};
constexpr std::string_view kLlama4 =
    "chunked attention (attention_chunk_size) and a temperature of attention (attn_temperature_tuning)";
constexpr Refusal kRefusals[] = {
    {"GptOssForCausalLM", "gpt_oss",
     "attention sinks (tensors self_attn.sinks, which go with its model_type) and a clamped activation (swiglu_limit)"},
    {"Llama4ForConditionalGeneration", "llama4", kLlama4},
    {"Llama4ForCausalLM", "llama4_text", kLlama4},
    {"DeepseekV2ForCausalLM", "deepseek_v2", "latent attention (kv_lora_rank)"},
    {"DeepseekV3ForCausalLM", "deepseek_v3", "latent attention (kv_lora_rank) and experts in groups (n_group)"},
    {"PhimoeForCausalLM", "phimoe",
     "sparsemixer routing (router_jitter_noise) and norms that subtract the mean, with biases (LayerNorm, although "
     "their field is rms_norm_eps)"},
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

// "experts.#.up_proj" and "experts.12.up_proj".
bool matches(std::string_view pattern, std::string_view part) {
  const size_t mark = pattern.find('#');
  if (mark == std::string_view::npos) return pattern == part;
  const std::string_view after = pattern.substr(mark + 1);
  if (part.size() <= pattern.size() - 1 || !part.starts_with(pattern.substr(0, mark)) || !part.ends_with(after)) {
    return false;
  }
  const std::string_view number = part.substr(mark, part.size() - after.size() - mark);
  return std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string numbered(std::string_view pattern, int32_t layer, int32_t expert) {
  std::string name = fmt::format("{}{}.{}", kLayers, layer, pattern);
  if (const size_t mark = name.find('#'); mark != std::string::npos) name.replace(mark, 1, std::to_string(expert));
  return name;
}

}  // namespace

bool Family::has(TensorRole role) const {
  return std::any_of(layer.begin(), layer.end(), [&](const LayerTensor& tensor) { return tensor.role == role; });
}

std::string Family::name(TensorRole role, int32_t index, int32_t expert) const {
  for (const LayerTensor& tensor : layer) {
    if (tensor.role == role) return numbered(tensor.hf, index, expert);
  }
  return {};
}

std::vector<std::string> Family::names(GemmType type, int32_t index, Block block, int32_t expert) const {
  std::vector<std::string> found;
  for (const LayerTensor& tensor : layer) {
    if (gemm_type(tensor.role) == type && block_of(tensor.role) == block) {
      found.push_back(numbered(tensor.hf, index, expert));
    }
  }
  return found;
}

std::string Family::headless_architecture() const {
  // Gemma 3's text model has a model_type, and so a class, apart from that of the model with images.
  return fmt::format("{}{}", architecture.substr(0, architecture.find("ForCausalLM")),
                     model_type.ends_with("_text") ? "TextModel" : "Model");
}

std::span<const Family> families() { return kFamilies; }

Result<FoundFamily> find_family(std::string_view architecture, std::string_view model_type) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (architecture.empty() ? model_type == family.model_type : architecture == family.architecture) {
      return FoundFamily{&family, true};
    }
    if (architecture == family.headless_architecture()) return FoundFamily{&family, false};
    known += fmt::format("{}{}", known.empty() ? "" : ", ", family.architecture);
  }
  for (const Refusal& refusal : kRefusals) {
    // By either: Microsoft's own class of Phi-3.5-MoE is PhiMoEForCausalLM.
    if (architecture == refusal.architecture || model_type == refusal.model_type) {
      return error(ErrorCode::kUnsupported, "architecture '{}' (model_type '{}') is not supported: it has {}",
                   architecture.empty() ? refusal.architecture : architecture, model_type, refusal.why);
    }
  }
  return error(ErrorCode::kUnsupported, "architecture '{}' (model_type '{}') is not supported; supported are {}",
               architecture, model_type, known);
}

std::optional<TensorRole> role_of(const Family& family, std::string_view tensor) {
  const auto name = split(tensor, kLayers);
  if (!name) return std::nullopt;
  for (const LayerTensor& known : family.layer) {
    if (matches(known.hf, name->part)) return known.role;
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

Block block_of(std::string_view tensor) {
  for (const Family& family : kFamilies) {
    const auto role = role_of(family, tensor);
    if (role && block_of(*role) != Block::kDense) return block_of(*role);
  }
  return Block::kDense;
}

bool is_router(std::string_view tensor) {
  return std::any_of(std::begin(kFamilies), std::end(kFamilies), [tensor](const Family& family) {
    const auto role = role_of(family, tensor);
    return role == TensorRole::kRouter || role == TensorRole::kSharedRouter;
  });
}

std::string hf_name(const Family& family, std::string_view gguf) {
  if (gguf == "token_embd.weight") return fmt::format("{}.weight", kEmbeddingName);
  if (gguf == "output_norm.weight") return fmt::format("{}.weight", kFinalNormName);
  if (gguf == "output.weight") return fmt::format("{}.weight", kHeadName);
  if (const auto name = split(gguf, "blk.")) {
    for (const LayerTensor& tensor : family.layer) {
      if (!tensor.gguf.empty() && name->part == tensor.gguf)
        return fmt::format("{}{}.{}{}", kLayers, name->number, tensor.hf, name->suffix);
    }
  }
  return std::string(gguf);
}

}  // namespace nfp
