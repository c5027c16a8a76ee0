// Llama with a window on every layer.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_mistral(const FamilyFields& fields, ModelConfig& config) {
  config.windows.assign(config.windows.size(), fields.sliding_window);
  return ok_status();
}

}  // namespace

const FamilyRules kMistralRules = {{.kv_heads = 8, .max_context = 131072, .sliding_window = 4096}, configure_mistral};

}  // namespace nfp
