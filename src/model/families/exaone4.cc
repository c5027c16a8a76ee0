// OLMo 2's places of norms with a norm of each query and key head. Where some layers have a window, the heads of the
// others do not rotate.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_exaone4(const FamilyFields& fields, ModelConfig& config) {
  config.qk_norm = true;
  const int32_t window = fields.sliding_window;
  for (int32_t i = 0; i < config.layers; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool slides = fields.layer_slides.empty() ? window > 0 && (i + 1) % fields.sliding_window_pattern != 0
                                                    : fields.layer_slides[at];
    if (slides && window == 0) {
      return error(ErrorCode::kInvalidInput, "field 'sliding_window' is null, but layer {} slides", i);
    }
    config.windows[at] = slides ? window : 0;
    if (window > 0) config.nope_layers.push_back(!slides);
  }
  return ok_status();
}

}  // namespace

const FamilyRules kExaone4Rules = {
    {.kv_heads = 32, .sliding_window = 4096, .sliding_window_pattern = 4, .norm_eps = 1e-5f}, configure_exaone4};

}  // namespace nfp
