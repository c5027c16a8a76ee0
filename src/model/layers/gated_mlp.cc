#include "model/layers/gated_mlp.h"

namespace nfp {

Status GatedMlp::load(WeightLoader& weights, const ModelConfig& config, int32_t layer, Block block) {
  const Family& family = *config.family;
  const int64_t wide = block == Block::kShared ? config.experts.shared_intermediate : config.intermediate;
  NFP_ASSIGN_OR_RETURN(gate_up, weights.linear(GemmType::kGateUp, layer, family.names(GemmType::kGateUp, layer, block),
                                               2 * wide, config.hidden, config.mlp_bias, RowOrder::kInterleave));
  NFP_ASSIGN_OR_RETURN(down, weights.linear(GemmType::kDown, layer, family.names(GemmType::kDown, layer, block),
                                            config.hidden, wide, config.mlp_bias));
  activation = config.activation;
  shared = gate_up.shared = down.shared = block == Block::kShared;
  return ok_status();
}

LinearArgs GatedMlp::gating(const Pass& pass) const {
  LinearArgs gated;
  gated.epilogue = Epilogue::kGatedActivation;
  gated.activation = activation;
  gated.consumer = pass.consumer(down);
  gated.x_is_plain = shared;
  return gated;
}

bool GatedMlp::run(const Pass& pass, const Buffer& x) const {
  return pass.multiply(gate_up, x, pass.work.mlp, gating(pass)) && pass.multiply_into_stream(down, pass.work.mlp);
}

bool GatedMlp::run(const Pass& pass, const Buffer& x, const Buffer& out) const {
  return pass.multiply(gate_up, x, pass.work.mlp, gating(pass)) && pass.multiply(down, pass.work.mlp, out);
}

}  // namespace nfp
