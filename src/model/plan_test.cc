#include "model/plan.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

ModelConfig parse(const char* json) {
  auto config = parse_config(json, "config.json");
  EXPECT_TRUE(config.ok()) << config.error().message;
  return std::move(config).value();
}

// The counts that the models' authors publish (safetensors' index, or the model card's tensors).
TEST(Plan, ParametersAreThoseOfPublishedCheckpoints) {
  const ModelConfig llama = parse(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072})");
  ModelPlan plan = plan_model(llama);
  EXPECT_EQ(plan.parameters, 8030261248u);
  EXPECT_EQ(plan.active, plan.parameters);
  EXPECT_EQ(plan.head, 525336576u);
  EXPECT_EQ(plan.embedding, plan.head);
  EXPECT_EQ(plan.both_bytes, 2 * plan.parameters);
  EXPECT_EQ(plan.step_fp16_bytes - plan.step_fp8_bytes, plan.linear);
  EXPECT_EQ(kv_bytes_per_token(llama, DType::kF16), 131072u);

  const ModelConfig mixtral = parse(R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000})");
  plan = plan_model(mixtral);
  EXPECT_EQ(plan.parameters, 46702792704u);
  EXPECT_EQ(plan.active, 12879925248u);

  const ModelConfig qwen = parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": true, "vocab_size": 151936})");
  plan = plan_model(qwen);
  EXPECT_EQ(plan.parameters, 30532122624u);
  EXPECT_EQ(plan.active, 3353032704u);
}

TEST(Plan, AGpuMustHoldItsShareOfWeightsAndKeys) {
  const ModelConfig config = parse(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 131072})");
  const ModelPlan plan = plan_model(config);
  const auto fits = gpu_fits(config, plan, 80ull * 1000 * 1000 * 1000, 0.9);
  ASSERT_EQ(fits.size(), 4u);
  EXPECT_EQ(fits[0].kv_tokens, 0);  // about 70 B parameters of two bytes
  EXPECT_GT(fits[1].kv_tokens, 0);
  const uint64_t a_token = kv_bytes_per_token(config, DType::kF16);
  const uint64_t left = 72ull * 1000 * 1000 * 1000 - fits[2].weight_bytes;
  EXPECT_EQ(fits[2].kv_tokens, static_cast<int64_t>(left / (a_token / 4)));
  // Eight GPUs for four heads: each head is on two of them.
  const uint64_t left8 = 72ull * 1000 * 1000 * 1000 - fits[3].weight_bytes;
  EXPECT_EQ(fits[3].kv_tokens, static_cast<int64_t>(left8 / (a_token / 4)));
  EXPECT_TRUE(fits[3].divides);
}

TEST(Plan, WeightsThatDoNotFitAreRefusedWithWhatWould) {
  ModelPlan plan;
  plan.parameters = 8'000'000'000;
  plan.both_bytes = 2 * plan.parameters;
  const uint64_t total = uint64_t{24} << 30;
  EXPECT_TRUE(check_weights_fit("m", plan, plan.both_bytes, total).ok());
  const Status refused = check_weights_fit("m", plan, uint64_t{11} << 30, total);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kResource);
  EXPECT_NE(refused.error().message.find("m: its weights take 14.9 GiB, and of the GPU's 24.0 GiB 11.0 are free, which "
                                         "holds at most 5.4 billion parameters (this model has 8.0)"),
            std::string::npos)
      << refused.error().message;
  EXPECT_FALSE(check_weights_fit("m", plan, 0, total).ok());
}

}  // namespace
}  // namespace nfp
