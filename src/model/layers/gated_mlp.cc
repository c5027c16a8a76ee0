#include "model/layers/gated_mlp.h"

namespace nfp {

Status GatedMlp::load(WeightLoader& weights, const ModelConfig& config, int32_t layer) {
  const Family& family = *config.family;
  const int64_t wide = config.intermediate;
  NFP_ASSIGN_OR_RETURN(gate_up, weights.linear(GemmType::kGateUp, layer, family.names(GemmType::kGateUp, layer),
                                               2 * wide, config.hidden, config.mlp_bias, RowOrder::kInterleave));
  NFP_ASSIGN_OR_RETURN(down, weights.linear(GemmType::kDown, layer, family.names(GemmType::kDown, layer), config.hidden,
                                            wide, config.mlp_bias));
  activation = config.activation;
  return ok_status();
}

bool GatedMlp::run(const Pass& pass) const {
  LinearArgs gated;
  gated.epilogue = Epilogue::kGatedActivation;
  gated.activation = activation;
  gated.consumer = pass.consumer(down);
  return pass.multiply(gate_up, pass.work.normed, pass.work.mlp, gated) &&
         pass.multiply_into_stream(down, pass.work.mlp);
}

}  // namespace nfp
