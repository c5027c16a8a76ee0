// OLMo 2's places of norms with a norm of each query and key head. Where some layers have a window, the heads of the
// others do not rotate.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_exaone4(const FamilyFields& fields, ModelConfig& config) {
  config.qk_norm = true;
  const bool windows = fields.sliding_window > 0;
  NFP_RETURN_IF_ERROR(set_windows(fields, windows ? fields.sliding_window_pattern : 1, config));
  for (const int32_t window : config.windows) {
    if (windows) config.nope_layers.push_back(window == 0);
  }
  return ok_status();
}

}  // namespace

const FamilyRules kExaone4Rules = {
    {.kv_heads = 32, .sliding_window = 4096, .sliding_window_pattern = 4, .norm_eps = 1e-5f}, configure_exaone4};

}  // namespace nfp
