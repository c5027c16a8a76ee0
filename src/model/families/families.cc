#include "model/families/families.h"

namespace nfp {

const FamilyRules& rules_of(FamilyId family) {
  switch (family) {
    case FamilyId::kLlama:
      break;
    case FamilyId::kMistral:
      return kMistralRules;
    case FamilyId::kQwen2:
      return kQwen2Rules;
    case FamilyId::kQwen3:
      return kQwen3Rules;
    case FamilyId::kSmolLm3:
      return kSmolLm3Rules;
    case FamilyId::kPhi3:
      return kPhi3Rules;
    case FamilyId::kGemma:
      return kGemmaRules;
    case FamilyId::kGemma2:
      return kGemma2Rules;
    case FamilyId::kGemma3:
      return kGemma3Rules;
    case FamilyId::kGranite:
      return kGraniteRules;
    case FamilyId::kMixtral:
      return kMixtralRules;
    case FamilyId::kQwen2Moe:
      return kQwen2MoeRules;
    case FamilyId::kQwen3Moe:
      return kQwen3MoeRules;
    case FamilyId::kOlmo2:
      return kOlmo2Rules;
    case FamilyId::kOlmo3:
      return kOlmo3Rules;
    case FamilyId::kOlmoe:
      return kOlmoeRules;
    case FamilyId::kSeedOss:
      return kSeedOssRules;
    case FamilyId::kExaone4:
      return kExaone4Rules;
    case FamilyId::kGlm:
      return kGlmRules;
    case FamilyId::kGlm4:
      return kGlm4Rules;
    case FamilyId::kErnie4_5:
      return kErnie4_5Rules;
    case FamilyId::kMinistral:
      return kMinistralRules;
    case FamilyId::kHelium:
      return kHeliumRules;
  }
  return kLlamaRules;
}

Status set_windows(const FamilyFields& fields, int32_t pattern, ModelConfig& config) {
  for (size_t i = 0; i < config.windows.size(); ++i) {
    const bool slides = fields.layer_slides.empty() ? pattern == 0 || (static_cast<int32_t>(i) + 1) % pattern != 0
                                                    : fields.layer_slides[i];
    if (slides && fields.sliding_window == 0) {
      return error(ErrorCode::kInvalidInput, "field 'sliding_window' is null, but layer {} slides", i);
    }
    config.windows[i] = slides ? fields.sliding_window : 0;
  }
  return ok_status();
}

}  // namespace nfp
