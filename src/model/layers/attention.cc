#include "model/layers/attention.h"

#include <cassert>

namespace nfp {

Status Attention::load(WeightLoader& weights, const ModelConfig& config, int32_t layer) {
  const Family& family = *config.family;
  const int64_t q = config.query_features(), kv = config.kv_features();
  NeighbourPairs pairs;
  if (config.rotates_neighbours) pairs = {q + kv, config.head_dim, config.rope.dim};
  assert(!(config.rotates_neighbours && config.qk_norm));  // whose weights would need that order too
  NFP_ASSIGN_OR_RETURN(qkv, weights.linear(GemmType::kQkv, layer, family.names(GemmType::kQkv, layer), q + 2 * kv,
                                           config.hidden, config.qkv_bias, RowOrder::kConcat, pairs));
  if (config.qk_norm) {
    const auto load_norm = [&](Buffer& norm, TensorRole role, int64_t all_heads) -> Status {
      const int64_t size = config.norm_spans_heads ? all_heads : config.head_dim;
      NFP_ASSIGN_OR_RETURN(norm, weights.vector(family.name(role, layer), size, config.norm_offset));
      return ok_status();
    };
    NFP_RETURN_IF_ERROR(load_norm(q_norm, TensorRole::kQueryNorm, q));
    NFP_RETURN_IF_ERROR(load_norm(k_norm, TensorRole::kKeyNorm, kv));
  }
  NFP_ASSIGN_OR_RETURN(output, weights.linear(GemmType::kOutput, layer, family.names(GemmType::kOutput, layer),
                                              config.hidden, q, config.output_bias));
  rope.heads = attend.heads = config.heads;
  rope.kv_heads = attend.kv_heads = config.kv_heads;
  rope.head_dim = attend.head_dim = config.head_dim;
  rope.layer = attend.layer = layer;
  rope.q_norm = q_norm.as<float>();
  rope.k_norm = k_norm.as<float>();
  rope.norm_eps = config.norm_eps;
  rope.norm_spans_heads = config.norm_spans_heads;
  rotates = config.rotates(layer);
  rope.rotary_dim = rotates ? config.rope.dim : still_features(config);
  attend.scale = config.attention_scale;
  attend.soft_cap = config.attention_cap;
  attend.window = config.windows[static_cast<size_t>(layer)];
  local_rope = config.local_rope_theta > 0 && attend.window > 0;
  return ok_status();
}

bool Attention::run(Pass& pass, const Buffer& x, bool narrows) const {
  const Workspace& work = pass.work;
  Backend& backend = pass.backend;
  if (!pass.multiply(qkv, x, work.qkv)) return false;
  RopeArgs rotate = rope;
  rotate.qkv = work.qkv.data();
  rotate.cos_sin = !rotates ? pass.still_cos_sin : local_rope ? pass.local_cos_sin : pass.cos_sin;
  rotate.cache = pass.args.cache;
  rotate.batch = pass.batch;
  AttentionArgs call = attend;
  call.qkv = work.qkv.data();
  call.cache = pass.args.cache;
  call.batch = pass.batch;
  call.out = work.attended.data();
  call.consumer = pass.consumer(output);
  if (narrows) {
    backend.rope(rotate);
    const int32_t features = (attend.heads + 2 * attend.kv_heads) * attend.head_dim;
    backend.gather_rows({work.qkv.data(), pass.batch.last.token, pass.batch.sequences, features, work.last_qkv.data()});
    pass.narrow(static_cast<int32_t>(output.weight->n()));
    call.qkv = work.last_qkv.data();
    call.batch = pass.batch;
    backend.attention(call);
  } else {
    backend.rope_attention(rotate, call);
  }
  return pass.multiply_into_stream(output, work.attended);
}

}  // namespace nfp
