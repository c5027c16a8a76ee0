// Llama with norms after attention and MLP in the place of those before them, and one norm of all query heads together
// and one of all key heads.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_olmo2(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = config.norm_spans_heads = true;
  return ok_status();
}

}  // namespace

const FamilyRules kOlmo2Rules = {{.norm_eps = 1e-5f}, configure_olmo2};

}  // namespace nfp
