#include "model/config.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <tuple>

#include "model/plan.h"
#include "model/rope.h"

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
  EXPECT_EQ(config->rope.scaling.kind, RopeScaling::Kind::kNone);
}

TEST(Config, AModelMayHaveNoHead) {
  Json json = good();
  EXPECT_TRUE(parse(json)->has_head);
  json["architectures"] = {"LlamaModel"};
  const auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_FALSE(config->has_head);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->architecture, "LlamaModel");
  EXPECT_EQ(config->family->architecture, "LlamaForCausalLM");
  const ModelPlan plan = plan_model(*config);
  EXPECT_EQ(plan.head, 0u);
  EXPECT_EQ(plan.step_fp16_bytes, 2 * plan.linear);
  for (const auto& [architecture, has_head] : {std::pair{"Gemma3TextModel", false},
                                               {"Gemma2Model", false},
                                               {"MistralModel", false},
                                               {"Qwen2Model", false},
                                               {"Qwen3Model", false},
                                               {"Qwen3ForCausalLM", true}}) {
    const auto found = find_family(architecture, "");
    ASSERT_TRUE(found.ok()) << architecture;
    EXPECT_EQ(found->has_head, has_head) << architecture;
  }
  EXPECT_FALSE(find_family("Gemma3Model", "").ok());  // the one with images
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
  EXPECT_EQ(config->rope.scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(config->rope.scaling.original_context, 8192);
  json["rope_scaling"].erase("original_max_position_embeddings");
  EXPECT_EQ(parse(json)->rope.scaling.original_context, 1024);  // max_position_embeddings
  EXPECT_EQ(config->eos_ids.size(), 2u);
  ASSERT_TRUE(apply_generation_config(R"({"eos_token_id": [7, 9]})", "g", *config).ok());
  EXPECT_EQ(config->eos_ids, (std::vector<int32_t>{2, 7, 9}));
}

TEST(Config, MistralHasASlidingWindow) {
  Json json = good();
  json["architectures"] = {"MistralForCausalLM"};
  json["model_type"] = "mistral";
  json["sliding_window"] = 1000;
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{1000, 1000}));
  json["sliding_window"] = nullptr;
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{0, 0}));
  json.erase("sliding_window");  // MistralConfig's default
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{4096, 4096}));
}

Json qwen(int version) {
  Json json = good();
  json["architectures"] = {fmt::format("Qwen{}ForCausalLM", version)};
  json["model_type"] = fmt::format("qwen{}", version);
  return json;
}

TEST(Config, QwenHasItsOwnBiasesAndNorms) {
  Json json = qwen(2);
  auto two = parse(json);
  ASSERT_TRUE(two.ok()) << two.error().message;
  EXPECT_TRUE(two->qkv_bias);
  EXPECT_FALSE(two->output_bias || two->mlp_bias || two->qk_norm || two->tied_embeddings);
  EXPECT_EQ(two->head_dim, 16);
  json["attention_bias"] = false;  // Qwen2's layers do not look at it
  EXPECT_TRUE(parse(json)->qkv_bias);

  json = qwen(3);
  auto three = parse(json);
  ASSERT_TRUE(three.ok()) << three.error().message;
  EXPECT_TRUE(three->qk_norm);
  EXPECT_FALSE(three->qkv_bias || three->output_bias || three->mlp_bias || three->tied_embeddings);
  EXPECT_EQ(three->head_dim, 128);  // Qwen3Config's default
  json["head_dim"] = 64;
  json["attention_bias"] = true;
  three = parse(json);
  EXPECT_EQ(three->head_dim, 64);
  EXPECT_TRUE(three->qkv_bias && three->output_bias);
}

TEST(Config, FieldsLeftOutAreThoseOfTheFamily) {
  for (const char* field : {"num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"}) {
    Json json = good();
    json.erase(field);
    auto llama = parse(json);
    ASSERT_TRUE(llama.ok()) << llama.error().message;
    json = qwen(2);
    json["num_attention_heads"] = 32;
    json.erase(field);
    auto two = parse(json);
    ASSERT_TRUE(two.ok()) << two.error().message;
    if (field == std::string("num_key_value_heads")) {
      EXPECT_EQ(llama->kv_heads, 4);
      EXPECT_EQ(two->kv_heads, 32);
    } else if (field == std::string("max_position_embeddings")) {
      EXPECT_EQ(llama->max_context, 2048);
      EXPECT_EQ(two->max_context, 32768);
    } else {
      EXPECT_EQ(two->norm_eps, field == std::string("rms_norm_eps") ? 1e-6f : 1e-5f);
      EXPECT_EQ(two->rope.theta, 10000.0f);
    }
  }
  // A null is as many as query heads; what was left out is 32, which these 4 are not divided by.
  Json json = qwen(2);
  json["num_key_value_heads"] = nullptr;
  EXPECT_EQ(parse(json)->kv_heads, 4);
  json.erase("num_key_value_heads");
  auto config = parse(json);
  ASSERT_FALSE(config.ok());
  EXPECT_NE(config.error().message.find("num_key_value_heads"), std::string::npos) << config.error().message;
}

TEST(Config, QwenHasWindowsOnSomeLayers) {
  const auto windows = [](const Json& json) {
    auto config = parse(json);
    EXPECT_TRUE(config.ok()) << config.error().message;
    return config.ok() ? config->windows : std::vector<int32_t>();
  };
  using List = std::vector<int32_t>;
  for (const int version : {2, 3}) {
    Json json = qwen(version);
    json["num_hidden_layers"] = 30;
    EXPECT_EQ(windows(json), List(30, 0));
    json["sliding_window"] = 100;  // not asked for
    EXPECT_EQ(windows(json), List(30, 0));
    json["use_sliding_window"] = true;
    List expected(30, 0);
    expected[28] = expected[29] = 100;  // max_window_layers is 28 by default
    EXPECT_EQ(windows(json), expected);
    json["max_window_layers"] = 0;
    EXPECT_EQ(windows(json), List(30, 100));
    json["max_window_layers"] = 30;
    EXPECT_EQ(windows(json), List(30, 0));
    json["max_window_layers"] = 1;
    json["num_hidden_layers"] = 2;
    json.erase("sliding_window");
    EXPECT_EQ(windows(json), (List{0, 4096}));
    json["sliding_window"] = nullptr;
    EXPECT_EQ(windows(json), (List{0, 0}));
    json["sliding_window"] = 100;
    json["layer_types"] = {"sliding_attention", "full_attention"};
    EXPECT_EQ(windows(json), (List{100, 0}));
  }
}

TEST(Config, WrongWindowsAreNamed) {
  const auto expect = [](const char* field, const Json& value, const std::string& naming) {
    Json json = qwen(3);
    json["use_sliding_window"] = true;
    json["sliding_window"] = 100;
    json[field] = value;
    auto config = parse(json);
    ASSERT_FALSE(config.ok()) << naming;
    EXPECT_EQ(config.error().message.find("dir/config.json: "), 0u) << config.error().message;
    EXPECT_NE(config.error().message.find(naming), std::string::npos) << config.error().message;
  };
  const Json slides = {"full_attention", "sliding_attention"};
  expect("sliding_window", -1, "'sliding_window' is -1");
  expect("sliding_window", "wide", "'sliding_window' is \"wide\"");
  expect("use_sliding_window", 1, "'use_sliding_window' is 1");
  expect("max_window_layers", -1, "'max_window_layers' is -1");
  expect("max_window_layers", 1.5, "'max_window_layers' is 1.5");
  expect("layer_types", "full_attention", "'layer_types' must be a list with one entry for each of the 2 layers");
  expect("layer_types", Json::array({"full_attention"}), "'layer_types' must be a list");
  expect("layer_types", Json::array(), "'layer_types' must be a list");
  expect("layer_types", {"full_attention", "chunked_attention"}, "'layer_types' has the entry \"chunked_attention\"");
  expect("layer_types", {"full_attention", 7}, "'layer_types' has the entry 7");
  for (const auto& [field, value] :
       {std::pair<const char*, Json>{"use_sliding_window", false},
        std::pair<const char*, Json>{"sliding_window", nullptr}, std::pair<const char*, Json>{"sliding_window", 0}}) {
    Json json = qwen(2);
    json["use_sliding_window"] = true;
    json["sliding_window"] = 100;
    json["layer_types"] = slides;
    ASSERT_TRUE(parse(json).ok());
    json[field] = value;
    auto config = parse(json);
    ASSERT_FALSE(config.ok()) << field;
    EXPECT_EQ(config.error().message.find("dir/config.json: field 'layer_types' gives layer 1 sliding_attention"), 0u)
        << config.error().message;
  }
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
  Json scaling = qwen(2);
  scaling["rope_scaling"] = {{"factor", 4.0}, {"original_max_position_embeddings", 32768}, {"type", "ntk"}};
  auto ntk = parse(scaling);
  ASSERT_FALSE(ntk.ok());
  EXPECT_NE(ntk.error().message.find("'rope_type' is 'ntk'"), std::string::npos) << ntk.error().message;
  Json unknown = good();
  unknown["architectures"] = {"NoSuchModel"};
  EXPECT_EQ(parse(unknown).error().code, ErrorCode::kUnsupported);
  EXPECT_FALSE(parse_config("{", "c").ok());
  EXPECT_FALSE(parse_config("[1]", "c").ok());
  // Also what no field of the configuration is: others read the same text.
  Json whole = good();
  whole["other"] = "here";
  std::string deep = whole.dump();
  ASSERT_TRUE(parse_config(deep, "c").ok());
  deep.replace(deep.find("\"here\""), 6, std::string(1'000'000, '[') + std::string(1'000'000, ']'));
  const auto nested = parse_config(deep, "c");
  ASSERT_FALSE(nested.ok());
  EXPECT_EQ(nested.error().message, "c: is nested deeper than 200 levels");
}

// transformers' inv_freq is the unscaled one up to max_position_embeddings, whatever else the object says.
TEST(Config, DynamicRopeScalesNothingWithinTheContext) {
  Json json = qwen(2);
  const auto plain = parse(json);
  ASSERT_TRUE(plain.ok()) << plain.error().message;
  for (const char* key : {"type", "rope_type"}) {
    json["rope_scaling"] = {{"factor", 4.0}, {"original_max_position_embeddings", 2048}, {key, "dynamic"}};
    const auto config = parse(json);
    ASSERT_TRUE(config.ok()) << config.error().message;
    EXPECT_EQ(config->rope.scaling.kind, RopeScaling::Kind::kNone);
    EXPECT_EQ(config->max_context, plain->max_context);
    EXPECT_EQ(rope_table(config->rope, 64), rope_table(plain->rope, 64));
  }
  json["rope_scaling"] = {{"type", "dynamic"}};
  EXPECT_NE(parse(json).error().message.find("field 'factor'"), std::string::npos) << parse(json).error().message;
}

TEST(Config, Yarn) {
  Json json = qwen(2);  // as Qwen2.5's model card recommends for long texts
  json["rope_scaling"] = {{"factor", 4.0}, {"original_max_position_embeddings", 32768}, {"type", "yarn"}};
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  const RopeScaling& rope = config->rope.scaling;
  EXPECT_EQ(rope.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(rope.original_context, 32768);
  EXPECT_EQ(config->max_context, 131072);
  EXPECT_FLOAT_EQ(rope.attention_factor, 0.1f * std::log(4.0f) + 1.0f);
  Json beside = json;
  beside["rope_scaling"].erase("original_max_position_embeddings");
  beside["original_max_position_embeddings"] = 16384;
  EXPECT_EQ(parse(beside)->rope.scaling.original_context, 16384);
  beside["rope_scaling"]["original_max_position_embeddings"] = 32768;  // what is beside the object goes first
  EXPECT_EQ(parse(beside)->rope.scaling.original_context, 16384);
  Json whole = json;  // as where the configuration has the longer context itself
  whole["max_position_embeddings"] = 1 << 20;
  EXPECT_EQ(parse(whole)->max_context, 1 << 20);
  json["rope_scaling"]["mscale"] = 2.0;
  json["rope_scaling"]["mscale_all_dim"] = 1.0;
  EXPECT_FLOAT_EQ(parse(json)->rope.scaling.attention_factor,
                  (0.2f * std::log(4.0f) + 1.0f) / (0.1f * std::log(4.0f) + 1.0f));
  json["rope_scaling"]["attention_factor"] = 1.25;
  EXPECT_EQ(parse(json)->rope.scaling.attention_factor, 1.25f);
}

// As where a user adds YaRN to a checkpoint that transformers 5 saved.
TEST(Config, RopeScalingCountsBesideRopeParameters) {
  Json json = qwen(2);
  json.erase("rope_theta");
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  json["rope_scaling"] = {{"factor", 4.0}, {"original_max_position_embeddings", 32768}, {"type", "yarn"}};
  const auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rope.scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_EQ(config->rope.theta, 5e5f);
  json["rope_scaling"] = Json::object();
  EXPECT_EQ(parse(json)->rope.scaling.kind, RopeScaling::Kind::kNone);
  json["rope_scaling"] = {{"factor", -4.0}, {"type", "yarn"}};
  EXPECT_FALSE(parse(json).ok());
  json["rope_scaling"] = {{"factor", 4.0}, {"type", "linear"}};
  json["rope_parameters"] = {{"full_attention", {{"rope_type", "default"}}}};
  EXPECT_NE(parse(json).error().message.find("'rope_parameters' and 'rope_scaling' are both set"), std::string::npos);
}

TEST(Config, Phi3RotatesAPartAndHasLongrope) {
  Json json = good();
  json["architectures"] = {"Phi3ForCausalLM"};
  json["model_type"] = "phi3";
  json["partial_rotary_factor"] = 0.75;
  json["max_position_embeddings"] = 131072;
  json["original_max_position_embeddings"] = 4096;
  json["rope_scaling"] = {{"type", "longrope"}, {"short_factor", Json::array()}, {"long_factor", Json::array()}};
  EXPECT_NE(parse(json).error().message.find("short_factor"), std::string::npos);
  for (const char* field : {"short_factor", "long_factor"}) json["rope_scaling"][field] = {1.0, 2, 3.5, 4, 5, 6};
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rope.dim, 12);
  EXPECT_EQ(config->rope.scaling.original_context, 4096);
  EXPECT_EQ(config->rope.scaling.long_factors[2], 3.5f);
  // Phi-3-mini-128k: sqrt(1 + log(32) / log(4096)).
  EXPECT_FLOAT_EQ(config->rope.scaling.attention_factor, 1.1902380714f);
  EXPECT_EQ(config->windows, (std::vector<int32_t>{0, 0}));
  Json left_out = json;
  left_out.erase("original_max_position_embeddings");
  EXPECT_EQ(parse(left_out)->rope.scaling.original_context, 4096);
  left_out["rope_scaling"]["original_max_position_embeddings"] = 64;  // transformers' Phi3Config does not look there
  EXPECT_EQ(parse(left_out)->rope.scaling.original_context, 4096);
  left_out["rope_scaling"]["factor"] = 8.0;  // in place of the contexts' ratio
  EXPECT_FLOAT_EQ(parse(left_out)->rope.scaling.attention_factor,
                  static_cast<float>(std::sqrt(1 + std::log(8.0) / std::log(4096.0))));
  Json first = json;  // as the first Phi-3-mini-128k had it
  first["rope_scaling"]["type"] = "su";
  EXPECT_EQ(parse(first)->rope.scaling.kind, RopeScaling::Kind::kLongrope);
  json["partial_rotary_factor"] = 0.7;  // 11 features
  EXPECT_NE(parse(json).error().message.find("partial_rotary_factor"), std::string::npos);
  Json llama = good();
  llama["partial_rotary_factor"] = 0.5;
  EXPECT_NE(parse(llama).error().message.find("partial_rotary_factor"), std::string::npos);
}

Json gemma(const char* architecture, const char* type) {
  Json json = good();
  json["architectures"] = {architecture};
  json["model_type"] = type;
  json["num_hidden_layers"] = 7;
  json["sliding_window"] = 100;
  json.erase("rope_theta");
  return json;
}

TEST(Config, Gemma) {
  Json json = gemma("GemmaForCausalLM", "gemma");
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->norm_offset, 1.0f);
  EXPECT_EQ(config->embedding_scale, 8.0f);
  EXPECT_EQ(config->attention_scale, 1.0f / 16);
  EXPECT_EQ(config->attention_cap + config->logit_cap, 0.0f);
  EXPECT_EQ(config->head_dim, 256);
  EXPECT_EQ(config->activation, Activation::kGeluTanh);
  EXPECT_TRUE(config->tied_embeddings && config->wide_stream);
  EXPECT_FALSE(config->qk_norm || config->qkv_bias);
  EXPECT_EQ(config->windows, std::vector<int32_t>(7, 0));
  json["hidden_act"] = "gelu";  // as the first releases, which mean the approximation
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->activation, Activation::kGeluTanh);
  json["hidden_activation"] = nullptr;
  EXPECT_TRUE(parse(json).ok());
  json["hidden_activation"] = "gelu";  // says which GELU it is
  EXPECT_NE(parse(json).error().message.find("'hidden_activation' is 'gelu'"), std::string::npos);
  json["hidden_activation"] = "relu";
  EXPECT_NE(parse(json).error().message.find("'hidden_activation' is 'relu'"), std::string::npos);
}

TEST(Config, Gemma2) {
  Json json = gemma("Gemma2ForCausalLM", "gemma2");
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->norm_offset, 1.0f);
  EXPECT_EQ(config->embedding_scale, 8.0f);
  EXPECT_EQ(config->attention_scale, 1.0f / 16);
  EXPECT_EQ(config->attention_cap, 50.0f);
  EXPECT_EQ(config->logit_cap, 30.0f);
  EXPECT_EQ(config->head_dim, 256);
  EXPECT_EQ(config->activation, Activation::kGeluTanh);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->local_rope_theta, 0.0f);
  EXPECT_EQ(config->windows, (std::vector<int32_t>{100, 0, 100, 0, 100, 0, 100}));
  json["attn_logit_softcapping"] = nullptr;
  json["query_pre_attn_scalar"] = 64;
  EXPECT_EQ(parse(json)->attention_cap, 0.0f);
  EXPECT_EQ(parse(json)->attention_scale, 0.125f);
}

TEST(Config, Gemma3HasTwoRopes) {
  Json json = gemma("Gemma3ForCausalLM", "gemma3_text");
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rope.theta, 1e6f);
  EXPECT_EQ(config->local_rope_theta, 1e4f);
  EXPECT_EQ(config->windows, (std::vector<int32_t>{100, 100, 100, 100, 100, 0, 100}));
  EXPECT_TRUE(config->qk_norm);
  EXPECT_EQ(config->attention_cap + config->logit_cap, 0.0f);
  json["attn_logit_softcapping"] = 50.0;  // which transformers does not compute here
  EXPECT_EQ(parse(json)->attention_cap, 0.0f);
  // As transformers 5 writes it.
  json["rope_parameters"] = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2e6}}},
                             {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 3e4}}}};
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rope.theta, 2e6f);
  EXPECT_EQ(config->rope.scaling.factor, 8.0f);
  EXPECT_EQ(config->local_rope_theta, 3e4f);
}

TEST(Config, RopeOfSlidingLayersAlone) {
  const Json full = {{"rope_type", "default"}, {"rope_theta", 2e6}};
  const auto expect = [](Json json, const Json& parameters, const std::string& naming) {
    json["rope_parameters"] = parameters;
    const auto config = parse(json);
    ASSERT_FALSE(config.ok()) << naming;
    EXPECT_EQ(config.error().message.find("dir/config.json: rope_parameters: " + naming), 0u) << config.error().message;
  };
  const Json gemma3 = gemma("Gemma3ForCausalLM", "gemma3_text");
  expect(gemma3, {{"sliding_attention", full}}, "field 'full_attention' must be an object");
  expect(gemma3, {{"full_attention", full}, {"sliding_attention", 1e4}}, "field 'sliding_attention' must be an object");
  expect(gemma3,
         {{"full_attention", full}, {"sliding_attention", {{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}}},
         "sliding_attention: field 'partial_rotary_factor' is 0.5, but 1 in full_attention");
  Json none = gemma3;
  none["rope_parameters"] = {{"full_attention", full}, {"sliding_attention", nullptr}};
  EXPECT_EQ(parse(none)->local_rope_theta, 1e4f);
  // Families whose layers all rotate alike.
  Json windows = qwen(3);
  windows["use_sliding_window"] = true;
  windows["max_window_layers"] = 1;
  for (const Json& json : {windows, gemma("Gemma2ForCausalLM", "gemma2"), good()}) {
    expect(json, {{"full_attention", full}, {"sliding_attention", {{"rope_theta", 1e4}}}},
           "field 'sliding_attention' is set, but all layers of this model rotate alike");
  }
}

Json of_family(const char* architecture, const char* model_type) {
  Json json = good();
  json["architectures"] = {architecture};
  json["model_type"] = model_type;
  return json;
}

TEST(Config, Mixtral) {
  Json json = of_family("MixtralForCausalLM", "mixtral");
  json["num_local_experts"] = 5;
  const auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->experts.count, 5);
  EXPECT_EQ(config->experts.top, 2);
  EXPECT_EQ(config->experts.intermediate, 128);
  EXPECT_EQ(config->experts.shared_intermediate, 0);
  EXPECT_TRUE(config->experts.renormalise);
  EXPECT_TRUE(config->has_experts(0) && config->has_experts(1));
  EXPECT_EQ(config->windows, (std::vector<int32_t>{0, 0}));
}

TEST(Config, QwenMoeHasExpertsInSomeLayers) {
  Json json = of_family("Qwen2MoeForCausalLM", "qwen2_moe");
  json["num_hidden_layers"] = 4;
  json["moe_intermediate_size"] = 24;
  json["decoder_sparse_step"] = 2;
  json["mlp_only_layers"] = {3};
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->experts.layers, (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(config->experts.count, 60);
  EXPECT_EQ(config->experts.top, 4);
  EXPECT_EQ(config->experts.shared_intermediate, 5632);
  EXPECT_FALSE(config->experts.renormalise);
  EXPECT_TRUE(config->qkv_bias);
  json["qkv_bias"] = false;
  EXPECT_FALSE(parse(json)->qkv_bias);

  json = of_family("Qwen3MoeForCausalLM", "qwen3_moe");
  json["norm_topk_prob"] = true;
  json["use_sliding_window"] = true;
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->experts.count, 128);
  EXPECT_EQ(config->experts.top, 8);
  EXPECT_EQ(config->experts.intermediate, 768);
  EXPECT_TRUE(config->experts.renormalise && config->qk_norm);
  EXPECT_EQ(config->windows, (std::vector<int32_t>{4096, 4096}));
}

TEST(Config, OlmoeNormsSpanAllHeads) {
  const auto config = parse(of_family("OlmoeForCausalLM", "olmoe"));
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->qk_norm && config->norm_spans_heads);
  EXPECT_EQ(config->experts.count, 64);
  EXPECT_EQ(config->experts.top, 8);
}

TEST(Config, Olmo2NormsWhatBlocksAdd) {
  Json json = of_family("Olmo2ForCausalLM", "olmo2");
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->reads_stream() && config->qk_norm && config->norm_spans_heads);
  EXPECT_FALSE(config->qkv_bias || config->output_bias || config->tied_embeddings);
  json.erase("num_key_value_heads");
  EXPECT_EQ(parse(json)->kv_heads, config->heads);
  json["attention_bias"] = true;
  config = parse(json);
  EXPECT_TRUE(config->qkv_bias && config->output_bias && !config->mlp_bias);
  EXPECT_FALSE(parse(of_family("OlmoeForCausalLM", "olmoe"))->reads_stream());
}

TEST(Config, Olmo3HasWindowsWhoseRotationIsNotScaled) {
  Json json = of_family("Olmo3ForCausalLM", "olmo3");
  json["num_hidden_layers"] = 5;
  json["rope_theta"] = 5e5;
  json["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 8.0}};
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->windows, (std::vector<int32_t>{4096, 4096, 4096, 0, 4096}));
  EXPECT_EQ(config->local_rope_theta, 5e5f);
  json["rope_local_base_freq"] = 100.0;  // Gemma 3's
  EXPECT_EQ(parse(json)->local_rope_theta, 5e5f);
  EXPECT_TRUE(config->reads_stream() && config->norm_spans_heads);
  json["num_hidden_layers"] = 2;
  json["layer_types"] = {"full_attention", "sliding_attention"};
  json["sliding_window"] = 7;
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{0, 7}));
  json["sliding_window"] = nullptr;
  EXPECT_NE(parse(json).error().message.find("sliding_window"), std::string::npos);
}

TEST(Config, GraniteScalesWhatBlocksAdd) {
  Json json = of_family("GraniteForCausalLM", "granite");
  json["rms_norm_eps"] = 1e-5;
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  // As in transformers: a factor that is left out is 1, that of q k^T too.
  EXPECT_EQ(config->attention_scale, 1.0f);
  EXPECT_EQ(config->embedding_scale, 1.0f);
  EXPECT_EQ(config->logit_scale, 1.0f);
  json["embedding_multiplier"] = 12.0;
  json["residual_multiplier"] = 0.5;
  json["attention_multiplier"] = 0.015625;
  json["logits_scaling"] = 8.0;
  config = parse(json);
  EXPECT_EQ(config->embedding_scale, 24.0f);
  EXPECT_FLOAT_EQ(config->norm_eps, 4e-5f);
  EXPECT_EQ(config->attention_scale, 0.015625f);
  EXPECT_EQ(config->logit_scale, 0.125f);
  for (const char* field : {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}) {
    Json wrong = json;
    wrong[field] = -1;
    EXPECT_NE(parse(wrong).error().message.find(field), std::string::npos);
  }
}

TEST(Config, SeedOssHasBiasesUnlessToldOtherwise) {
  Json json = of_family("SeedOssForCausalLM", "seed_oss");
  json.erase("num_key_value_heads");
  json["num_attention_heads"] = 16;
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->kv_heads, 8);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_TRUE(config->qkv_bias && !config->output_bias && !config->mlp_bias && !config->tied_embeddings);
  json["attention_bias"] = nullptr;  // as false, in transformers
  json["attention_out_bias"] = true;
  json["num_key_value_heads"] = nullptr;
  json["head_dim"] = nullptr;
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->kv_heads, 16);
  EXPECT_EQ(config->head_dim, 4);
  EXPECT_TRUE(!config->qkv_bias && config->output_bias);
}

TEST(Config, Exaone4RotatesWhereItSlidesAlone) {
  Json json = of_family("Exaone4ForCausalLM", "exaone4");
  json["num_hidden_layers"] = 5;
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->reads_stream() && config->qk_norm && !config->norm_spans_heads && !config->qkv_bias);
  EXPECT_EQ(config->windows, (std::vector<int32_t>{4096, 4096, 4096, 0, 4096}));
  EXPECT_EQ(config->nope_layers, (std::vector<bool>{false, false, false, true, false}));
  json["sliding_window_pattern"] = "LG";  // as releases have it
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->windows, (std::vector<int32_t>{4096, 0, 4096, 0, 0}));  // the last layer has none
  EXPECT_EQ(config->nope_layers, (std::vector<bool>{false, true, false, true, true}));
  json["sliding_window"] = nullptr;  // of no layer, then
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->windows, std::vector<int32_t>(5));
  json.erase("sliding_window");
  for (const char* wrong : {"", "LXG"}) {
    json["sliding_window_pattern"] = wrong;
    EXPECT_NE(parse(json).error().message.find(fmt::format("'sliding_window_pattern' is \"{}\"; as a text", wrong)),
              std::string::npos);
  }
  json["num_hidden_layers"] = 2;
  json["layer_types"] = {"full_attention", "sliding_attention"};
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->windows, (std::vector<int32_t>{0, 4096}));
  EXPECT_EQ(config->nope_layers, (std::vector<bool>{true, false}));
  json["sliding_window"] = nullptr;
  EXPECT_NE(parse(json).error().message.find("'sliding_window' is null"), std::string::npos);
  json["layer_types"] = {"full_attention", "full_attention"};
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->nope_layers.empty());  // all rotate
}

TEST(Config, GlmRotatesHalfOfAHeadInPairsOfNeighbours) {
  for (const auto& [architecture, type] : {std::pair{"GlmForCausalLM", "glm"}, {"Glm4ForCausalLM", "glm4"}}) {
    Json json = of_family(architecture, type);
    auto config = parse(json);
    ASSERT_TRUE(config.ok()) << config.error().message;
    EXPECT_TRUE(config->rotates_neighbours && config->qkv_bias && !config->output_bias && !config->mlp_bias);
    EXPECT_EQ(config->head_dim, 128);
    EXPECT_EQ(config->rope.dim, 64);
    EXPECT_EQ(config->family->has(TensorRole::kMlpPostNorm), type == std::string("glm4"));
    json["attention_bias"] = false;
    json["partial_rotary_factor"] = 0.25;
    config = parse(json);
    EXPECT_EQ(config->rope.dim, 32);
    EXPECT_FALSE(config->qkv_bias);
    // As transformers 5 writes it.
    json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e4}, {"partial_rotary_factor", 0.75}};
    EXPECT_EQ(parse(json)->rope.dim, 96);
  }
}

TEST(Config, Ernie4_5HasBiasesEverywhereOrNowhere) {
  Json json = of_family("Ernie4_5ForCausalLM", "ernie4_5");
  json.erase("rope_theta");
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->rotates_neighbours && config->tied_embeddings);
  EXPECT_FALSE(config->qkv_bias || config->output_bias || config->mlp_bias);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->rope.dim, 128);
  EXPECT_EQ(config->rope.theta, 5e5f);
  json["use_bias"] = true;
  config = parse(json);
  EXPECT_TRUE(config->qkv_bias && config->output_bias && config->mlp_bias);
  json["partial_rotary_factor"] = 0.5;
  EXPECT_NE(parse(json).error().message.find("partial_rotary_factor"), std::string::npos);
}

TEST(Config, MinistralHasAWindowOnSomeLayers) {
  Json json = of_family("MinistralForCausalLM", "ministral");
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{4096, 4096}));
  json["layer_types"] = {"full_attention", "sliding_attention"};
  json["sliding_window"] = 7;
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{0, 7}));
  json["sliding_window"] = nullptr;
  EXPECT_NE(parse(json).error().message.find("'sliding_window' is null, but layer 1 slides"), std::string::npos);
  json.erase("layer_types");
  EXPECT_EQ(parse(json)->windows, (std::vector<int32_t>{0, 0}));
}

TEST(Config, HeliumRotatesInPairsOfNeighbours) {
  Json json = of_family("HeliumForCausalLM", "helium");
  json["attention_bias"] = json["mlp_bias"] = true;
  json.erase("rope_theta");
  const auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_TRUE(config->rotates_neighbours && config->qkv_bias && !config->output_bias && config->mlp_bias);
  EXPECT_EQ(config->rope.theta, 1e5f);
  EXPECT_EQ(config->head_dim, 128);
}

TEST(Config, SmolLm3HasLayersThatDoNotRotate) {
  Json json = of_family("SmolLM3ForCausalLM", "smollm3");
  json["num_hidden_layers"] = 5;
  auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->nope_layers, (std::vector<bool>{false, false, false, true, false}));
  EXPECT_TRUE(config->tied_embeddings);
  json["no_rope_layers"] = {0, 1, 1, 0, 1};
  json["use_sliding_window"] = true;
  json["sliding_window"] = 7;
  config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->nope_layers, (std::vector<bool>{true, false, false, true, false}));
  EXPECT_EQ(config->windows, (std::vector<int32_t>{7, 0, 0, 7, 0}));
}

TEST(Config, QuantisedWeightsAreRefusedByTheirMethod) {
  for (const char* method : {"awq", "gptq", "bitsandbytes"}) {
    Json json = good();
    json["quantization_config"] = {{"quant_method", method}};
    const auto config = parse(json);
    ASSERT_FALSE(config.ok()) << method;
    EXPECT_EQ(config.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(config.error().message.find(method), std::string::npos) << config.error().message;
    EXPECT_NE(config.error().message.find("quantization_config"), std::string::npos);
    json["nestedfp"] = Json::object();  // what convert writes, for engines that know only the FP8 half
    EXPECT_TRUE(parse(json).ok());
  }
  Json json = good();
  json["quantization_config"] = {{"quant_method", "fp8"}};
  EXPECT_TRUE(parse(json).ok());
}

TEST(Config, Gemma3LeavesOutWhatItsLargerModelsShare) {
  Json json = of_family("Gemma3ForCausalLM", "gemma3_text");
  json.erase("num_attention_heads");
  json.erase("num_key_value_heads");
  json.erase("vocab_size");
  const auto config = parse(json);
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->heads, 8);
  EXPECT_EQ(config->kv_heads, 4);
  EXPECT_EQ(config->vocab, 262208);
}

TEST(Config, WrongExpertsAndLayersAreNamed) {
  struct Wrong {
    const char *architecture, *field;
    Json value;
  };
  for (const Wrong& wrong : std::vector<Wrong>{{"MixtralForCausalLM", "num_local_experts", 0},
                                               {"MixtralForCausalLM", "num_local_experts", 100000},
                                               {"MixtralForCausalLM", "num_experts_per_tok", 9},
                                               {"Qwen3MoeForCausalLM", "moe_intermediate_size", 0},
                                               {"Qwen3MoeForCausalLM", "moe_intermediate_size", -4},
                                               {"Qwen3MoeForCausalLM", "decoder_sparse_step", 0},
                                               {"Qwen3MoeForCausalLM", "mlp_only_layers", {7}},
                                               {"Qwen3MoeForCausalLM", "mlp_only_layers", "all"},
                                               {"Qwen2MoeForCausalLM", "use_sliding_window", true},
                                               {"OlmoeForCausalLM", "clip_qkv", 8.0},
                                               {"Gemma3ForCausalLM", "use_bidirectional_attention", true},
                                               {"SmolLM3ForCausalLM", "no_rope_layers", {1, 0, 1}},
                                               {"SmolLM3ForCausalLM", "no_rope_layers", {1, 2}},
                                               {"SmolLM3ForCausalLM", "no_rope_layer_interval", 0}}) {
    Json json = of_family(wrong.architecture, "any");
    json[wrong.field] = wrong.value;
    const auto config = parse(json);
    ASSERT_FALSE(config.ok()) << wrong.field;
    EXPECT_NE(config.error().message.find(wrong.field), std::string::npos) << config.error().message;
  }
}

TEST(Config, WhatIsKnownAndNotSupportedIsNamedWithItsField) {
  for (const auto& [architecture, field] : {std::pair{"GptOssForCausalLM", "self_attn.sinks"},
                                            {"GptOssForCausalLM", "swiglu_limit"},
                                            {"Llama4ForConditionalGeneration", "attention_chunk_size"},
                                            {"Llama4ForCausalLM", "attn_temperature_tuning"},
                                            {"DeepseekV2ForCausalLM", "kv_lora_rank"},
                                            {"DeepseekV3ForCausalLM", "n_group"},
                                            {"PhimoeForCausalLM", "router_jitter_noise"}}) {
    Json json = good();
    json["architectures"] = {architecture};
    const auto config = parse(json);
    ASSERT_FALSE(config.ok());
    EXPECT_EQ(config.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(config.error().message.find(architecture), std::string::npos) << config.error().message;
    EXPECT_NE(config.error().message.find(field), std::string::npos) << config.error().message;
    EXPECT_EQ(config.error().message.find("experts (num_local_experts"), std::string::npos);  // which are supported
  }
  Json json = good();  // as Microsoft's own file has it
  json["architectures"] = {"PhiMoEForCausalLM"};
  json["model_type"] = "phimoe";
  const std::string message = parse(json).error().message;
  EXPECT_NE(message.find("PhiMoEForCausalLM"), std::string::npos) << message;
  EXPECT_NE(message.find("router_jitter_noise"), std::string::npos) << message;
}

TEST(Config, AttentionThatNoFamilyComputesIsRefusedInEveryFamily) {
  for (const auto& [architecture, type] :
       {std::pair{"LlamaForCausalLM", "llama"}, {"GemmaForCausalLM", "gemma"}, {"Qwen3ForCausalLM", "qwen3"}}) {
    for (const auto& [field, wrong, right] : std::vector<std::tuple<const char*, Json, Json>>{
             {"is_causal", false, true},
             {"is_causal", nullptr, true},
             {"use_bidirectional_attention", true, false},
             {"attention_chunk_size", 8192, nullptr},
             {"layer_types", {"full_attention", "chunked_attention"}, {"full_attention", "full_attention"}}}) {
      Json json = of_family(architecture, type);
      json[field] = right;
      EXPECT_TRUE(parse(json).ok()) << parse(json).error().message;
      json[field] = wrong;
      const auto config = parse(json);
      ASSERT_FALSE(config.ok()) << architecture << " " << field;
      EXPECT_NE(config.error().message.find(std::string("field '") + field), std::string::npos)
          << config.error().message;
    }
  }
}

TEST(Config, LayerTypesMustBeWhatTheFamilyComputes) {
  Json llama = good();
  llama["sliding_window"] = 16;
  llama["layer_types"] = {"full_attention", "sliding_attention"};
  EXPECT_NE(parse(llama).error().message.find("'layer_types' gives layer 1 sliding_attention, but LlamaForCausalLM"),
            std::string::npos);
  Json mistral = of_family("MistralForCausalLM", "mistral");
  mistral["sliding_window"] = 16;
  mistral["layer_types"] = {"sliding_attention", "full_attention"};
  EXPECT_NE(parse(mistral).error().message.find("'layer_types' gives layer 1 full_attention"), std::string::npos);
  mistral["layer_types"][1] = "sliding_attention";
  EXPECT_TRUE(parse(mistral).ok());
}

TEST(Config, ScalingsOfOtherModelsAreRefused) {
  Json json = good();
  json["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 4.0}, {"llama_4_scaling_beta", 0.0}};
  EXPECT_TRUE(parse(json).ok());
  json["rope_parameters"]["llama_4_scaling_beta"] = 0.1;
  EXPECT_NE(parse(json).error().message.find("'llama_4_scaling_beta'"), std::string::npos);
  Json phi = of_family("Phi3ForCausalLM", "phi3");
  const Json factors(8, 1.0);
  phi["rope_scaling"] = {{"type", "longrope"}, {"short_factor", factors}, {"long_factor", factors}};
  EXPECT_TRUE(parse(phi).ok()) << parse(phi).error().message;
  for (const char* field : {"short_mscale", "long_mscale"}) {
    Json other = phi;
    other["rope_scaling"][field] = 1.2;
    EXPECT_NE(parse(other).error().message.find(field), std::string::npos);
  }
}

}  // namespace
}  // namespace nfp
