#include "model/llama.h"

#include <algorithm>
#include <cmath>

#include "model/rope.h"

namespace nfp {
namespace {

struct Layer {
  Buffer attention_norm;  // f32 [hidden]
  Linear qkv;             // [(heads + 2 * kv_heads) * head_dim, hidden]
  Buffer q_norm, k_norm;  // f32 [head_dim], or empty
  Linear output;          // [hidden, heads * head_dim]
  Buffer mlp_norm;        // f32 [hidden]
  Linear gate_up;         // [2 * intermediate, hidden], rows interleaved
  Linear down;            // [hidden, intermediate]
};

class Llama final : public Model {
 public:
  Llama(const ModelConfig& config, Backend& backend) : config_(config), backend_(backend) {}

  Status load(WeightLoader& weights);
  const ModelConfig& config() const override { return config_; }
  Backend& backend() const override { return backend_; }
  Status reserve(int32_t tokens, int32_t rows, int32_t positions) override;
  void forward(const ForwardArgs& args) override;
  void logits(const int32_t* rows, int32_t count, Precision precision, float* out) override;
  std::vector<Linear*> linears() override;
  Status reload(int32_t layer, WeightLoader& weights) override {
    return load_layer(weights, layer, layers_[static_cast<size_t>(layer)]);
  }
  const Buffer& hidden() const override { return x_; }
  size_t weight_bytes() const override;
  KvCacheSpec kv_spec(int64_t blocks, int32_t block_size, DType dtype) const override {
    return {config_.layers, config_.kv_heads, config_.head_dim, block_size, blocks, dtype};
  }

 private:
  Status load_layer(WeightLoader& weights, int32_t index, Layer& layer);
  // out = norm(x), or with `residual` the norm of residual + x, which residual becomes.
  void norm(const Buffer& weight, const Buffer& x, const Buffer* residual, int32_t rows, Precision consumer,
            const Buffer& out);
  // False where the forward ends before this layer.
  bool multiply(const Linear& linear, const Buffer& x, int32_t rows, const ForwardArgs& args, Epilogue epilogue,
                const Buffer& y, Precision consumer = Precision::kFp16);

  ModelConfig config_;
  Backend& backend_;
  Linear embedding_;  // [vocab, hidden]; also the head where they are tied
  std::vector<Layer> layers_;
  Buffer final_norm_;
  Linear head_;                      // empty where tied
  std::vector<double> frequencies_;  // of the rotary embedding
  Buffer cos_sin_;                   // f32 [positions, head_dim]

  // Activations of one step.
  Buffer x_;         // residual stream [tokens, hidden]
  Buffer product_;   // [tokens, hidden] of the last linear layer, to be added to x_
  Buffer normed_;    // [tokens, hidden]
  Buffer qkv_;       // [tokens, (heads + 2 * kv_heads) * head_dim]
  Buffer attended_;  // [tokens, heads * head_dim]
  Buffer mlp_;       // [tokens, intermediate]
  Buffer gathered_;  // [rows, hidden]
  Buffer gathered_normed_;
};

Status Llama::load(WeightLoader& weights) {
  const int64_t hidden = config_.hidden;
  NFP_ASSIGN_OR_RETURN(embedding_, weights.linear(GemmType::kHead, config_.layers, {"model.embed_tokens"},
                                                  config_.vocab, hidden, false));
  layers_.resize(static_cast<size_t>(config_.layers));
  for (int32_t i = 0; i < config_.layers; ++i) {
    NFP_RETURN_IF_ERROR(load_layer(weights, i, layers_[static_cast<size_t>(i)]));
  }
  NFP_ASSIGN_OR_RETURN(final_norm_, weights.vector("model.norm.weight", hidden));
  if (!config_.tied_embeddings) {
    NFP_ASSIGN_OR_RETURN(head_,
                         weights.linear(GemmType::kHead, config_.layers, {"lm_head"}, config_.vocab, hidden, false));
  }
  NFP_ASSIGN_OR_RETURN(const std::vector<float> factors, weights.rope_factors(config_.head_dim / 2));
  frequencies_ = rope_frequencies(config_, factors);
  return ok_status();
}

Status Llama::load_layer(WeightLoader& weights, int32_t index, Layer& layer) {
  const std::string prefix = fmt::format("model.layers.{}.", index);
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const int64_t hidden = config_.hidden;
  const int64_t q = int64_t{config_.heads} * config_.head_dim;
  const int64_t kv = int64_t{config_.kv_heads} * config_.head_dim;
  const int64_t wide = config_.intermediate;
  NFP_ASSIGN_OR_RETURN(layer.attention_norm, weights.vector(prefix + "input_layernorm.weight", hidden));
  NFP_ASSIGN_OR_RETURN(layer.qkv, weights.linear(GemmType::kQkv, index,
                                                 {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
                                                 q + 2 * kv, hidden, config_.qkv_bias));
  if (config_.qk_norm) {
    NFP_ASSIGN_OR_RETURN(layer.q_norm, weights.vector(attention + "q_norm.weight", config_.head_dim));
    NFP_ASSIGN_OR_RETURN(layer.k_norm, weights.vector(attention + "k_norm.weight", config_.head_dim));
  }
  NFP_ASSIGN_OR_RETURN(
      layer.output, weights.linear(GemmType::kOutput, index, {attention + "o_proj"}, hidden, q, config_.output_bias));
  NFP_ASSIGN_OR_RETURN(layer.mlp_norm, weights.vector(prefix + "post_attention_layernorm.weight", hidden));
  NFP_ASSIGN_OR_RETURN(layer.gate_up, weights.linear(GemmType::kGateUp, index, {mlp + "gate_proj", mlp + "up_proj"},
                                                     2 * wide, hidden, config_.mlp_bias, RowOrder::kInterleave));
  NFP_ASSIGN_OR_RETURN(layer.down,
                       weights.linear(GemmType::kDown, index, {mlp + "down_proj"}, hidden, wide, config_.mlp_bias));
  return ok_status();
}

Status Llama::reserve(int32_t tokens, int32_t rows, int32_t positions) {
  const std::vector<float> table = rope_table(frequencies_, std::min(positions, config_.max_context));
  NFP_ASSIGN_OR_RETURN(cos_sin_, backend_.allocate(table.size() * sizeof(float)));
  NFP_RETURN_IF_ERROR(backend_.upload(cos_sin_.data(), table.data(), cos_sin_.bytes()));
  const auto make = [&](Buffer& buffer, int32_t count, int64_t features) -> Status {
    buffer.reset();
    NFP_ASSIGN_OR_RETURN(buffer, backend_.allocate(backend_.activation_bytes(count, features)));
    return ok_status();
  };
  const int64_t q = int64_t{config_.heads} * config_.head_dim;
  const int64_t kv = int64_t{config_.kv_heads} * config_.head_dim;
  NFP_RETURN_IF_ERROR(make(x_, tokens, config_.hidden));
  NFP_RETURN_IF_ERROR(make(product_, tokens, config_.hidden));
  NFP_RETURN_IF_ERROR(make(normed_, tokens, config_.hidden));
  NFP_RETURN_IF_ERROR(make(qkv_, tokens, q + 2 * kv));
  NFP_RETURN_IF_ERROR(make(attended_, tokens, q));
  NFP_RETURN_IF_ERROR(make(mlp_, tokens, config_.intermediate));
  NFP_RETURN_IF_ERROR(make(gathered_, rows, config_.hidden));
  NFP_RETURN_IF_ERROR(backend_.reserve({.tokens = std::max(tokens, rows),
                                        .sequences = rows,
                                        .heads = config_.heads,
                                        .kv_heads = config_.kv_heads,
                                        .head_dim = config_.head_dim}));
  return make(gathered_normed_, rows, config_.hidden);
}

void Llama::norm(const Buffer& weight, const Buffer& x, const Buffer* residual, int32_t rows, Precision consumer,
                 const Buffer& out) {
  backend_.rms_norm({.x = x.data(),
                     .residual = residual != nullptr ? residual->data() : nullptr,
                     .weight = weight.as<float>(),
                     .eps = config_.norm_eps,
                     .rows = rows,
                     .hidden = config_.hidden,
                     .consumer = consumer,
                     .out = out.data()});
}

bool Llama::multiply(const Linear& linear, const Buffer& x, int32_t rows, const ForwardArgs& args, Epilogue epilogue,
                     const Buffer& y, Precision consumer) {
  if (args.observer != nullptr) args.observer->on_linear(linear, x.data(), rows);
  if (args.until == &linear) return false;
  backend_.linear({.weight = linear.weight.get(),
                   .x = x.data(),
                   .rows = rows,
                   .precision = linear.at(args.precision, args.fp8_share),
                   .epilogue = epilogue,
                   .activation = config_.activation,
                   .consumer = consumer,
                   .y = y.data(),
                   .y_is_f32 = false});
  return true;
}

void Llama::forward(const ForwardArgs& args) {
  const int32_t rows = args.batch.tokens;
  const auto consumer = [&](const Linear& linear) {
    return linear.weight->consumes(linear.at(args.precision, args.fp8_share));
  };
  const int32_t end = args.end_layer < 0 ? config_.layers : std::min(args.end_layer, config_.layers);
  if (args.first_layer == 0) {
    backend_.embed({embedding_.weight.get(), args.batch, 1.0f, x_.data()});
  }
  bool pending = false;  // product_ is still to be added to the residual stream
  for (int32_t i = args.first_layer; i < end; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    norm(layer.attention_norm, pending ? product_ : x_, pending ? &x_ : nullptr, rows, consumer(layer.qkv), normed_);
    pending = false;
    if (!multiply(layer.qkv, normed_, rows, args, Epilogue::kStore, qkv_)) return;
    backend_.rope({.qkv = qkv_.data(),
                   .heads = config_.heads,
                   .kv_heads = config_.kv_heads,
                   .head_dim = config_.head_dim,
                   .cos_sin = cos_sin_.as<float>(),
                   .q_norm = layer.q_norm.as<float>(),
                   .k_norm = layer.k_norm.as<float>(),
                   .norm_eps = config_.norm_eps,
                   .cache = args.cache,
                   .layer = i,
                   .batch = args.batch});
    backend_.attention({.qkv = qkv_.data(),
                        .heads = config_.heads,
                        .kv_heads = config_.kv_heads,
                        .head_dim = config_.head_dim,
                        .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
                        .window = config_.windows[static_cast<size_t>(i)],
                        .soft_cap = 0.0f,
                        .cache = args.cache,
                        .layer = i,
                        .batch = args.batch,
                        .out = attended_.data(),
                        .consumer = consumer(layer.output)});
    if (!multiply(layer.output, attended_, rows, args, Epilogue::kStore, product_)) return;
    norm(layer.mlp_norm, product_, &x_, rows, consumer(layer.gate_up), normed_);
    if (!multiply(layer.gate_up, normed_, rows, args, Epilogue::kGatedActivation, mlp_, consumer(layer.down))) return;
    if (!multiply(layer.down, mlp_, rows, args, Epilogue::kStore, product_)) return;
    pending = true;
  }
  if (pending) {
    backend_.rms_norm({.x = product_.data(), .residual = x_.data(), .rows = rows, .hidden = config_.hidden});
  }
}

void Llama::logits(const int32_t* rows, int32_t count, Precision precision, float* out) {
  const Linear& head = config_.tied_embeddings ? embedding_ : head_;
  backend_.gather_rows({x_.data(), rows, count, config_.hidden, gathered_.data()});
  norm(final_norm_, gathered_, nullptr, count, head.weight->consumes(head.at(precision)), gathered_normed_);
  backend_.linear({.weight = head.weight.get(),
                   .x = gathered_normed_.data(),
                   .rows = count,
                   .precision = head.at(precision),
                   .epilogue = Epilogue::kStore,
                   .activation = config_.activation,
                   .consumer = Precision::kFp16,
                   .y = out,
                   .y_is_f32 = true});
}

std::vector<Linear*> Llama::linears() {
  std::vector<Linear*> all;
  for (Layer& layer : layers_) {
    for (Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) all.push_back(linear);
  }
  all.push_back(config_.tied_embeddings ? &embedding_ : &head_);
  return all;
}

size_t Llama::weight_bytes() const {
  size_t bytes = embedding_.weight->bytes_held() + (head_.weight ? head_.weight->bytes_held() : 0);
  for (const Layer& layer : layers_) {
    for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      bytes += linear->weight->bytes_held();
    }
  }
  return bytes;
}

}  // namespace

Result<std::unique_ptr<Model>> load_llama(const ModelConfig& config, WeightLoader& weights) {
  auto model = std::make_unique<Llama>(config, weights.backend());
  NFP_RETURN_IF_ERROR(model->load(weights));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace nfp
