#pragma once

#include "model/layers/pass.h"
#include "model/weight_loader.h"

namespace nfp {

// Grouped-query attention with rotary embedding, over the paged cache.
struct Attention {
  Status load(WeightLoader& weights, const ModelConfig& config, int32_t layer);
  // x -> work.product. False where the forward ended inside. `narrows`: `pass` goes on with the sequences' last tokens,
  // as soon as all keys and values are written.
  bool run(Pass& pass, const Buffer& x, bool narrows) const;

  Linear qkv;             // [(heads + 2 * kv_heads) * head_dim, hidden]
  Linear output;          // [hidden, heads * head_dim]
  Buffer q_norm, k_norm;  // f32 [head_dim], or empty
  // As the backend's calls have them, but for what a pass gives.
  RopeArgs rope;
  AttentionArgs attend;
  bool local_rope = false;
  bool rotates = true;
};

}  // namespace nfp
