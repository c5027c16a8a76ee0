// Llama whose heads rotate in pairs of neighbours, with biases on q, k and v or in the MLP if asked for.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_helium(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.mlp_bias = fields.mlp_bias;
  config.rotates_neighbours = true;
  return ok_status();
}

}  // namespace

const FamilyRules kHeliumRules = {
    {.kv_heads = 20, .head_dim = 128, .max_context = 4096, .norm_eps = 1e-8f, .rope_theta = 100000.0f},
    configure_helium};

}  // namespace nfp
