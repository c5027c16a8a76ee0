#include "model/dummy_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "base/atomic_file.h"
#include "base/float_types.h"
#include "base/testing/scratch_folder.h"
#include "io/dummy_source.h"
#include "model/weight_loader.h"
#include "nested/format.h"

namespace nfp {
namespace {

class DummyModel : public ::testing::Test {
 protected:
  void write_config(const std::string& family, const std::string& more = "") {
    std::string type = family;
    for (char& c : type) c = static_cast<char>(std::tolower(c));
    if (type == "gemma3") type += "_text";
    const std::string json = fmt::format(
        R"({{"architectures": ["{}ForCausalLM"], "model_type": "{}", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
            "vocab_size": 200, "max_position_embeddings": 128{}}})",
        family, type, more);
    ASSERT_TRUE(write_file(folder_ + "/config.json", json).ok());
  }

  // Logits of five tokens.
  Result<std::vector<float>> run(const ModelSource& source, Precision precision) {
    ThreadPool threads(2);
    NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source.config_json(), "config.json"));
    NFP_ASSIGN_OR_RETURN(const auto backend, make_cpu_backend({.threads = 2, .pin = false, .kernels = ""}));
    NFP_ASSIGN_OR_RETURN(const auto model, load_model(source, config, *backend, threads, {}));
    NFP_RETURN_IF_ERROR(model->reserve(5, 5, 16));
    NFP_ASSIGN_OR_RETURN(const auto cache, backend->make_kv_cache(model->kv_spec(1, 16, DType::kF32)));
    const std::vector<int32_t> ids{3, 1, 4, 1, 5}, places{0, 1, 2, 3, 4}, starts{0, 5}, context{5}, table{0};
    BatchView batch;
    batch.tokens = 5;
    batch.sequences = batch.table_width = 1;
    batch.token_ids = ids.data();
    batch.positions = batch.slots = places.data();
    batch.query_start = starts.data();
    batch.context = context.data();
    batch.block_table = table.data();
    model->forward({.batch = batch, .precision = precision, .cache = cache.get()});
    std::vector<float> logits(5 * static_cast<size_t>(config.vocab));
    model->logits(places.data(), 5, precision, logits.data());
    NFP_RETURN_IF_ERROR(backend->synchronize());
    return logits;
  }

  const testing::ScratchFolder scratch_;
  const std::string folder_ = scratch_.path();
};

TEST_F(DummyModel, EveryFamilyLoadsAndRuns) {
  for (const auto& [family, more] : {std::pair{"Llama", R"(, "attention_bias": true, "mlp_bias": true)"},
                                     {"Mistral", ""},
                                     {"Qwen2", R"(, "tie_word_embeddings": true)"},
                                     {"Qwen3", ""},
                                     {"Phi3", R"(, "partial_rotary_factor": 0.5)"},
                                     {"Gemma", ""},
                                     {"Gemma2", ""},
                                     {"Gemma3", R"(, "sliding_window": 3)"},
                                     {"SmolLM3", R"(, "no_rope_layers": [1, 0])"},
                                     {"Mixtral", R"(, "num_local_experts": 4)"},
                                     {"Qwen2Moe",
                                      R"(, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                                           "shared_expert_intermediate_size": 40, "mlp_only_layers": [0])"},
                                     {"Qwen3Moe", R"(, "num_experts": 8, "moe_intermediate_size": 24)"},
                                     {"Olmoe", R"(, "num_experts": 8)"},
                                     {"Olmo2", ""},
                                     {"Granite", R"(, "attention_multiplier": 0.25)"},
                                     {"Olmo3", R"(, "sliding_window": 3)"},
                                     {"SeedOss", R"(, "attention_out_bias": true)"},
                                     {"Exaone4", R"(, "sliding_window": 3, "sliding_window_pattern": 2)"},
                                     {"Glm", ""},
                                     {"Glm4", R"(, "partial_rotary_factor": 1.0)"},
                                     {"Ernie4_5", R"(, "use_bias": true)"},
                                     {"Ministral", R"(, "layer_types": ["full_attention", "sliding_attention"])"},
                                     {"Helium", ""}}) {
    write_config(family, more);
    const auto source = open_dummy_model(folder_, 1);
    ASSERT_TRUE(source.ok()) << source.error().message;
    for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
      const auto logits = run(**source, precision);
      ASSERT_TRUE(logits.ok()) << family << ": " << logits.error().message;
      double squares = 0;
      for (const float value : *logits) {
        ASSERT_TRUE(std::isfinite(value));
        squares += double{value} * value;
      }
      EXPECT_GT(squares, 0.1);
    }
  }
}

// Another source's tensors, but for one in FP32 that begins with a number of the test's.
class Spoiled final : public ModelSource {
 public:
  Spoiled(const ModelSource& of, std::string tensor, float number)
      : ModelSource(of.kind(), of.path()), of_(of), tensor_(std::move(tensor)), number_(number) {
    config_json_ = of.config_json();
    for (TensorInfo one : of.tensors()) {
      if (one.name == tensor_) one.dtype = DType::kF32;
      add_tensor(std::move(one));
    }
  }
  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    if (tensor.name != tensor_) return of_.read_rows(*of_.find(tensor.name), first, count, out);
    std::vector<float> rows(static_cast<size_t>(count * tensor.row_elements()), 0.01f);
    if (first == 0) rows[0] = number_;
    std::memcpy(out, rows.data(), rows.size() * sizeof(float));
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { of_.release(*of_.find(tensor.name)); }

 private:
  const ModelSource& of_;
  const std::string tensor_;
  const float number_;
};

TEST_F(DummyModel, RoutersBeyondFp16AreRefusedByName) {
  write_config("Qwen2Moe", R"(, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 40)");
  const auto source = open_dummy_model(folder_, 1);
  ASSERT_TRUE(source.ok()) << source.error().message;
  for (const auto& [tensor, number] : {std::pair{"model.layers.1.mlp.gate.weight", 65505.0f},
                                       {"model.layers.0.mlp.shared_expert_gate.weight", -1e6f}}) {
    ASSERT_TRUE((*source)->has(tensor)) << tensor;
    const auto logits = run(Spoiled(**source, tensor, number), Precision::kFp16);
    ASSERT_FALSE(logits.ok()) << tensor;
    EXPECT_NE(logits.error().message.find(tensor), std::string::npos) << logits.error().message;
    EXPECT_NE(logits.error().message.find("at most 65504"), std::string::npos) << logits.error().message;
    EXPECT_TRUE(run(Spoiled(**source, tensor, 65504.0f), Precision::kFp16).ok());
  }
}

TEST_F(DummyModel, TheSeedDecides) {
  write_config("Llama");
  std::vector<float> logits[3];
  for (const int i : {0, 1, 2}) {
    const auto source = open_dummy_model(i == 1 ? folder_ + "/config.json" : folder_, i == 2 ? 8 : 7);
    ASSERT_TRUE(source.ok()) << source.error().message;
    logits[i] = *run(**source, Precision::kFp16);
  }
  EXPECT_EQ(logits[0], logits[1]);
  EXPECT_NE(logits[0], logits[2]);
}

TEST_F(DummyModel, WeightsAreNormalAndDoNotDependOnHowTheyAreRead) {
  write_config("Llama", R"(, "vocab_size": 3000)");
  const auto opened = open_dummy_model(folder_, 7);
  ASSERT_TRUE(opened.ok()) << opened.error().message;
  const ModelSource& source = **opened;
  ThreadPool threads(2);
  MatrixAnalysis analysis;
  const auto reader = source.matrix("lm_head.weight", threads, &analysis);
  ASSERT_TRUE(reader.ok()) << reader.error().message;
  ASSERT_EQ((*reader)->storage(), Storage::kNested);
  const int64_t rows = (*reader)->rows(), cols = (*reader)->cols();
  ASSERT_EQ(rows, 3000);
  std::vector<uint16_t> all(static_cast<size_t>(rows * cols)), row(static_cast<size_t>(cols));
  ASSERT_TRUE((*reader)->read_fp16(0, rows, all.data()).ok());
  double sum = 0, squares = 0, largest = 0;
  for (const uint16_t bits : all) {
    const double w = fp16_to_fp32(bits);
    sum += w;
    squares += w * w;
    largest = std::max(largest, std::abs(w));
  }
  // Of 192,000 numbers: five standard errors.
  const auto count = static_cast<double>(all.size());
  EXPECT_LT(std::abs(sum / count), 5 * kDummySigma / std::sqrt(count));
  EXPECT_NEAR(std::sqrt(squares / count), kDummySigma, 5 * kDummySigma / std::sqrt(2 * count));
  EXPECT_GT(largest, 4 * kDummySigma);
  EXPECT_LE(largest, analysis.largest);
  std::vector<uint8_t> upper(row.size()), lower(row.size());
  int8_t exponent = 1;
  for (const int64_t r : {int64_t{0}, int64_t{1234}, rows - 1}) {
    const auto want = std::span(all).subspan(static_cast<size_t>(r * cols), static_cast<size_t>(cols));
    ASSERT_TRUE((*reader)->read_fp16(r, 1, row.data()).ok());
    EXPECT_TRUE(std::equal(row.begin(), row.end(), want.begin()));
    ASSERT_TRUE((*reader)->read_nested(r, 1, upper.data(), lower.data(), &exponent).ok());
    EXPECT_EQ(exponent, 0);
    for (size_t i = 0; i < row.size(); ++i) EXPECT_EQ(join(upper[i], lower[i]), want[i]);
  }
  // What matrix() says without reading is what reading finds.
  const auto found = analyse_matrix(*source.matrix_source("lm_head.weight"), threads);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->storage, analysis.storage);
  EXPECT_EQ(found->exponents, analysis.exponents);
  EXPECT_EQ(found->nests_by_paper, analysis.nests_by_paper);
  std::vector<float> norm(64);
  ASSERT_TRUE(source.read_f32("model.norm.weight", norm).ok());
  EXPECT_EQ(norm, std::vector<float>(64, 1.0f));
}

TEST_F(DummyModel, FilesBesideTheConfigAreFoundOrAbsent) {
  write_config("Llama");
  const auto source = open_dummy_model(folder_ + "/config.json", 1);
  ASSERT_TRUE(source.ok()) << source.error().message;
  const auto absent = (*source)->text_file("tokenizer.json");
  ASSERT_TRUE(absent.ok()) << absent.error().message;
  EXPECT_FALSE(absent->has_value());
  EXPECT_EQ((*source)->gguf_tokenizer(), nullptr);
  ASSERT_TRUE(write_file(folder_ + "/tokenizer.json", "{}").ok());
  const auto present = (*source)->text_file("tokenizer.json");
  ASSERT_TRUE(present.ok());
  EXPECT_EQ(*present, "{}");
}

TEST_F(DummyModel, BadConfigsAreErrors) {
  EXPECT_EQ(open_dummy_model(folder_, 1).error().code, ErrorCode::kNotFound);
  ASSERT_TRUE(write_file(folder_ + "/config.json", "{}").ok());
  EXPECT_FALSE(open_dummy_model(folder_, 1).ok());
  ASSERT_TRUE(write_file(folder_ + "/model.gguf", "GGUF").ok());
  const Error other = open_dummy_model(folder_ + "/model.gguf", 1).error();
  EXPECT_EQ(other.code, ErrorCode::kUsage);
  EXPECT_NE(other.message.find("config.json"), std::string::npos) << other.message;
}

}  // namespace
}  // namespace nfp
