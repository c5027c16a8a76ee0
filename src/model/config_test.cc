#include "model/config.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace nfp {
namespace {

using Json = nlohmann::json;

Json good() {
  return Json{{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"hidden_size", 64},
              {"num_hidden_layers", 2},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"intermediate_size", 128},
              {"vocab_size", 512},
              {"max_position_embeddings", 1024},
              {"rms_norm_eps", 1e-5},
              {"rope_theta", 10000.0},
              {"eos_token_id", 2}};
}

Result<ModelConfig> parse(const Json& json) { return parse_config(json.dump(), "dir/config.json"); }

TEST(Config, ReadsLlamaAndFillsDefaults) {
  auto config = parse(good());
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->head_dim, 16);
  EXPECT_EQ(config->kv_heads, 2);
  EXPECT_FALSE(config->tied_embeddings);
  EXPECT_EQ(config->eos_ids, std::vector<int32_t>{2});
  EXPECT_EQ(config->rope_scaling.kind, RopeScaling::Kind::kNone);
}

TEST(Config, ReadsHeadDimScalingBiasAndIds) {
  Json json = good();
  json["head_dim"] = 32;
  json["attention_bias"] = true;
  json["tie_word_embeddings"] = true;
  json["eos_token_id"] = {2, 7};
  json["rope_scaling"] = {{"rope_type", "llama3"},
                          {"factor", 8.0},
                          {"low_freq_factor", 1.0},
                          {"high_freq_factor", 4.0},
                          {"original_max_position_embeddings", 8192}};
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->head_dim, 32);
  EXPECT_TRUE(config->qkv_bias);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(config->eos_ids.size(), 2u);
  ASSERT_TRUE(apply_generation_config(R"({"eos_token_id": [7, 9]})", "g", *config).ok());
  EXPECT_EQ(config->eos_ids, (std::vector<int32_t>{2, 7, 9}));
}

TEST(Config, MistralHasASlidingWindow) {
  Json json = good();
  json["architectures"] = {"MistralForCausalLM"};
  json["model_type"] = "mistral";
  json["sliding_window"] = 4096;
  EXPECT_EQ(parse(json)->window, 4096);
  json["sliding_window"] = nullptr;
  EXPECT_EQ(parse(json)->window, 0);
}

TEST(Config, ErrorsNameFileAndField) {
  const struct {
    const char* field;
    Json value;
  } bad[] = {{"hidden_size", -1},           {"hidden_size", "big"},     {"hidden_size", 1e30},
             {"num_hidden_layers", 0},      {"vocab_size", 1ull << 40}, {"num_key_value_heads", 3},
             {"num_attention_heads", 5},    {"rms_norm_eps", "x"},      {"head_dim", 15},
             {"hidden_act", "relu9"},       {"eos_token_id", "two"},    {"intermediate_size", nullptr},
             {"max_position_embeddings", 0}};
  for (const auto& [field, value] : bad) {
    Json json = good();
    json[field] = value;
    auto config = parse(json);
    ASSERT_FALSE(config.ok()) << field;
    EXPECT_NE(config.error().message.find("dir/config.json"), std::string::npos) << config.error().message;
    EXPECT_NE(config.error().message.find(field), std::string::npos) << config.error().message;
  }
  Json scaling = good();
  scaling["rope_scaling"] = {{"rope_type", "yarn"}};
  EXPECT_FALSE(parse(scaling).ok());
  Json unknown = good();
  unknown["architectures"] = {"NoSuchModel"};
  EXPECT_EQ(parse(unknown).error().code, ErrorCode::kUnsupported);
  EXPECT_FALSE(parse_config("{", "c").ok());
  EXPECT_FALSE(parse_config("[1]", "c").ok());
  EXPECT_FALSE(parse_config(std::string(100000, '['), "c").ok());
}

}  // namespace
}  // namespace nfp
