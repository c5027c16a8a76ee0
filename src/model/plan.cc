#include "model/plan.h"

#include <algorithm>

#include "io/family.h"
#include "model/dummy_model.h"

namespace nfp {

ModelPlan plan_model(const ModelConfig& config) {
  ModelPlan plan;
  uint64_t idle = 0;  // of experts that a token does not have
  for (const DummyTensor& tensor : tensors_of(config)) {
    const auto elements = static_cast<uint64_t>(tensor.shape.elements());
    plan.parameters += elements;
    const auto type = gemm_type(tensor.name);
    if (tensor.name == std::string(kEmbeddingName) + ".weight") plan.embedding = elements;
    if (!type) continue;
    (*type == GemmType::kHead ? plan.head : plan.linear) += elements;
    if (block_of(tensor.name) == Block::kExpert) idle += elements;
  }
  if (config.tied_embeddings && config.has_head) plan.head = plan.embedding;
  const auto experts = static_cast<uint64_t>(config.experts.count), top = static_cast<uint64_t>(config.experts.top);
  if (experts > 0) idle = idle / experts * (experts - top);
  plan.active = plan.parameters - idle;
  plan.both_bytes = 2 * plan.parameters;
  plan.fp8_bytes = plan.both_bytes - plan.linear;
  plan.two_copies_bytes = plan.both_bytes + plan.linear;
  plan.step_fp16_bytes = 2 * (plan.linear - idle + plan.head);
  plan.step_fp8_bytes = plan.linear - idle + 2 * plan.head;
  return plan;
}

Status check_weights_fit(const std::string& model, const ModelPlan& plan, uint64_t free, uint64_t total) {
  if (plan.both_bytes <= free) return ok_status();
  constexpr uint64_t kBuffers = uint64_t{1} << 30;  // and a small KV cache
  constexpr double kGiB = 1 << 30;
  const auto gib = [](uint64_t bytes) { return static_cast<double>(bytes) / kGiB; };
  return error(
      ErrorCode::kResource,
      "{}: its weights take {:.1f} GiB, and of the GPU's {:.1f} GiB {:.1f} are free, which holds at most {:.1f} "
      "billion parameters (this model has {:.1f}); use a smaller model, a larger GPU, --device cpu, or several "
      "GPUs through vLLM; `nestedfp inspect` says which GPUs hold a model",
      model, gib(plan.both_bytes), gib(total), gib(free),
      static_cast<double>(free > kBuffers ? free - kBuffers : 0) / 2e9, static_cast<double>(plan.parameters) / 1e9);
}

uint64_t kv_bytes_per_token(const ModelConfig& config, DType dtype) {
  return uint64_t{2} * static_cast<uint64_t>(config.layers) * static_cast<uint64_t>(config.kv_heads) *
         static_cast<uint64_t>(config.head_dim) * size_of(dtype);
}

std::vector<GpuFit> gpu_fits(const ModelConfig& config, const ModelPlan& plan, uint64_t memory, double share) {
  std::vector<GpuFit> fits;
  for (const int gpus : {1, 2, 4, 8}) {
    GpuFit fit;
    fit.gpus = gpus;
    fit.divides = config.heads % gpus == 0 && config.intermediate % gpus == 0 &&
                  (config.kv_heads % gpus == 0 || gpus % config.kv_heads == 0);
    // Norms and routers are on each GPU, but are too small to count.
    fit.weight_bytes = (plan.both_bytes + static_cast<uint64_t>(gpus) - 1) / static_cast<uint64_t>(gpus);
    // A GPU has at least one head of keys and values.
    const auto heads = static_cast<uint64_t>(std::max(1, config.kv_heads / gpus));
    const uint64_t a_token = kv_bytes_per_token(config, DType::kF16) / static_cast<uint64_t>(config.kv_heads) * heads;
    const auto usable = static_cast<uint64_t>(static_cast<double>(memory) * share);
    if (usable > fit.weight_bytes) fit.kv_tokens = static_cast<int64_t>((usable - fit.weight_bytes) / a_token);
    fits.push_back(fit);
  }
  return fits;
}

}  // namespace nfp
