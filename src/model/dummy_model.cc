#include "model/dummy_model.h"

#include <fmt/format.h>

#include "io/dummy_source.h"
#include "model/config.h"

namespace nfp {

Result<std::unique_ptr<ModelSource>> open_dummy_model(const std::string& path, uint64_t seed) {
  NFP_ASSIGN_OR_RETURN(DummyConfig source, read_dummy_config(path));
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source.json, path));
  std::vector<DummyTensor> tensors;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols, bool bias) {
    tensors.push_back({name + ".weight", Shape{rows, cols}, DummyTensor::Kind::kWeights});
    if (bias) tensors.push_back({name + ".bias", Shape{rows}, DummyTensor::Kind::kWeights});
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    tensors.push_back({name + ".weight", Shape{size}, DummyTensor::Kind::kOnes});
  };
  const int64_t hidden = config.hidden, wide = config.intermediate;
  const int64_t q = int64_t{config.heads} * config.head_dim, kv = int64_t{config.kv_heads} * config.head_dim;
  matrix("model.embed_tokens", config.vocab, hidden, false);
  for (int32_t i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    norm(layer + "input_layernorm", hidden);
    matrix(layer + "self_attn.q_proj", q, hidden, config.qkv_bias);
    matrix(layer + "self_attn.k_proj", kv, hidden, config.qkv_bias);
    matrix(layer + "self_attn.v_proj", kv, hidden, config.qkv_bias);
    if (config.qk_norm) {
      norm(layer + "self_attn.q_norm", config.head_dim);
      norm(layer + "self_attn.k_norm", config.head_dim);
    }
    matrix(layer + "self_attn.o_proj", hidden, q, config.output_bias);
    norm(layer + "post_attention_layernorm", hidden);
    matrix(layer + "mlp.gate_proj", wide, hidden, config.mlp_bias);
    matrix(layer + "mlp.up_proj", wide, hidden, config.mlp_bias);
    matrix(layer + "mlp.down_proj", hidden, wide, config.mlp_bias);
  }
  norm("model.norm", hidden);
  if (!config.tied_embeddings) matrix("lm_head", config.vocab, hidden, false);
  return make_dummy_source(std::move(source), tensors, seed);
}

}  // namespace nfp
