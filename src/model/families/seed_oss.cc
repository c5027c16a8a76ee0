// Llama with biases on q, k and v, and one on o that is asked for by itself.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_seed_oss(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_out_bias;
  config.mlp_bias = fields.mlp_bias;
  return ok_status();
}

}  // namespace

const FamilyRules kSeedOssRules = {{.attention_bias = true, .kv_heads = 8, .head_dim = 128, .max_context = 524288},
                                   configure_seed_oss};

}  // namespace nfp
