// Mistral with experts in every layer, whose weights for a token sum to 1.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_mixtral(const FamilyFields& fields, ModelConfig& config) {
  config.windows.assign(config.windows.size(), fields.sliding_window);
  config.experts.count = fields.experts;
  config.experts.top = fields.top_experts;
  config.experts.intermediate = config.intermediate;
  config.experts.renormalise = true;
  config.experts.layers.assign(config.windows.size(), true);
  return ok_status();
}

}  // namespace

const FamilyRules kMixtralRules = {
    {.kv_heads = 8, .max_context = 131072, .norm_eps = 1e-5f, .rope_theta = 1000000.0f, .experts = 8, .top_experts = 2},
    configure_mixtral};

}  // namespace nfp
