// Llama whose heads rotate in pairs of neighbours, with biases everywhere or nowhere.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_ernie4_5(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = config.output_bias = config.mlp_bias = fields.use_bias;
  config.rotates_neighbours = true;
  return ok_status();
}

}  // namespace

const FamilyRules kErnie4_5Rules = {{.tied_embeddings = true,
                                     .kv_heads = 2,
                                     .head_dim = 128,
                                     .max_context = 131072,
                                     .norm_eps = 1e-5f,
                                     .rope_theta = 500000.0f},
                                    configure_ernie4_5};

}  // namespace nfp
