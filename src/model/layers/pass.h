// One forward as its layers see it: what they compute in, where, and who listens.
#pragma once

#include "model/model.h"

namespace nfp {

// Activations of a step, which all layers share.
struct Workspace {
  static size_t stream_bytes(Backend& backend, const ModelConfig& config, int32_t rows);
  Status reserve(Backend& backend, const ModelConfig& config, int32_t tokens);

  bool wide = false;  // the first three are FP32 (ModelConfig::wide_stream)
  Buffer residual;    // [tokens, hidden] the stream that runs from layer to layer
  Buffer product;     // [tokens, hidden] of a layer's last matrix, to be added to the stream
  Buffer added;       // [tokens, hidden] its norm, which is added instead in families with such norms
  Buffer normed;      // [tokens, hidden] the inputs of a layer's first matrix
  Buffer qkv;         // [tokens, (heads + 2 * kv_heads) * head_dim]
  Buffer attended;    // [tokens, heads * head_dim]
  Buffer mlp;         // [tokens, intermediate]
};

struct Pass {
  Backend& backend;
  const ForwardArgs& args;
  const Workspace& work;
  const float* cos_sin;        // device [positions, rotary dim]
  const float* local_cos_sin;  // of layers with a window

  int32_t rows() const { return args.batch.tokens; }
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
