// nestedfp inspect CONFIG.json: what a model takes, before its weights are downloaded.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/byte_size.h"
#include "flags.h"
#include "inspect_json.h"
#include "io/dummy_source.h"
#include "json_output.h"
#include "model/dummy_model.h"
#include "model/plan.h"
#include "verbs.h"

namespace nfp {
namespace {

constexpr double kUsable = 0.9;  // of a GPU's memory; the rest is for working space, as engines have it by default
struct Gpu {
  const char* name;
  double gigabytes;  // 10^9 bytes
};
constexpr Gpu kGpus[] = {{"24 GB", 24}, {"48 GB", 48}, {"80 GB (H100)", 80}, {"141 GB (H200)", 141}};

uint64_t bytes_of(const Gpu& gpu) { return static_cast<uint64_t>(gpu.gigabytes * 1e9); }

nlohmann::ordered_json shapes_json(const ModelConfig& config) {
  nlohmann::ordered_json shapes = nlohmann::ordered_json::array();
  for (const DummyTensor& tensor : tensors_of(config)) {
    nlohmann::ordered_json shape = nlohmann::ordered_json::array();
    for (size_t i = 0; i < tensor.shape.rank(); ++i) shape.push_back(tensor.shape[i]);
    shapes.push_back({{"name", tensor.name}, {"shape", shape}});
  }
  return shapes;
}

void print_json(const std::string& path, const ModelConfig& config, const ModelPlan& plan) {
  nlohmann::ordered_json gpus = nlohmann::ordered_json::array();
  for (const Gpu& gpu : kGpus) {
    for (const GpuFit& fit : gpu_fits(config, plan, bytes_of(gpu), kUsable)) {
      gpus.push_back({{"memory_bytes", bytes_of(gpu)},
                      {"gpus", fit.gpus},
                      {"weight_bytes_per_gpu", fit.weight_bytes},
                      {"kv_tokens_f16", fit.kv_tokens},
                      {"heads_divide", fit.divides}});
    }
  }
  nlohmann::ordered_json out = shape_json(path, config);
  out.update({{"experts", config.experts.count},
              {"experts_per_token", config.experts.top},
              {"parameters", plan.parameters},
              {"active_parameters", plan.active},
              {"linear_parameters", plan.linear},
              {"weight_bytes", plan.both_bytes},
              {"weight_bytes_fp8_alone", plan.fp8_bytes},
              {"weight_bytes_two_copies", plan.two_copies_bytes},
              {"decode_step_bytes_fp16", plan.step_fp16_bytes},
              {"decode_step_bytes_fp8", plan.step_fp8_bytes},
              {"kv_bytes_per_token_f16", kv_bytes_per_token(config, DType::kF16)},
              {"kv_bytes_per_token_fp8", kv_bytes_per_token(config, DType::kF8E4M3)},
              {"gpus", gpus},
              {"tensors", shapes_json(config)}});
  print_indented(out);
}

// One line for each shape that a layer has, and how often the model has it.
void print_shapes(const ModelConfig& config) {
  std::vector<std::pair<std::string, int64_t>> lines;
  for (const DummyTensor& tensor : tensors_of(config)) {
    if (tensor.shape.rank() < 2) continue;
    std::string name = tensor.name;
    for (size_t i = 0; i < name.size(); ++i) {
      if (name[i] < '0' || name[i] > '9' || i == 0 || name[i - 1] != '.') continue;
      size_t end = i;
      while (end < name.size() && name[end] >= '0' && name[end] <= '9') ++end;
      if (end < name.size() && name[end] == '.') name.replace(i, end - i, "*");
    }
    std::string line = fmt::format("{:<48} {} x {}", name, tensor.shape[0], tensor.shape[1]);
    if (lines.end() ==
        std::find_if(lines.begin(), lines.end(), [&](auto& known) { return known.first == line && ++known.second; })) {
      lines.emplace_back(std::move(line), 1);
    }
  }
  for (const auto& [line, count] : lines)
    fmt::print("  {}{}\n", line, count > 1 ? fmt::format(", {} times", count) : "");
}

void print_text(const std::string& path, const ModelConfig& config, const ModelPlan& plan) {
  const auto weights = [](uint64_t count) {
    const auto number = static_cast<double>(count);
    return count < 1'000'000'000 ? fmt::format("{:.1f} M", number / 1e6) : fmt::format("{:.3f} B", number / 1e9);
  };
  fmt::print("{}\n{}: {} layers, hidden {}, {} heads ({} KV) of {}, vocabulary {}, context {}\n", path,
             config.architecture, config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim,
             config.vocab, config.max_context);
  if (config.experts.count > 0) {
    fmt::print("{} experts a layer, {} of them for a token{}\n", config.experts.count, config.experts.top,
               config.experts.shared_intermediate > 0 ? ", and one that every token has" : "");
  }
  fmt::print("{} parameters", weights(plan.parameters));
  if (plan.active != plan.parameters) fmt::print(", {} of them active for a token", weights(plan.active));
  fmt::print("; {} in linear layers (without lm_head)\n\n", weights(plan.linear));
  print_shapes(config);
  fmt::print(
      "\nweights in memory: {} for FP16 and FP8 from one copy (FP8 alone {}, two copies {})\n"
      "a decode step of one sequence reads {} in FP16, {} in FP8\n"
      "KV cache: {} a token in FP16, {} in FP8; {} and {} for a whole context\n{}\n\n",
      human_bytes(plan.both_bytes), human_bytes(plan.fp8_bytes), human_bytes(plan.two_copies_bytes),
      human_bytes(plan.step_fp16_bytes), human_bytes(plan.step_fp8_bytes),
      human_bytes(kv_bytes_per_token(config, DType::kF16)), human_bytes(kv_bytes_per_token(config, DType::kF8E4M3)),
      human_bytes(kv_bytes_per_token(config, DType::kF16) * static_cast<uint64_t>(config.max_context)),
      human_bytes(kv_bytes_per_token(config, DType::kF8E4M3) * static_cast<uint64_t>(config.max_context)),
      fp8_steps_text());
  fmt::print("{:<16} {:>5} {:>14} {:>22}\n", "GPUs of", "count", "weights each", "tokens of KV in FP16");
  for (const Gpu& gpu : kGpus) {
    for (const GpuFit& fit : gpu_fits(config, plan, bytes_of(gpu), kUsable)) {
      const std::string tokens = fit.kv_tokens > 0 ? std::to_string(fit.kv_tokens) : "does not fit";
      fmt::print("{:<16} {:>5} {:>14} {:>22}{}\n", gpu.name, fit.gpus, human_bytes(fit.weight_bytes), tokens,
                 fit.divides ? "" : "  (heads do not divide evenly)");
    }
  }
  fmt::print("(with {:.0f} % of the memory; more than one GPU through vLLM, docs/vllm.md)\n", kUsable * 100);
}

}  // namespace

Status inspect_plan(const std::string& path, bool json) {
  NFP_ASSIGN_OR_RETURN(const DummyConfig source, read_dummy_config(path));
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source.json, path));
  const ModelPlan plan = plan_model(config);
  if (json) {
    print_json(path, config, plan);
  } else {
    print_text(path, config, plan);
  }
  return ok_status();
}

}  // namespace nfp
