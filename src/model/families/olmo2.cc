// Llama with norms after attention and MLP in the place of those before them, and one norm of all query heads together
// and one of all key heads. OLMo 3 has windows on three of four layers, whose rotation is not scaled.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_olmo2(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = config.norm_spans_heads = true;
  return ok_status();
}

Status configure_olmo3(const FamilyFields& fields, ModelConfig& config) {
  NFP_RETURN_IF_ERROR(configure_olmo2(fields, config));
  config.local_rope_theta = fields.local_rope_theta > 0 ? fields.local_rope_theta : config.rope.theta;
  return set_windows(fields, 4, config);
}

}  // namespace

const FamilyRules kOlmo2Rules = {{.norm_eps = 1e-5f}, configure_olmo2};
const FamilyRules kOlmo3Rules = {{.sliding_window = 4096, .local_rope = true, .norm_eps = 1e-5f}, configure_olmo3};

}  // namespace nfp
