// Gemma: norms of (1 + weight), GeGLU, scaled embeddings. Gemma 2 and the text model of Gemma 3 also have norms after
// attention and MLP and windows on some layers; Gemma 2 soft caps; Gemma 3 norms of heads and two rotary bases.
#include <cmath>

#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_gemma(const FamilyFields& fields, ModelConfig& config) {
  // Embeddings times sqrt(hidden) and norms of (1 + weight) add up to hundreds of thousands in trained models.
  config.wide_stream = true;
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.embedding_scale = std::sqrt(static_cast<float>(config.hidden));
  return ok_status();
}

Status configure_sliding(const FamilyFields& fields, ModelConfig& config, int32_t pattern) {
  NFP_RETURN_IF_ERROR(configure_gemma(fields, config));
  config.attention_scale = 1.0f / std::sqrt(fields.query_scalar);
  config.attention_cap = fields.attention_cap;
  config.logit_cap = fields.logit_cap;
  return set_windows(fields, pattern, config);
}

Status configure_gemma2(const FamilyFields& fields, ModelConfig& config) {
  return configure_sliding(fields, config, 2);
}

Status configure_gemma3(const FamilyFields& fields, ModelConfig& config) {
  NFP_RETURN_IF_ERROR(configure_sliding(fields, config, fields.sliding_window_pattern));
  config.qk_norm = true;
  config.local_rope_theta = fields.local_rope_theta > 0 ? fields.local_rope_theta : 10000.0f;
  config.attention_cap = 0;  // transformers reads attn_logit_softcapping of this family and does not compute it
  return ok_status();
}

}  // namespace

// As transformers' GemmaConfig, Gemma2Config and Gemma3TextConfig have them.
const FamilyRules kGemmaRules = {
    {.tied_embeddings = true, .kv_heads = 16, .head_dim = 256, .max_context = 8192, .activation = "gelu_pytorch_tanh"},
    configure_gemma};
const FamilyRules kGemma2Rules = {{.tied_embeddings = true,
                                   .kv_heads = 4,
                                   .head_dim = 256,
                                   .max_context = 8192,
                                   .sliding_window = 4096,
                                   .activation = "gelu_pytorch_tanh",
                                   .query_scalar = 256,
                                   .attention_cap = 50,
                                   .logit_cap = 30},
                                  configure_gemma2};
const FamilyRules kGemma3Rules = {{.tied_embeddings = true,
                                   .heads = 8,
                                   .vocab = 262208,
                                   .kv_heads = 4,
                                   .head_dim = 256,
                                   .max_context = 131072,
                                   .sliding_window = 4096,
                                   .sliding_window_pattern = 6,
                                   .local_rope = true,
                                   .local_base_freq = true,
                                   .rope_theta = 1000000.0f,
                                   .activation = "gelu_pytorch_tanh",
                                   .query_scalar = 256},
                                  configure_gemma3};

}  // namespace nfp
