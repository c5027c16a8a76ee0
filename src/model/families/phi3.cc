// Llama with q, k and v in one matrix, gate and up in another, a window on every layer, and a rotation of a part of
// each head.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_phi3(const FamilyFields& fields, ModelConfig& config) {
  config.windows.assign(config.windows.size(), fields.sliding_window);
  return ok_status();
}

}  // namespace

const FamilyRules kPhi3Rules = {
    {.max_context = 4096, .original_context = 4096, .partial_rotary = 1.0f, .has_su_scaling = true, .norm_eps = 1e-5f},
    configure_phi3};

}  // namespace nfp
