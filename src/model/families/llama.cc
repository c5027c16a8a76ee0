#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_llama(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.mlp_bias = fields.mlp_bias;
  return ok_status();
}

}  // namespace

const FamilyRules kLlamaRules = {{}, configure_llama};

}  // namespace nfp
