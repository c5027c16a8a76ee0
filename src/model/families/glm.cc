// Llama with gate and up in one matrix, whose heads rotate in part, in pairs of neighbours. GLM 4 of April 2025 has
// norms after attention and MLP too.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_glm(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.rotates_neighbours = true;
  return ok_status();
}

Status configure_glm4(const FamilyFields& fields, ModelConfig& config) {
  // What o and down give goes through norms, and may be beyond FP16: llama.cpp asks for FP32 there of these models.
  config.wide_stream = true;
  return configure_glm(fields, config);
}

constexpr FamilyDefaults kGlmDefaults = {.attention_bias = true,
                                         .kv_heads = 2,
                                         .head_dim = 128,
                                         .max_context = 131072,
                                         .partial_rotary = 0.5f,
                                         .norm_eps = 1.5625e-7f};

}  // namespace

const FamilyRules kGlmRules = {kGlmDefaults, configure_glm};
const FamilyRules kGlm4Rules = {kGlmDefaults, configure_glm4};

}  // namespace nfp
