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

TensorShape shape_of(const ModelConfig& config, TensorRole role) {
  const int64_t hidden = config.hidden, wide = config.intermediate;
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
    case TensorRole::kKeyNorm:
      return {config.qk_norm ? config.head_dim : 0};
    case TensorRole::kOutput:
      return {hidden, q, config.output_bias};
    case TensorRole::kGate:
    case TensorRole::kUp:
      return {wide, hidden, config.mlp_bias};
    case TensorRole::kGateUp:
      return {2 * wide, hidden, config.mlp_bias};
    case TensorRole::kDown:
      return {hidden, wide, config.mlp_bias};
    case TensorRole::kAttentionNorm:
    case TensorRole::kAttentionPostNorm:
    case TensorRole::kMlpNorm:
    case TensorRole::kMlpPostNorm:
      return {hidden};
  }
  return {};
}

}  // namespace

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
  const auto name = [](std::string_view whole) { return std::string(whole); };
  matrix(name(kEmbeddingName), config.vocab, config.hidden, false);
  for (int32_t i = 0; i < config.layers; ++i) {
    for (const LayerTensor& tensor : config.family->layer) {
      const TensorShape shape = shape_of(config, tensor.role);
      if (shape.rows == 0) continue;
      const std::string full = config.family->name(tensor.role, i);
      if (shape.cols == 0) {
        norm(full, shape.rows);
      } else {
        matrix(full, shape.rows, shape.cols, shape.bias);
      }
    }
  }
  norm(name(kFinalNormName), config.hidden);
  if (!config.tied_embeddings) matrix(name(kHeadName), config.vocab, config.hidden, false);
  return make_dummy_source(std::move(source), tensors, seed);
}

}  // namespace nfp
