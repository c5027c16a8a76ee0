#include "model/dummy_model.h"

#include <utility>

namespace nfp {

std::vector<DummyTensor> dummy_tensors(const ModelConfig& config) {
  const int64_t hidden = config.hidden, wide = config.intermediate;
  const int64_t q = int64_t{config.heads} * config.head_dim, kv = int64_t{config.kv_heads} * config.head_dim;
  std::vector<DummyTensor> out;
  const auto linear = [&](const std::string& name, int64_t rows, int64_t cols, bool bias) {
    out.push_back({name + ".weight", {rows, cols}, DummyTensor::Kind::kWeights});
    if (bias) out.push_back({name + ".bias", {rows}, DummyTensor::Kind::kWeights});
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    out.push_back({name + ".weight", {size}, DummyTensor::Kind::kOnes});
  };
  linear("model.embed_tokens", config.vocab, hidden, false);
  for (int32_t i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    norm(layer + "input_layernorm", hidden);
    linear(layer + "self_attn.q_proj", q, hidden, config.qkv_bias);
    linear(layer + "self_attn.k_proj", kv, hidden, config.qkv_bias);
    linear(layer + "self_attn.v_proj", kv, hidden, config.qkv_bias);
    if (config.qk_norm) {
      norm(layer + "self_attn.q_norm", config.head_dim);
      norm(layer + "self_attn.k_norm", config.head_dim);
    }
    linear(layer + "self_attn.o_proj", hidden, q, config.output_bias);
    norm(layer + "post_attention_layernorm", hidden);
    linear(layer + "mlp.gate_proj", wide, hidden, config.mlp_bias);
    linear(layer + "mlp.up_proj", wide, hidden, config.mlp_bias);
    linear(layer + "mlp.down_proj", hidden, wide, config.mlp_bias);
  }
  norm("model.norm", hidden);
  if (!config.tied_embeddings) linear("lm_head", config.vocab, hidden, false);
  return out;
}

Result<std::unique_ptr<ModelSource>> open_dummy_model(const std::string& config, uint64_t seed) {
  NFP_ASSIGN_OR_RETURN(DummyConfig files, read_dummy_config(config));
  NFP_ASSIGN_OR_RETURN(const ModelConfig parsed, parse_config(files.json, files.directory + ": config.json"));
  return make_dummy_source(std::move(files), dummy_tensors(parsed), seed);
}

}  // namespace nfp
