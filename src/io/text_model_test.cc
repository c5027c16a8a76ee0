#include "io/text_model.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/json_depth.h"
#include "io/fp8_checkpoint.h"
#include "io/model_source.h"
#include "io/nested_checkpoint.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

using Json = nlohmann::json;

constexpr const char* kMultimodal = R"({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
 "eos_token_id": [1, 106], "bos_token_id": 2, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
 "text_config": {"model_type": "gemma3_text", "hidden_size": 32, "bos_token_id": 5}})";

TEST(TextModel, ItsConfigurationIsTextConfigWithWhatIsSaidBesideIt) {
  const auto text = text_model_config(kMultimodal, "config.json");
  ASSERT_TRUE(text.ok() && text->has_value());
  const Json config = Json::parse(**text);
  EXPECT_EQ(config["architectures"], Json({"Gemma3ForCausalLM"}));
  EXPECT_EQ(config["model_type"], "gemma3_text");
  EXPECT_EQ(config["hidden_size"], 32);
  EXPECT_EQ(config["bos_token_id"], 5);
  EXPECT_EQ(config["eos_token_id"], Json({1, 106}));
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
  EXPECT_FALSE(config.contains("vision_config"));
  EXPECT_FALSE(config.contains("tie_word_embeddings"));
  // As transformers 5 writes a model whose head is its own: text_config has its class's default.
  Json untied = Json::parse(kMultimodal);
  untied["tie_word_embeddings"] = false;
  untied["text_config"]["tie_word_embeddings"] = true;
  EXPECT_EQ(Json::parse(**text_model_config(untied.dump(), "config.json"))["tie_word_embeddings"], false);
  const auto none = text_model_config(testing::kTinyConfig, "config.json");
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->has_value());
}

TEST(TextModel, AnotherTextModelOrNoneIsRefused) {
  for (const auto& [field, config] :
       {std::pair{"text_config", R"({"architectures": ["Gemma3ForConditionalGeneration"]})"},
        {"model_type",
         R"({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "x"}})"},
        {"model_type",
         R"({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": 7}})"}}) {
    const auto text = text_model_config(config, "config.json");
    ASSERT_FALSE(text.ok()) << config;
    EXPECT_NE(text.error().message.find(field), std::string::npos) << text.error().message;
  }
  EXPECT_FALSE(text_model_config("[]", "config.json").ok());
}

// `count` members "k0": 0, ...
std::string members(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += fmt::format("{}\"k{}\":0", i > 0 ? "," : "", i);
  return text;
}

// A search for each key would take minutes; the test's own time limit is what fails then.
TEST(ConfigJson, IsReadInLinearTime) {
  constexpr int kKeys = 200'000;
  const std::string plain = "{" + members(kKeys) + "}";
  const auto none = text_model_config(plain, "config.json");
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->has_value());
  const auto scheme = find_fp8_scheme(plain, "config.json");
  ASSERT_TRUE(scheme.ok());
  EXPECT_FALSE(scheme->has_value());
  const auto text = text_model_config(
      R"({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {)" + members(kKeys) + "}}",
      "config.json");
  ASSERT_TRUE(text.ok() && text->has_value());
  EXPECT_EQ(Json::parse(**text).size(), static_cast<size_t>(kKeys) + 2);
  NestedInfo info;
  info.lower_directory = "lower";
  for (int i = 0; i < kKeys / 2; ++i) info.dtypes[fmt::format("t{}", i)] = DType::kBF16;
  const auto nested = nested_config(plain, info, {});
  ASSERT_TRUE(nested.ok()) << nested.error().message;
  const auto again = parse_nested_info(*nested, "config.json");
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->dtypes, info.dtypes);
  const auto restored = plain_config(*nested);
  ASSERT_TRUE(restored.ok()) << restored.error().message;
  EXPECT_EQ(*restored, parse_file_json<nlohmann::ordered_json>(plain).dump(2) + "\n");  // in its order
}

TEST(ConfigJson, ObjectsKeepTheirOrder) {
  using Ordered = nlohmann::ordered_json;
  for (const char* text :
       {R"({"b":1,"a":{"z":[1,{"y":null,"x":-2}],"w":1.5},"c":"s","b":4})", R"({"x":1,"x":{"y":1},"x":[true]})", "[]",
        "{}", "7", R"([[],{},"a",[{"a":[]}]])", "", "{", "[1,]", "{\"a\":1} x", "\"\xff\"", "1e999"}) {
    const auto read = parse_file_json<Ordered>(text);
    const Ordered expected = Ordered::parse(text, nullptr, /*allow_exceptions=*/false);
    ASSERT_EQ(read.is_discarded(), expected.is_discarded()) << text;
    if (read.is_discarded()) continue;
    EXPECT_EQ(read.dump(), expected.dump()) << text;
  }
  EXPECT_TRUE(parse_file_json<Ordered>(std::string(1000, '[') + std::string(1000, ']')).is_discarded());
}

class TextModelFiles : public testing::ScratchTest {};

TEST_F(TextModelFiles, OtherPartsAreLeftOut) {
  for (const auto& [body, head, vision] : {std::tuple{"language_model.model.", "language_model.lm_head.", ""},
                                           {"model.language_model.", "lm_head.", "model."}}) {
    std::vector<testing::TestTensor> tensors;
    for (auto tensor : testing::tiny_model(DType::kF16)) {
      tensor.name = body + tensor.name.substr(std::string("model.").size());
      tensors.push_back(tensor);
    }
    tensors.push_back(testing::random_tensor(head + std::string("weight"), DType::kF16, {50, 32}, 3));
    for (const char* name : {"vision_tower.encoder.weight", "multi_modal_projector.mm_soft_emb_norm.weight"}) {
      tensors.push_back(testing::random_tensor(vision + std::string(name), DType::kF16, {4, 4}, 3));
    }
    testing::write_model(path("m"), tensors);
    ASSERT_TRUE(write_file(path("m/config.json"), kMultimodal).ok());
    const auto source = ModelSource::open(path("m"));
    ASSERT_TRUE(source.ok()) << source.error().message;
    EXPECT_EQ((*source)->tensors().size(), tensors.size() - 2);
    EXPECT_TRUE((*source)->has("lm_head.weight"));
    for (const auto& tensor : testing::tiny_model(DType::kF16)) {
      std::vector<uint16_t> values(tensor.bytes.size() / 2);
      ASSERT_TRUE((*source)->read_fp16_rows(tensor.name, 0, tensor.shape[0], values.data()).ok()) << tensor.name;
      EXPECT_EQ(0, std::memcmp(values.data(), tensor.bytes.data(), tensor.bytes.size())) << tensor.name;
    }
    std::filesystem::remove_all(path("m"));
  }
}

}  // namespace
}  // namespace nfp
