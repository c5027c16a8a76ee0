// One forward as its layers see it: what they compute in, where, and who listens.
#pragma once

#include <algorithm>

#include "model/model.h"

namespace nfp {

// Activations of a step, which all layers share.
struct Workspace {
  static size_t stream_bytes(Backend& backend, const ModelConfig& config, int32_t rows);
  Status reserve(Backend& backend, const ModelConfig& config, int32_t tokens, int32_t sequences);

  bool wide = false;  // the first three are FP32 (ModelConfig::wide_stream)
  Buffer residual;    // [tokens, hidden] the stream that runs from layer to layer
  Buffer product;     // [tokens, hidden] of a layer's last matrix, to be added to the stream
  Buffer added;       // [tokens, hidden] its norm, which is added instead in families with such norms
  Buffer normed;      // [tokens, hidden] the inputs of a layer's first matrix
  Buffer qkv;         // [tokens, (heads + 2 * kv_heads) * head_dim]
  Buffer last_qkv;    // [sequences, likewise] of their last tokens
  Buffer attended;    // [tokens, heads * head_dim]
  Buffer mlp;         // [tokens, intermediate]
  // Of layers with experts; an assignment is a token's row for one of its experts.
  ExpertRoutes routes() const;
  Buffer route_start, route_row, route_place, route_weight;  // as ExpertRoutes has them
  Buffer router_logits;                                      // f32 [tokens, experts]
  Buffer shared_weight;                                      // f32 [tokens]
  Buffer expert_mlp;                                         // [assignments, an expert's intermediate]
  Buffer expert_out;                                         // [assignments, hidden]
  Buffer shared;                                             // [tokens, hidden] of the shared expert
  int32_t experts = 0, top_experts = 0;
};

// Heads that do not rotate are rotated by nothing in so many features: one way leads to the cache. GPUs want 8 or more.
inline int32_t still_features(const ModelConfig& config) { return std::min(config.head_dim, 16); }

struct Pass {
  Backend& backend;
  const ForwardArgs& args;
  const Workspace& work;
  const float* cos_sin;        // device [positions, rotary dim]
  const float* local_cos_sin;  // of layers with a window
  const float* still_cos_sin;  // device [positions, still_features] of layers whose heads do not rotate
  BatchView batch = args.batch;

  int32_t rows() const { return batch.tokens; }
  // Goes on with the sequences' last tokens alone, whose rows of the residual stream become the first ones.
  void narrow(int32_t hidden);
  // The form in which `linear` wants its inputs: `consumer` of what writes them.
  Precision consumer(const Linear& linear) const {
    return linear.weight->consumes(linear.at(args.precision, args.fp8_share));
  }
  // y = linear(x), with the epilogue that `call` asks for. False where the forward ends before this layer.
  bool multiply(const Linear& linear, const Buffer& x, const Buffer& y, LinearArgs call = {}) const;
  // work.product = linear(x), to be added to the stream.
  bool multiply_into_stream(const Linear& linear, const Buffer& x) const {
    return multiply(linear, x, work.product, {.y_is_f32 = work.wide});
  }
};

}  // namespace nfp
