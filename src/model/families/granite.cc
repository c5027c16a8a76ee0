// Llama with factors of its own for embeddings, for what blocks add to the residual stream, for q k^T and for logits.
#include "model/families/families.h"

namespace nfp {
namespace {

Status configure_granite(const FamilyFields& fields, ModelConfig& config) {
  config.qkv_bias = fields.attention_bias;
  config.output_bias = fields.attention_bias;
  config.mlp_bias = fields.mlp_bias;
  // The stream is kept divided by the factor of what is added to it, which then is 1: a norm of r z with eps is the
  // norm of z with eps / r^2, and norms are all that reads the stream.
  const float r = fields.residual_multiplier;
  config.embedding_scale = fields.embedding_multiplier / r;
  config.norm_eps /= r * r;
  // r is about 0.2 in published models: what is that much larger may leave FP16's range.
  config.wide_stream = true;
  config.attention_scale = fields.attention_multiplier;
  config.logit_scale = 1.0f / fields.logits_scaling;
  return ok_status();
}

}  // namespace

const FamilyRules kGraniteRules = {{}, configure_granite};

}  // namespace nfp
