#include "model/decoder.h"

#include <algorithm>
#include <cassert>
#include <optional>
#include <utility>

#include "base/log.h"
#include "model/layers/attention.h"
#include "model/layers/embedding.h"
#include "model/layers/expert_mlp.h"
#include "model/layers/gated_mlp.h"
#include "model/layers/head.h"
#include "model/layers/norm.h"
#include "model/rope.h"

namespace nfp {
namespace {

struct Layer {
  Status load(WeightLoader& weights, const ModelConfig& config, int32_t index) {
    const Family& family = *config.family;
    for (const auto& [norm, role] : {std::pair{&attention_norm, TensorRole::kAttentionNorm},
                                     {&attention_post_norm, TensorRole::kAttentionPostNorm},
                                     {&mlp_norm, TensorRole::kMlpNorm},
                                     {&mlp_post_norm, TensorRole::kMlpPostNorm}}) {
      if (family.has(role)) NFP_RETURN_IF_ERROR(norm->load(weights, config, family.name(role, index)));
    }
    NFP_RETURN_IF_ERROR(attention.load(weights, config, index));
    has_experts = config.has_experts(index);
    return has_experts ? experts.load(weights, config, index) : mlp.load(weights, config, index);
  }
  template <typename F>
  void for_each_linear(F&& visit) {
    visit(&attention.qkv);
    visit(&attention.output);
    if (has_experts) return experts.for_each_linear(visit);
    visit(&mlp.gate_up);
    visit(&mlp.down);
  }

  // Of what a block reads, and of what it adds to the residual stream; a family has either or both, the others are
  // empty.
  Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
  Attention attention;
  bool has_experts = false;  // one of the next two is empty
  GatedMlp mlp;
  ExpertMlp experts;
};

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, Backend& backend) : config_(config), backend_(backend) {
    assert(!(config.wide_stream && config.reads_stream()));
  }

  Status load(WeightLoader& weights);
  const ModelConfig& config() const override { return config_; }
  Backend& backend() const override { return backend_; }
  Status reserve(int32_t tokens, int32_t rows, int32_t positions) override;
  void forward(const ForwardArgs& args) override;
  void logits(const int32_t* rows, int32_t count, Precision precision, float* out) override {
    backend_.linear(head_.product(backend_, head_matrix(), work_.residual, rows, count, precision, out));
  }
  void sample(const int32_t* rows, Precision precision, float* logits, SampleArgs args) override {
    args.logits = logits;
    backend_.linear_sample(head_.product(backend_, head_matrix(), work_.residual, rows, args.rows, precision, logits),
                           args);
  }
  const Buffer& final_states(const int32_t* rows, int32_t count) override {
    return head_.states(backend_, work_.residual, rows, count, Precision::kFp16);
  }
  std::vector<Linear*> linears() override;
  Status reload(int32_t layer, WeightLoader& weights) override {
    NFP_RETURN_IF_ERROR(layers_[static_cast<size_t>(layer)].load(weights, config_, layer));
    count_bytes();
    return ok_status();
  }
  const Buffer& hidden() const override { return work_.residual; }
  size_t weight_bytes() const override { return weight_bytes_; }
  KvCacheSpec kv_spec(int64_t blocks, int32_t block_size, DType dtype) const override {
    return {config_.layers, config_.kv_heads, config_.head_dim, block_size, blocks, dtype};
  }

 private:
  void count_bytes();
  Linear& head_matrix() { return config_.tied_embeddings ? embedding_.table : head_.own; }

  ModelConfig config_;
  Backend& backend_;
  Embedding embedding_;
  std::vector<Layer> layers_;
  Head head_;
  size_t weight_bytes_ = 0;
  Buffer cos_sin_, local_cos_sin_, still_cos_sin_;  // f32 [positions, rotary dim]
  Workspace work_;
};

Status Decoder::load(WeightLoader& weights) {
  NFP_RETURN_IF_ERROR(embedding_.load(weights, config_));
  layers_.resize(static_cast<size_t>(config_.layers));
  for (int32_t i = 0; i < config_.layers; ++i) {
    NFP_RETURN_IF_ERROR(layers_[static_cast<size_t>(i)].load(weights, config_, i));
  }
  NFP_RETURN_IF_ERROR(head_.load(weights, config_));
  count_bytes();
  return ok_status();
}

void Decoder::count_bytes() {
  weight_bytes_ = config_.tied_embeddings ? 0 : embedding_.table.weight->bytes_held();
  for (const Linear* linear : linears()) weight_bytes_ += linear->weight->bytes_held();
}

Status Decoder::reserve(int32_t tokens, int32_t rows, int32_t positions) {
  positions = std::min(positions, config_.max_context);
  const RopeScaling& scaling = config_.rope.scaling;
  if (scaling.kind == RopeScaling::Kind::kLongrope && positions > scaling.original_context) {
    log::warn(
        "a context of {} tokens is beyond the original {}, so LongRoPE's long factors hold for short texts too; a "
        "context of at most {} has the short factors",
        positions, scaling.original_context, scaling.original_context);
  }
  const auto make_table = [&](Buffer& buffer, const Rope& rope) -> Status {
    const std::vector<float> table = rope_table(rope, positions);
    NFP_ASSIGN_OR_RETURN(buffer, backend_.allocate(table.size() * sizeof(float)));
    return backend_.upload(buffer.data(), table.data(), buffer.bytes());
  };
  NFP_RETURN_IF_ERROR(make_table(cos_sin_, config_.rope));
  if (config_.local_rope_theta > 0) {
    NFP_RETURN_IF_ERROR(make_table(local_cos_sin_, {config_.rope.dim, config_.local_rope_theta, {}}));
  }
  if (!config_.nope_layers.empty()) {
    const auto half = static_cast<size_t>(still_features(config_) / 2);
    std::vector<float> still;
    for (int32_t p = 0; p < positions; ++p) {
      still.insert(still.end(), half, 1.0f);
      still.insert(still.end(), half, 0.0f);
    }
    NFP_ASSIGN_OR_RETURN(still_cos_sin_, backend_.allocate(still.size() * sizeof(float)));
    NFP_RETURN_IF_ERROR(backend_.upload(still_cos_sin_.data(), still.data(), still_cos_sin_.bytes()));
  }
  NFP_RETURN_IF_ERROR(work_.reserve(backend_, config_, tokens, rows));
  NFP_RETURN_IF_ERROR(head_.reserve(backend_, config_, rows));
  return backend_.reserve({.tokens = std::max(tokens, rows),
                           .sequences = rows,
                           .hidden = config_.hidden,
                           .heads = config_.heads,
                           .kv_heads = config_.kv_heads,
                           .head_dim = config_.head_dim,
                           .rotary_dim = config_.rope.dim,
                           .experts = config_.experts.count,
                           .top_experts = config_.experts.top,
                           .expert_width = config_.experts.intermediate,
                           .plain_inputs = config_.reads_stream()});
}

void Decoder::forward(const ForwardArgs& args) {
  Pass pass{backend_, args, work_, cos_sin_.as<float>(), local_cos_sin_.as<float>(), still_cos_sin_.as<float>()};
  const int32_t end = args.end_layer < 0 ? config_.layers : std::min(args.end_layer, config_.layers);
  if (args.first_layer == 0) embedding_.run(pass);
  const Buffer* pending = nullptr;        // still to be added to the residual stream,
  std::optional<CombineExpertsArgs> sum;  // and where it is experts' results that are still to be summed up, how
  const auto add_and_norm = [&](RmsNormArgs call) {
    if (pending != nullptr) {
      call.x = pending->data();
      call.residual = work_.residual.data();
    }
    if (sum.has_value()) {
      backend_.combine_rms_norm(*sum, call);
    } else {
      backend_.rms_norm(call);
    }
    pending = nullptr;
    sum.reset();
  };
  const auto add_pending = [&] {
    if (pending != nullptr) add_and_norm({.rows = pass.rows(), .hidden = config_.hidden, .x_is_f32 = work_.wide});
  };
  // What a block reads.
  const auto norm = [&](const Norm& by, Precision consumer) -> const Buffer& {
    if (by.weight.data() == nullptr) {
      add_pending();
      return work_.residual;
    }
    add_and_norm(by.of(work_.residual, pass.rows(), consumer, work_.normed));
    return work_.normed;
  };
  const auto add = [&](const Norm& by) {
    pending = &work_.product;
    if (by.weight.data() == nullptr) return;
    if (sum.has_value()) backend_.combine_experts(*std::exchange(sum, {}));
    backend_.rms_norm(by.of(work_.product, pass.rows(), Precision::kFp16, work_.added, /*into_stream=*/true));
    pending = &work_.added;
  };
  for (int32_t i = args.first_layer; i < end; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    const bool narrows = i + 1 == config_.layers && args.batch.last.token != nullptr;
    if (!layer.attention.run(pass, norm(layer.attention_norm, pass.consumer(layer.attention.qkv)), narrows)) return;
    add(layer.attention_post_norm);
    // The router and several experts read the same norm: in the form that all of them can read.
    const Buffer& x = norm(layer.mlp_norm, layer.has_experts ? Precision::kFp16 : pass.consumer(layer.mlp.gate_up));
    if (!(layer.has_experts ? layer.experts.run(pass, sum) : layer.mlp.run(pass, x))) return;
    add(layer.mlp_post_norm);
  }
  add_pending();
}

std::vector<Linear*> Decoder::linears() {
  std::vector<Linear*> all;
  for (Layer& layer : layers_) layer.for_each_linear([&](Linear* linear) { all.push_back(linear); });
  all.push_back(&head_matrix());
  return all;
}

}  // namespace

Result<std::unique_ptr<Model>> load_decoder(const ModelConfig& config, WeightLoader& weights) {
  auto model = std::make_unique<Decoder>(config, weights.backend());
  NFP_RETURN_IF_ERROR(model->load(weights));
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace nfp
