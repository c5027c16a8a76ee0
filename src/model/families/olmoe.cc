// Llama with experts in every layer, and one norm of all query heads together and one of all key heads.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_olmoe(const FamilyFields& fields, ModelConfig& config) {
  if (fields.clip_qkv > 0) {
    return error(ErrorCode::kUnsupported, "field 'clip_qkv' is {}; clipped queries, keys and values are not supported",
                 fields.clip_qkv);
  }
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.qk_norm = config.norm_spans_heads = true;
  config.experts.count = fields.experts;
  config.experts.top = fields.top_experts;
  config.experts.intermediate = config.intermediate;
  config.experts.renormalise = fields.norm_topk_prob;
  config.experts.layers.assign(config.windows.size(), true);
  return ok_status();
}

}  // namespace

const FamilyRules kOlmoeRules = {{.max_context = 4096, .norm_eps = 1e-5f, .experts = 64, .top_experts = 8},
                                 configure_olmoe};

}  // namespace nfp
