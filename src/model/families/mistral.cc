// Llama with a window on every layer; Ministral's is on some.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_mistral(const FamilyFields& fields, ModelConfig& config) {
  config.windows.assign(config.windows.size(), fields.sliding_window);
  return ok_status();
}

Status configure_ministral(const FamilyFields& fields, ModelConfig& config) {
  return set_windows(fields, fields.sliding_window > 0 ? 0 : 1, config);
}

constexpr FamilyDefaults kMistralDefaults = {.kv_heads = 8, .max_context = 131072, .sliding_window = 4096};

}  // namespace

const FamilyRules kMistralRules = {kMistralDefaults, configure_mistral};
const FamilyRules kMinistralRules = {kMistralDefaults, configure_ministral};

}  // namespace nfp
