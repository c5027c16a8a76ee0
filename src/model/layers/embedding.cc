#include "model/layers/embedding.h"

namespace nfp {

Status Embedding::load(WeightLoader& weights, const ModelConfig& config) {
  NFP_ASSIGN_OR_RETURN(table, weights.linear(GemmType::kHead, config.layers, {std::string(kEmbeddingName)},
                                             config.vocab, config.hidden, false));
  scale = config.embedding_scale;
  return ok_status();
}

void Embedding::run(const Pass& pass) const {
  pass.backend.embed({table.weight.get(), pass.args.batch, scale, pass.work.residual.data(), pass.work.wide});
}

}  // namespace nfp
