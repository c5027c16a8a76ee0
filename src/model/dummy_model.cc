#include "model/dummy_model.h"

#include <fmt/format.h>

#include "io/dummy_source.h"
#include "model/config.h"

namespace nfp {
namespace {

struct TensorShape {
  int64_t rows = 0;  // 0 = the model has no such tensor
  int64_t cols = 0;  // 0 = a norm
  bool bias = false;
};

TensorShape shape_of(const ModelConfig& config, TensorRole role, int32_t layer) {
  const int64_t hidden = config.hidden;
  const bool sparse = config.has_experts(layer);
  const int64_t wide = sparse ? 0 : config.intermediate;
  const int64_t narrow = sparse ? config.experts.intermediate : 0;
  const int64_t shared = sparse ? config.experts.shared_intermediate : 0;
  const auto matrix = [&](int64_t rows, int64_t cols) {
    return rows > 0 && cols > 0 ? TensorShape{rows, cols, config.mlp_bias} : TensorShape{};
  };
  const int64_t q = config.query_features(), kv = config.kv_features();
  switch (role) {
    case TensorRole::kQuery:
      return {q, hidden, config.qkv_bias};
    case TensorRole::kKey:
    case TensorRole::kValue:
      return {kv, hidden, config.qkv_bias};
    case TensorRole::kQueryKeyValue:
      return {q + 2 * kv, hidden, config.qkv_bias};
    case TensorRole::kQueryNorm:
      return {!config.qk_norm ? 0 : config.norm_spans_heads ? q : config.head_dim};
    case TensorRole::kKeyNorm:
      return {!config.qk_norm ? 0 : config.norm_spans_heads ? kv : config.head_dim};
    case TensorRole::kOutput:
      return {hidden, q, config.output_bias};
    case TensorRole::kGate:
    case TensorRole::kUp:
      return matrix(wide, hidden);
    case TensorRole::kGateUp:
      return matrix(2 * wide, hidden);
    case TensorRole::kDown:
      return matrix(hidden, wide);
    case TensorRole::kRouter:
      return {sparse ? config.experts.count : 0, hidden};
    case TensorRole::kExpertGate:
    case TensorRole::kExpertUp:
      return matrix(narrow, hidden);
    case TensorRole::kExpertDown:
      return matrix(hidden, narrow);
    case TensorRole::kSharedRouter:
      return {shared > 0 ? 1 : 0, hidden};
    case TensorRole::kSharedGate:
    case TensorRole::kSharedUp:
      return matrix(shared, hidden);
    case TensorRole::kSharedDown:
      return matrix(hidden, shared);
    case TensorRole::kAttentionNorm:
    case TensorRole::kAttentionPostNorm:
    case TensorRole::kMlpNorm:
    case TensorRole::kMlpPostNorm:
      return {hidden};
  }
  return {};
}

}  // namespace

std::vector<DummyTensor> tensors_of(const ModelConfig& config) {
  std::vector<DummyTensor> tensors;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols, bool bias) {
    tensors.push_back({name + ".weight", Shape{rows, cols}, DummyTensor::Kind::kWeights});
    if (bias) tensors.push_back({name + ".bias", Shape{rows}, DummyTensor::Kind::kWeights});
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    tensors.push_back({name + ".weight", Shape{size}, DummyTensor::Kind::kOnes});
  };
  const auto name = [](std::string_view whole) { return std::string(whole); };
  matrix(name(kEmbeddingName), config.vocab, config.hidden, false);
  for (int32_t i = 0; i < config.layers; ++i) {
    for (const LayerTensor& tensor : config.family->layer) {
      const TensorShape shape = shape_of(config, tensor.role, i);
      if (shape.rows == 0) continue;
      const int32_t copies = block_of(tensor.role) == Block::kExpert ? config.experts.count : 1;
      for (int32_t expert = 0; expert < copies; ++expert) {
        const std::string full = config.family->name(tensor.role, i, expert);
        if (shape.cols == 0) {
          norm(full, shape.rows);
        } else {
          matrix(full, shape.rows, shape.cols, shape.bias);
        }
      }
    }
  }
  norm(name(kFinalNormName), config.hidden);
  if (!config.tied_embeddings) matrix(name(kHeadName), config.vocab, config.hidden, false);
  return tensors;
}

Result<std::unique_ptr<ModelSource>> open_dummy_model(const std::string& path, uint64_t seed) {
  NFP_ASSIGN_OR_RETURN(DummyConfig source, read_dummy_config(path));
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source.json, path));
  return make_dummy_source(std::move(source), tensors_of(config), seed);
}

}  // namespace nfp
