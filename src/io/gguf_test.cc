#include "io/gguf.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/model_source.h"
#include "io/scaled_source.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

using testing::GgufBuilder;
using testing::random_tensor;

Result<GgufFile> parse_bytes(const std::string& file) { return parse_gguf(std::as_bytes(std::span(file)), "f.gguf"); }

void expect_fault(const std::string& file, const std::string& naming) {
  auto parsed = parse_bytes(file);
  ASSERT_FALSE(parsed.ok()) << naming;
  EXPECT_NE(parsed.error().message.find(naming), std::string::npos) << parsed.error().message;
  EXPECT_EQ(parsed.error().message.find("f.gguf: "), 0u) << parsed.error().message;
}

TEST(Gguf, EveryKindOfValueIsRead) {
  GgufBuilder b;
  b.key("u8", 0, GgufBuilder::raw<uint8_t>(250)).key("i8", 1, GgufBuilder::raw<int8_t>(-3));
  b.key("u16", 2, GgufBuilder::raw<uint16_t>(65000)).key("i16", 3, GgufBuilder::raw<int16_t>(-300));
  b.key("u32", 4, GgufBuilder::raw<uint32_t>(4000000000u)).key("i32", 5, GgufBuilder::raw<int32_t>(-70000));
  b.key("f32", 6, GgufBuilder::raw(1.5f)).key("bool", 7, GgufBuilder::raw<uint8_t>(1)).string("s", "text");
  b.key("u64", 10, GgufBuilder::raw<uint64_t>(1ull << 40)).key("i64", 11, GgufBuilder::raw<int64_t>(-5));
  b.key("f64", 12, GgufBuilder::raw(2.25)).strings("list", {"x", "", "yz"});
  b.key("ints", 9,
        GgufBuilder::raw<uint32_t>(5) + GgufBuilder::raw<uint64_t>(2) + GgufBuilder::raw(7) + GgufBuilder::raw(-7));
  b.tensor("t", {3, 2}, 0, std::string(24, 'a')).tensor("u", {4}, 1, std::string(8, 'b'));
  const std::string file = b.build();
  auto gguf = parse_bytes(file);
  ASSERT_TRUE(gguf.ok()) << gguf.error().message;
  EXPECT_EQ(gguf->integer("u8"), 250);
  EXPECT_EQ(gguf->integer("i8"), -3);
  EXPECT_EQ(gguf->integer("u16"), 65000);
  EXPECT_EQ(gguf->integer("i16"), -300);
  EXPECT_EQ(gguf->integer("u32"), 4000000000);
  EXPECT_EQ(gguf->integer("i32"), -70000);
  EXPECT_EQ(gguf->integer("u64"), int64_t{1} << 40);
  EXPECT_EQ(gguf->integer("i64"), -5);
  EXPECT_EQ(gguf->number("f32"), 1.5);
  EXPECT_EQ(gguf->number("f64"), 2.25);
  EXPECT_EQ(gguf->boolean("bool"), true);
  EXPECT_EQ(gguf->text("s"), "text");
  EXPECT_EQ(*gguf->array<std::string_view>("list"), (std::vector<std::string_view>{"x", "", "yz"}));
  EXPECT_EQ(*gguf->array<int64_t>("ints"), (std::vector<int64_t>{7, -7}));
  EXPECT_EQ(gguf->text("u8"), std::nullopt);
  EXPECT_EQ(gguf->array<int64_t>("list"), nullptr);
  ASSERT_EQ(gguf->tensors.size(), 2u);
  EXPECT_EQ(gguf->tensors[0].shape, (Shape{2, 3}));
  EXPECT_EQ(file.substr(gguf->tensors[1].begin, gguf->tensors[1].bytes), std::string(8, 'b'));
}

TEST(Gguf, EveryFaultIsNamed) {
  const std::string good = testing::tiny_gguf();
  ASSERT_TRUE(parse_bytes(good).ok());
  for (size_t size = 0; size < good.size(); size += size < 2000 ? 1 : 997) {
    EXPECT_FALSE(parse_bytes(good.substr(0, size)).ok()) << size;
  }
  expect_fault("GGML" + good.substr(4), "not a GGUF");
  expect_fault(GgufBuilder(1).build(), "version 1");
  expect_fault(GgufBuilder(0x03000000).build(), "little endian");
  expect_fault(GgufBuilder().claim(~0ull, 0).build(), "claims");
  expect_fault(GgufBuilder().claim(0, ~0ull).build(), "claims");
  expect_fault(GgufBuilder().claim(1000, 0).build(), "truncated");
  expect_fault(GgufBuilder().key("k", 99, "").build(), "'k' has unknown type 99");
  expect_fault(GgufBuilder().key("k", 8, GgufBuilder::raw<uint64_t>(~0ull)).build(), "'k'");
  expect_fault(
      GgufBuilder().key("k", 9, GgufBuilder::raw<uint32_t>(8) + GgufBuilder::raw<uint64_t>(1ull << 60)).build(), "'k'");
  expect_fault(GgufBuilder().key("k", 9, GgufBuilder::raw<uint32_t>(9) + GgufBuilder::raw<uint64_t>(1)).build(),
               "'k' is an array");
  // What would fit the file, and takes sixteen times as much memory.
  const uint64_t many = (1u << 25) + 1;
  expect_fault(GgufBuilder()
                   .key("k", 9, GgufBuilder::raw<uint32_t>(0) + GgufBuilder::raw(many) + std::string(many, '\0'))
                   .build(),
               "claims 33554433 elements in 'k'");
  expect_fault(GgufBuilder().integer(std::string(65536, 'k'), 1).build(), "metadata keys");
  expect_fault(GgufBuilder().integer("k", 1).integer("k", 2).build(), "'k' appears twice");
  expect_fault(GgufBuilder().integer("general.alignment", 0).build(), "alignment");
  expect_fault(GgufBuilder().integer("general.alignment", 24).build(), "alignment");
  expect_fault(GgufBuilder().integer("general.alignment", 1u << 21).build(), "a power of two up to 1048576");
  expect_fault(GgufBuilder().key("general.alignment", 5, GgufBuilder::raw<int32_t>(-32)).build(), "alignment is -32");
  expect_fault(GgufBuilder().string("general.alignment", "64").build(), "'general.alignment' is not a whole number");
  for (const std::string& name : {std::string(), std::string("a\xff"), std::string("a\nb"), std::string(201, 'a')}) {
    expect_fault(GgufBuilder().tensor_at(name, {1}, 0, 0).data("xxxx").build(), "printable");
  }
  const auto tensor = [](const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset, size_t bytes) {
    return GgufBuilder().tensor_at("t", dims, type, offset).data(std::string(bytes, 'x')).build();
  };
  EXPECT_TRUE(parse_bytes(tensor({32, 1}, 8, 0, 34)).ok());
  expect_fault(tensor({32, 1}, 8, 0, 33), "'t' (34 bytes at offset 0)");
  expect_fault(tensor({33, 1}, 8, 0, 100), "whole blocks of 32");
  expect_fault(tensor({32}, 8, 0, 34), "'t' has rows of 1 elements, not whole blocks of 32");
  expect_fault(tensor({}, 8, 0, 34), "'t' has rows of 1 elements, not whole blocks of 32");
  EXPECT_TRUE(parse_bytes(tensor({}, 0, 0, 4)).ok());
  expect_fault(tensor({32}, 4, 0, 100), "GGUF type 4, which is not supported");
  expect_fault(tensor({256, 1}, 18, 0, 100), "GGUF type IQ3_XXS, which is not supported");
  expect_fault(tensor({32, 1}, 39, 0, 100), "GGUF type MXFP4, which is not supported");
  expect_fault(tensor({1, 1, 1, 1, 1, 1, 1, 1, 1}, 0, 0, 4), "9 dimensions");
  expect_fault(tensor({1ull << 40, 1ull << 40}, 0, 0, 4), "impossible shape");
  expect_fault(tensor({0}, 0, 0, 4), "impossible shape");
  expect_fault(tensor({1}, 0, 4, 8), "offset 4");
  expect_fault(tensor({1}, 0, ~0ull - 31, 8), "'t'");
  expect_fault(GgufBuilder().tensor_at("a", {16}, 0, 0).tensor_at("b", {1}, 0, 32).data(std::string(64, 'x')).build(),
               "'a' and 'b' overlap");
  expect_fault(GgufBuilder().tensor_at("a", {1}, 0, 0).tensor_at("a", {1}, 0, 32).data(std::string(64, 'x')).build(),
               "'a' appears twice");
}

class GgufModel : public testing::ScratchTest {
 protected:
  Result<std::unique_ptr<ModelSource>> open(const std::string& bytes) {
    EXPECT_TRUE(write_file(path("m.gguf"), bytes).ok());
    return ModelSource::open(path("m.gguf"));
  }
};

TEST_F(GgufModel, SamplingKeysAreAGenerationConfig) {
  auto keys = testing::tiny_gguf_keys();
  keys.number("general.sampling.temp", 0.5f).integer("general.sampling.top_k", 20);
  auto source = open(testing::tiny_gguf(std::move(keys)));
  ASSERT_TRUE(source.ok()) << source.error().message;
  const auto text = (*source)->text_file("generation_config.json").value();
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(nlohmann::json::parse(*text), nlohmann::json({{"temperature", 0.5}, {"top_k", 20}}));
  const auto smoothed = scale_source(std::move(*source), {});
  ASSERT_TRUE(smoothed.ok()) << smoothed.error().message;
  EXPECT_EQ((*smoothed)->text_file("generation_config.json").value(), text);
  EXPECT_FALSE((*open(testing::tiny_gguf()))->text_file("generation_config.json").value().has_value());
}

TEST_F(GgufModel, LooksLikeAHuggingFaceModel) {
  auto source = open(testing::tiny_gguf());
  ASSERT_TRUE(source.ok()) << source.error().message;
  const auto config = nlohmann::json::parse((*source)->config_json());
  EXPECT_EQ(config["architectures"][0], "LlamaForCausalLM");
  EXPECT_EQ(config["hidden_size"], 32);
  EXPECT_EQ(config["head_dim"], 8);
  EXPECT_EQ(config["num_key_value_heads"], 1);
  EXPECT_EQ(config["vocab_size"], 4);
  EXPECT_EQ(config["tie_word_embeddings"], true);
  EXPECT_EQ(config["bos_token_id"], 3);
  for (const char* name : {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight",
                           "model.layers.0.mlp.gate_proj.weight", "model.layers.0.post_attention_layernorm.weight"}) {
    EXPECT_TRUE((*source)->has(name)) << name;
  }
  const GgufTokenizer* tokenizer = (*source)->gguf_tokenizer();
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->architecture, "llama");
  EXPECT_EQ(tokenizer->model, "gpt2");
  EXPECT_EQ(tokenizer->tokens.size(), 4u);
  EXPECT_EQ(tokenizer->chat_template, "{{ x }}");
  EXPECT_EQ(tokenizer->eom, std::nullopt);
  source = open(testing::tiny_gguf(testing::tiny_gguf_keys().integer("tokenizer.ggml.eom_token_id", 2)));
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->gguf_tokenizer()->eom, 2);
}

// llama.cpp's converter: reshape(heads, 2, head_dim / 2, cols).swapaxes(1, 2). Rows here count, so the order shows.
TEST_F(GgufModel, RotatedRowsAreInHuggingFaceOrderAgain) {
  constexpr int64_t kHeads = 2, kHeadDim = 8;
  std::vector<float> permuted(size_t{16} * 32);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < kHeadDim / 2; ++i) {
        const int64_t original = h * kHeadDim + half * kHeadDim / 2 + i;
        const int64_t stored = h * kHeadDim + 2 * i + half;
        for (int64_t c = 0; c < 32; ++c) permuted[static_cast<size_t>(stored * 32 + c)] = static_cast<float>(original);
      }
    }
  }
  GgufBuilder gguf = testing::tiny_gguf_keys();
  gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  gguf.tensor("blk.0.attn_q.weight", {32, 16}, 0,
              std::string(reinterpret_cast<const char*>(permuted.data()), permuted.size() * 4));
  auto source = open(gguf.build());
  ASSERT_TRUE(source.ok()) << source.error().message;
  std::vector<float> rows(size_t{16} * 32);
  ASSERT_TRUE((*source)->read_f32("model.layers.0.self_attn.q_proj.weight", rows).ok());
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t row = i / 32;
    ASSERT_EQ(rows[i], static_cast<float>(row)) << i;
  }
}

// The converter leaves the rows of Qwen's q and k in their order.
TEST_F(GgufModel, QwenModelsKeepTheirRowsBiasesAndHeadNorms) {
  for (const int version : {2, 3}) {
    GgufBuilder gguf = testing::tiny_gguf_keys(fmt::format("qwen{}", version));
    const auto f32 = [&](const std::string& name, const std::vector<uint64_t>& dims, const std::vector<float>& values) {
      gguf.tensor(name, dims, 0, std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4));
    };
    gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
    gguf.tensor("output.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 2).bytes);
    std::vector<float> rows(size_t{16} * 32);
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t row = i / 32;
      rows[i] = static_cast<float>(row);
    }
    f32("blk.0.attn_q.weight", {32, 16}, rows);
    std::vector<float> ramp(16);
    for (size_t i = 0; i < ramp.size(); ++i) ramp[i] = static_cast<float>(i);
    if (version == 2) {
      f32("blk.0.attn_q.bias", {16}, ramp);
    } else {
      f32("blk.0.attn_q_norm.weight", {8}, std::vector<float>(ramp.begin(), ramp.begin() + 8));
      f32("blk.0.attn_k_norm.weight", {8}, std::vector<float>(8, 1.0f));
    }
    auto source = open(gguf.build());
    ASSERT_TRUE(source.ok()) << source.error().message;
    const auto config = nlohmann::json::parse((*source)->config_json());
    EXPECT_EQ(config["architectures"][0], fmt::format("Qwen{}ForCausalLM", version));
    EXPECT_EQ(config["model_type"], fmt::format("qwen{}", version));
    EXPECT_EQ(config["head_dim"], 8);
    EXPECT_EQ(config["attention_bias"], version == 2);
    EXPECT_EQ(config["mlp_bias"], false);
    EXPECT_EQ(config["tie_word_embeddings"], false);
    EXPECT_TRUE((*source)->has("lm_head.weight"));
    std::vector<float> read(rows.size());
    ASSERT_TRUE((*source)->read_f32("model.layers.0.self_attn.q_proj.weight", read).ok());
    EXPECT_EQ(read, rows);
    read.resize(version == 2 ? 16 : 8);
    const char* vector = version == 2 ? "q_proj.bias" : "q_norm.weight";
    ASSERT_TRUE((*source)->read_f32(std::string("model.layers.0.self_attn.") + vector, read).ok());
    for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i], ramp[i]) << i;
    EXPECT_EQ((*source)->has("model.layers.0.self_attn.k_norm.weight"), version == 3);
  }
}

// What llama.cpp takes where these are left out; Qwen's config.json would have 32 heads and 128 features.
TEST_F(GgufModel, HeadsLeftOutAreThoseOfLlamaCpp) {
  GgufBuilder gguf;
  gguf.string("general.architecture", "qwen3").integer("qwen3.block_count", 1).integer("qwen3.embedding_length", 32);
  gguf.integer("qwen3.attention.head_count", 4).integer("qwen3.feed_forward_length", 64);
  gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  auto source = open(gguf.build());
  ASSERT_TRUE(source.ok()) << source.error().message;
  const auto config = nlohmann::json::parse((*source)->config_json());
  EXPECT_EQ(config["num_key_value_heads"], 4);
  EXPECT_EQ(config["head_dim"], 8);
}

TEST_F(GgufModel, LlamaThreeScalingBecomesRopeScaling) {
  const auto with_factors = [](const std::vector<float>& factors, float linear = 0) {
    GgufBuilder gguf = testing::tiny_gguf_keys();
    if (linear > 0) gguf.number("llama.rope.scaling.factor", linear);
    gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
    gguf.tensor("rope_freqs.weight", {factors.size()}, 0,
                std::string(reinterpret_cast<const char*>(factors.data()), factors.size() * 4));
    return gguf.build();
  };
  // head_dim 8, base 10000: wavelengths 6.28, 62.8, 628, 6283 against 8192/4 = 2048 and 8192/1: the last is between.
  const double wavelength = 2 * 3.14159265358979 * 1000;
  const double smooth = (8192 / wavelength - 1) / 3;
  const auto last = static_cast<float>(1 / ((1 - smooth) / 8 + smooth));
  auto source = open(with_factors({1, 1, 1, last}));
  ASSERT_TRUE(source.ok()) << source.error().message;
  const auto rope = nlohmann::json::parse((*source)->config_json())["rope_scaling"];
  EXPECT_EQ(rope["rope_type"], "llama3");
  EXPECT_EQ(rope["factor"], 8.0);
  EXPECT_EQ(rope["original_max_position_embeddings"], 8192);
  auto ones = open(with_factors({1, 1, 1, 1}));
  ASSERT_TRUE(ones.ok()) << ones.error().message;
  EXPECT_FALSE(nlohmann::json::parse((*ones)->config_json()).contains("rope_scaling"));
  auto odd = open(with_factors({1, 2, 3, 4}));
  ASSERT_FALSE(odd.ok());
  EXPECT_NE(odd.error().message.find("rope_freqs.weight"), std::string::npos) << odd.error().message;
  EXPECT_FALSE(open(with_factors({1, 1})).ok());
  EXPECT_TRUE(open(with_factors({1, 1, 1, last}, 1.0f)).ok());
  const auto twice = open(with_factors({1, 1, 1, last}, 4.0f));
  ASSERT_FALSE(twice.ok());
  EXPECT_NE(twice.error().message.find("'llama.rope.scaling.factor' is 4 (linear)"), std::string::npos)
      << twice.error().message;
}

TEST_F(GgufModel, FilesNameTheLayersThatHaveAWindow) {
  for (const std::string name : {"exaone4", "gemma2", "gemma3", "olmo2"}) {
    const auto config = [&](uint32_t window, const std::vector<uint8_t>& slides, int period = -1) {
      GgufBuilder gguf = testing::tiny_gguf_keys(name);
      gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
      if (window > 0) gguf.integer(name + ".attention.sliding_window", window);
      std::string array = GgufBuilder::raw<uint32_t>(7) + GgufBuilder::raw<uint64_t>(slides.size());
      for (const uint8_t one : slides) array += GgufBuilder::raw(one);
      const std::string pattern = name + ".attention.sliding_window_pattern";
      if (!slides.empty()) gguf.key(pattern, 9, array);
      if (period >= 0) gguf.integer(pattern, static_cast<uint32_t>(period));
      const auto source = open(gguf.build());
      EXPECT_TRUE(source.ok()) << source.error().message;
      return nlohmann::json::parse((*source)->config_json());
    };
    SCOPED_TRACE(name);
    EXPECT_EQ(config(7, {1})["layer_types"], nlohmann::json({"sliding_attention"}));
    EXPECT_EQ(config(7, {0})["layer_types"], nlohmann::json({"full_attention"}));
    EXPECT_EQ(config(7, {}, 2)["layer_types"], nlohmann::json({"sliding_attention"}));
    EXPECT_EQ(config(7, {}, 1)["layer_types"], nlohmann::json({"full_attention"}));
    EXPECT_EQ(config(7, {}, 0)["layer_types"], nlohmann::json({"sliding_attention"}));
    EXPECT_EQ(config(7, {})["sliding_window"], 7);
    EXPECT_FALSE(config(7, {}).contains("layer_types"));
    EXPECT_TRUE(config(7, {1, 0})["layer_types"].empty());  // more than there are layers: the configuration is refused
    if (name == "olmo2") continue;                          // without a window it is OLMo 2
    if (name == "gemma2") {
      EXPECT_EQ(config(0, {})["sliding_window"], 4096);
      continue;
    }
    EXPECT_TRUE(config(0, {1})["sliding_window"].is_null());
    EXPECT_EQ(config(0, {})["layer_types"], nlohmann::json({"full_attention"}));
  }
}

TEST_F(GgufModel, GemmaThreeHasACapOfLogitsWhereItsFileSaysSo) {
  for (const bool says : {false, true}) {
    GgufBuilder gguf = testing::tiny_gguf_keys("gemma3");
    gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
    if (says) gguf.number("gemma3.final_logit_softcapping", 30.0f);
    const auto source = open(gguf.build());
    ASSERT_TRUE(source.ok()) << source.error().message;
    const auto config = nlohmann::json::parse((*source)->config_json());
    EXPECT_EQ(config["final_logit_softcapping"], says ? 30.0 : 0.0);
    EXPECT_EQ(config["attn_logit_softcapping"], 0.0);
  }
}

TEST_F(GgufModel, PartOfAHeadRotates) {
  for (const auto& [rotating, part] : {std::pair{4u, 0.5}, {0u, 1.0}}) {
    GgufBuilder gguf = testing::tiny_gguf_keys("glm4");
    gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
    if (rotating > 0) gguf.integer("glm4.rope.dimension_count", rotating);
    const auto source = open(gguf.build());
    ASSERT_TRUE(source.ok()) << source.error().message;
    EXPECT_EQ(nlohmann::json::parse((*source)->config_json())["partial_rotary_factor"], part);
  }
}

// OLMo 3's files, as llama.cpp's converter has written them since it knows the model.
TEST_F(GgufModel, AnAttentionFactorThatYarnImpliesIsTaken) {
  for (const char* key : {"attn_factor", "yarn_attn_factor"}) {
    const auto yarn = [&](float attention) {
      GgufBuilder gguf = testing::tiny_gguf_keys("olmo2");
      gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
      gguf.string("olmo2.rope.scaling.type", "yarn").number("olmo2.rope.scaling.factor", 8.0f);
      gguf.integer("olmo2.rope.scaling.original_context_length", 8192);
      return open(gguf.number(fmt::format("olmo2.rope.scaling.{}", key), attention).build());
    };
    const auto source = yarn(1.2079441541679836f);
    ASSERT_TRUE(source.ok()) << source.error().message;
    const auto rope = nlohmann::json::parse((*source)->config_json())["rope_scaling"];
    EXPECT_EQ(rope, nlohmann::json({{"rope_type", "yarn"},
                                    {"factor", 8.0},
                                    {"original_max_position_embeddings", 8192}}));  // which implies the rest
    const auto other = yarn(1.5f);
    ASSERT_FALSE(other.ok());
    EXPECT_NE(other.error().message.find(fmt::format("'olmo2.rope.scaling.{}'", key)), std::string::npos)
        << other.error().message;
  }
}

TEST_F(GgufModel, FaultsInTheMetadataAreNamed) {
  const auto expect = [&](const std::string& bytes, const std::string& naming) {
    auto source = open(bytes);
    ASSERT_FALSE(source.ok()) << naming;
    EXPECT_NE(source.error().message.find(naming), std::string::npos) << source.error().message;
  };
  expect(GgufBuilder().build(), "general.architecture");
  expect(GgufBuilder().string("general.architecture", "mamba").build(), "'mamba' is not supported");
  expect(GgufBuilder().string("general.architecture", "llama").build(), "llama.");
  expect(testing::tiny_gguf_keys().build(), "model.embed_tokens.weight");
  GgufBuilder heads = testing::tiny_gguf_keys();
  heads.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  heads.tensor("blk.0.attn_q.weight", {32, 6}, 1, random_tensor("", DType::kF16, {6, 32}, 1).bytes);
  expect(heads.build(), "heads");
  GgufBuilder yarn = testing::tiny_gguf_keys("qwen2");
  yarn.string("qwen2.rope.scaling.type", "yarn");
  yarn.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  yarn.number("qwen2.rope.scaling.yarn_ext_factor", 0.5f);
  expect(yarn.build(), "'qwen2.rope.scaling.yarn_ext_factor' is not supported");
  const auto tiny = [] {
    GgufBuilder gguf = testing::tiny_gguf_keys("qwen2");
    gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
    return gguf;
  };
  GgufBuilder longrope = tiny(), part = tiny(), gating = tiny(), attention = tiny();
  longrope.string("qwen2.rope.scaling.type", "longrope");
  expect(longrope.build(), "'qwen2.rope.scaling.type' is 'longrope', which is not supported for qwen2");
  part.integer("qwen2.rope.dimension_count", 6);
  expect(part.build(), "'qwen2.rope.dimension_count' is 6");
  attention.number("qwen2.rope.scaling.attn_factor", 2.0f);
  expect(attention.build(), "'qwen2.rope.scaling.attn_factor' is 2");
  GgufBuilder sections = testing::tiny_gguf_keys("glm4"), predicting = tiny(), clamped = tiny();
  sections.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  sections.key("glm4.rope.dimension_sections", 9,
               GgufBuilder::raw<uint32_t>(5) + GgufBuilder::raw<uint64_t>(2) + GgufBuilder::raw<int32_t>(8) +
                   GgufBuilder::raw<int32_t>(12));
  expect(sections.build(), "'glm4.rope.dimension_sections' is given, which is not supported");
  predicting.integer("qwen2.nextn_predict_layers", 1);
  expect(predicting.build(), "'qwen2.nextn_predict_layers' is 1");
  clamped.number("qwen2.attention.clamp_kqv", 8.0f);
  expect(clamped.build(), "'qwen2.attention.clamp_kqv' is 8");
  GgufBuilder ministral = testing::tiny_gguf_keys("mistral3");
  ministral.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  EXPECT_TRUE(open(ministral.build()).ok());
  ministral.number("mistral3.attention.temperature_scale", 0.5f);
  expect(ministral.build(), "'mistral3.attention.temperature_scale' is 0.5");
  GgufBuilder granite = testing::tiny_gguf_keys("granite");
  granite.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  granite.key("granite.rope.scaling.finetuned", 7, GgufBuilder::raw<uint8_t>(0));
  expect(granite.build(), "'granite.rope.scaling.finetuned' is false");
  gating.integer("qwen2.expert_gating_func", 2);
  expect(gating.build(), "'qwen2.expert_gating_func' is 2");
  for (const char* name : {"qwen2.rope.scaling.factor", "qwen2.rope.scale_linear"}) {  // linear, where no type is given
    GgufBuilder linear = tiny();
    linear.number(name, 4.0f);
    const auto source = open(linear.build());
    ASSERT_TRUE(source.ok()) << source.error().message;
    const auto rope = nlohmann::json::parse((*source)->config_json())["rope_scaling"];
    EXPECT_EQ(rope["rope_type"], "linear");
    EXPECT_EQ(rope["factor"], 4.0);
  }
  GgufBuilder dense = testing::tiny_gguf_keys("qwen2moe");
  expect(dense.build(), "'qwen2moe.expert_count' is 0 or missing");
  GgufBuilder flat = testing::tiny_gguf_keys();
  flat.integer("llama.expert_count", 2);
  flat.tensor("blk.0.ffn_up_exps.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  expect(flat.build(), "'blk.0.ffn_up_exps.weight' must have three dimensions, the last of 1 to 4096");
  // They were read as absent.
  const std::string two_floats =
      GgufBuilder::raw<uint32_t>(6) + GgufBuilder::raw<uint64_t>(2) + GgufBuilder::raw(0.5f) + GgufBuilder::raw(0.5f);
  const auto of_kind = [&](const std::string& architecture, const std::string& key, uint32_t type,
                           const std::string& value) {
    GgufBuilder gguf = testing::tiny_gguf_keys(architecture);
    gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
    return gguf.key(key, type, value).build();
  };
  expect(of_kind("granite", "granite.residual_scale", 9, two_floats), "'granite.residual_scale' is not a number");
  expect(of_kind("qwen2", "qwen2.rope.dimension_count", 6, GgufBuilder::raw(8.0f)),
         "'qwen2.rope.dimension_count' is not a whole number");
  expect(of_kind("qwen2", "qwen2.rope.scaling.type", 4, GgufBuilder::raw<uint32_t>(1)),
         "'qwen2.rope.scaling.type' is not a text");
  expect(of_kind("qwen2", "qwen2.attention.causal", 4, GgufBuilder::raw<uint32_t>(0)),
         "'qwen2.attention.causal' is not true or false");
  expect(of_kind("gemma2", "gemma2.attention.sliding_window_pattern", 9, two_floats),
         "'gemma2.attention.sliding_window_pattern' is not a whole number");
  expect(of_kind("qwen2", "tokenizer.ggml.eos_token_id", 6, GgufBuilder::raw(2.0f)),
         "'tokenizer.ggml.eos_token_id' is not a whole number");
  const auto with_heads = [](uint64_t query, uint64_t kv) {
    GgufBuilder gguf;
    gguf.string("general.architecture", "qwen2").integer("qwen2.block_count", 1).integer("qwen2.embedding_length", 8);
    gguf.key("qwen2.attention.head_count", 10, GgufBuilder::raw(query));
    gguf.key("qwen2.attention.head_count_kv", 10, GgufBuilder::raw(kv));
    return gguf.integer("qwen2.feed_forward_length", 64).build();
  };
  expect(with_heads(0, 1), "metadata 'qwen2.attention.head_count' is 0; it must be 1 to 4096");
  expect(with_heads(2, 0), "metadata 'qwen2.attention.head_count_kv' is 0; it must be 1 to 4096");
  expect(with_heads(uint64_t{1} << 62, 1), "metadata 'qwen2.attention.head_count' is 4611686018427387904");
}

}  // namespace
}  // namespace nfp
