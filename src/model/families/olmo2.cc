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
  for (size_t i = 0; i < config.windows.size(); ++i) {
    const bool slides = fields.layer_slides.empty() ? (i + 1) % 4 != 0 : fields.layer_slides[i];
    if (slides && fields.sliding_window == 0) {
      return error(ErrorCode::kInvalidInput, "field 'sliding_window' is null, but layer {} slides", i);
    }
    config.windows[i] = slides ? fields.sliding_window : 0;
  }
  config.local_rope_theta = fields.local_rope_theta > 0 ? fields.local_rope_theta : config.rope.theta;
  return ok_status();
}

}  // namespace

const FamilyRules kOlmo2Rules = {{.norm_eps = 1e-5f}, configure_olmo2};
const FamilyRules kOlmo3Rules = {{.sliding_window = 4096, .local_rope = true, .norm_eps = 1e-5f}, configure_olmo3};

}  // namespace nfp
