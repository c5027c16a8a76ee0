// What a breakdown counts against what the model's configuration implies, on the device that NFP_TEST_DEVICE names.
#include "eval/step_breakdown.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>
#include <set>
#include <string>

#include "backend/devices/devices.h"
#include "base/atomic_file.h"
#include "base/testing/scratch_folder.h"
#include "model/plan.h"

namespace nfp {
namespace {

constexpr int32_t kInput = 40, kBatch = 6;  // more rows than a CPU computes a norm of on the way into a product
constexpr std::string_view kDevice = NFP_TEST_DEVICE;
constexpr DeviceLimits kLimits{"test", 1e9, 3e11, 2e11, 1e11};

using Weights = std::map<std::string, double>;  // bytes by stage

class StepBreakdownOfAModel : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto backend = make_backend(std::string(kDevice), {.threads = 1}); !backend.ok()) {
      GTEST_SKIP() << backend.error().message;
    }
  }

  void load_model(const std::string& architecture, const std::string& type, const std::string& more = "") {
    const std::string json = fmt::format(
        R"({{"architectures": ["{}ForCausalLM"], "model_type": "{}", "hidden_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
            "vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": false{}}})",
        architecture, type, more);
    ASSERT_TRUE(write_file(folder_ + "/config.json", json).ok());
    LoadedModelOptions options;
    options.device = kDevice;
    options.dummy = true;
    options.threads = 2;
    auto loaded = load(folder_, options);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    loaded_ = std::move(*loaded);
    EngineConfig config;
    config.graphs = false;
    config.max_context = 256;
    config.limits.max_sequences = kBatch;
    config.limits.max_step_tokens = 512;
    config.memory_share = 0.2;
    auto engine = BenchEngine::create(*loaded_, config);
    ASSERT_TRUE(engine.ok()) << engine.error().message;
    engine_ = std::move(*engine);
  }

  std::vector<StepBreakdown> measure(Precision precision, int32_t batch = kBatch) {
    auto found = break_down(*engine_, {batch, kInput, 4}, precision, kLimits);
    EXPECT_TRUE(found.ok()) << found.error().message;
    return found.ok() ? *found : std::vector<StepBreakdown>(2);
  }

  // Of the model's matrices, all read once.
  Weights matrices(Precision precision) {
    Weights bytes;
    for (const Linear* linear : loaded_->model->linears()) {
      bytes[std::string(linear->stage())] += static_cast<double>(linear->weight->bytes_read(linear->at(precision)));
    }
    return bytes;
  }
  double kv_token_bytes() const { return static_cast<double>(kv_bytes_per_token(loaded_->config, DType::kF16)); }

  static Weights weights(const StepBreakdown& step) {
    Weights bytes;
    for (const StageCost& cost : step.stages) bytes[cost.stage] += cost.weight_bytes;
    return bytes;
  }
  static double kv_bytes(const StepBreakdown& step) {
    double bytes = 0;
    for (const StageCost& cost : step.stages) bytes += cost.kv_bytes;
    return bytes;
  }
  // FLOPs of prompts' attention, by whatever kernels.
  static double attention_flops(const StepBreakdown& step) {
    double flops = 0;
    for (const StageCost& cost : step.stages) {
      if (cost.stage == stage::kPrefillAttention || cost.stage == stage::kDecodeAttention) flops += cost.flops;
    }
    return flops;
  }
  static void expect_something_moves(const StepBreakdown& step) {
    std::set<std::pair<std::string, std::optional<Precision>>> names;
    for (const StageCost& cost : step.stages) {
      const std::string where = step.step + " " + cost.stage;
      EXPECT_TRUE(names.emplace(cost.stage, cost.precision).second) << where;
      EXPECT_GT(cost.us, 0) << where;
      EXPECT_GT(cost.calls, 0) << where;
      EXPECT_GT(cost.activation_bytes, 0) << where;
      EXPECT_GT(cost.share_of_limit, 0) << where;
    }
  }
  static std::set<std::string> names(const StepBreakdown& step) {
    std::set<std::string> found;
    for (const StageCost& cost : step.stages) found.insert(cost.stage);
    return found;
  }

  const testing::ScratchFolder scratch_;
  const std::string folder_ = scratch_.path();
  std::unique_ptr<LoadedModel> loaded_;  // outlives the engine
  std::unique_ptr<BenchEngine> engine_;
};

TEST_F(StepBreakdownOfAModel, ReadsTheWeightsThatItsConfigurationImplies) {
  ASSERT_NO_FATAL_FAILURE(load_model("Llama", "llama"));
  const ModelPlan plan = plan_model(loaded_->config);
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    const std::vector<StepBreakdown> steps = measure(precision);
    const Weights expected = matrices(precision);
    EXPECT_EQ(expected.size(), 5u);
    double sum = 0;
    for (const StepBreakdown& step : steps) {
      expect_something_moves(step);
      Weights found = weights(step);
      if (step.step == "prefill") continue;
      for (const auto& [name, bytes] : expected) {
        EXPECT_EQ(found[name], bytes) << name_of(precision) << " " << name;
        sum += found[name];
      }
      // Two norms a layer and the last, FP32; a row of the table a token.
      EXPECT_EQ(found["rms_norm"] + found["rms_norm+round"], 9 * 256 * 4);
      EXPECT_EQ(found["embed"], kBatch * 256 * 2);
    }
    EXPECT_EQ(sum, static_cast<double>(is_exact(precision) ? plan.step_fp16_bytes : plan.step_fp8_bytes))
        << "what inspect says that a step reads";
  }
}

TEST_F(StepBreakdownOfAModel, MovesTheKeysAndValuesOfItsContext) {
  ASSERT_NO_FATAL_FAILURE(load_model("Llama", "llama"));
  const std::vector<StepBreakdown> steps = measure(Precision::kFp16);
  const StepBreakdown &prefill = steps[0], &decode = steps[1];
  EXPECT_DOUBLE_EQ(kv_bytes(decode), kBatch * (decode.context + 1) * kv_token_bytes()) << "read, and one written";
  EXPECT_EQ(kv_bytes(prefill), kBatch * 2 * kInput * kv_token_bytes()) << "written and read";
  // The last layer attends for each prompt's last token alone.
  EXPECT_EQ(attention_flops(prefill), 4 * 4 * 64 * kBatch * (3 * kInput * (kInput + 1) / 2 + kInput));
}

TEST_F(StepBreakdownOfAModel, ReadsNoMoreThanAWindow) {
  ASSERT_NO_FATAL_FAILURE(
      load_model("Gemma3", "gemma3_text", R"(, "sliding_window": 16, "sliding_window_pattern": 2)"));
  int windows = 0;
  for (const int32_t window : loaded_->config.windows) windows += window == 16 ? 1 : 0;
  ASSERT_EQ(windows, 2);
  const std::vector<StepBreakdown> steps = measure(Precision::kFp8W8A8);
  const double layer = kv_token_bytes() / 4;
  EXPECT_DOUBLE_EQ(kv_bytes(steps[1]), kBatch * layer * (2 * 16 + 2 * steps[1].context + 4));
  for (const StepBreakdown& step : steps) expect_something_moves(step);
}

TEST_F(StepBreakdownOfAModel, MovesLogitsWhereTheyAreStored) {
  ASSERT_NO_FATAL_FAILURE(load_model("Llama", "llama"));
  // A GPU's greedy steps exchange the largest of every 16 logits, with its column, in place of all.
  const bool gpu = kDevice == "cuda";
  const double exchanged = kBatch * (gpu ? 512 / 16 * 8 : 512 * 4);
  const std::vector<StepBreakdown> steps = measure(Precision::kFp16);
  std::map<std::string, double> found;
  for (const StageCost& cost : steps[1].stages) found[cost.stage] += cost.activation_bytes;
  EXPECT_EQ(found["lm_head"], kBatch * 256 * (gpu ? 2 : 4) + exchanged);
  EXPECT_EQ(found["sample"], exchanged + kBatch * (gpu ? 16 : 64 + 16));
}

TEST_F(StepBreakdownOfAModel, NamesWhatEachOperationIsForAndWhatProductsAreComputedIn) {
  ASSERT_NO_FATAL_FAILURE(load_model("Llama", "llama"));
  const bool gpu = kDevice == "cuda";
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    std::set<std::string> both = {"embed",    "q/k/v", "o",       "gate/up", "down",
                                  "rms_norm", "add",   "lm_head", "sample",  "copy"};
    if (gpu && precision == Precision::kFp8W8A8) both.insert({"rms_norm+round", "round"});
    std::set<std::string> prefill = both, decode = both;
    // A prompt's last layer goes on with its last token.
    prefill.insert({"rope", "prefill_attention", "decode_attention", "gather_rows"});
    decode.insert(gpu ? "rope+decode_attention" : "decode_attention");
    if (!gpu) decode.insert("rope");
    const std::vector<StepBreakdown> steps = measure(precision);
    EXPECT_EQ(names(steps[0]), prefill) << name_of(precision);
    EXPECT_EQ(names(steps[1]), decode) << name_of(precision);
    for (const StageCost& cost : steps[1].stages) {
      const bool product = cost.weight_bytes > 1e4 && cost.stage != "embed";
      ASSERT_EQ(cost.precision.has_value(), product) << cost.stage;
      const Precision computed = cost.stage == "lm_head" ? Precision::kFp16 : precision;
      EXPECT_EQ(cost.precision.value_or(computed), computed) << cost.stage;
      const double least = kLimits.least_seconds(cost.weight_bytes + cost.activation_bytes + cost.kv_bytes, cost.flops,
                                                 cost.precision.value_or(Precision::kFp16));
      EXPECT_NEAR(cost.share_of_limit * cost.us, least * 1e6, least) << cost.stage;
    }
  }
}

TEST_F(StepBreakdownOfAModel, CountsTheNormOnTheWayIntoAProductWithIt) {
  if (kDevice != "cpu") GTEST_SKIP() << "a CPU's";
  ASSERT_NO_FATAL_FAILURE(load_model("Llama", "llama"));
  const std::vector<StepBreakdown> steps = measure(Precision::kFp8, 1);
  Weights found = weights(steps[1]), expected = matrices(Precision::kFp8);
  EXPECT_EQ(found.count("rms_norm"), 0u);
  EXPECT_EQ(found["q/k/v"], expected["q/k/v"] + 4 * 256 * 4);
  EXPECT_EQ(found["lm_head"], expected["lm_head"] + 256 * 4);
  expect_something_moves(steps[1]);
}

TEST_F(StepBreakdownOfAModel, ReadsTheExpertsThatHaveTokens) {
  ASSERT_NO_FATAL_FAILURE(load_model("Qwen2Moe", "qwen2_moe",
                                     R"(, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                                          "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1)"));
  for (const Precision precision : {Precision::kFp16, Precision::kFp8W8A8}) {
    for (const StepBreakdown& step : measure(precision)) {
      expect_something_moves(step);
      Weights found = weights(step), all = matrices(precision);
      for (const char* name : {"q/k/v", "o", "shared_gate/up", "shared_down", "lm_head"}) {
        EXPECT_EQ(found[name], all[name]) << step.step << " " << name;
      }
      EXPECT_EQ(found["route"], 4 * (8 + 1) * 256 * 4) << "and the shared expert's gate";
      for (const char* name : {"experts_gate/up", "experts_down"}) {
        EXPECT_GE(found[name], all[name] * 2 / 8) << step.step << " " << name;
        EXPECT_LE(found[name], all[name]) << step.step << " " << name;
      }
      // Of each of a token's experts: gate and up, down.
      const double tokens = step.step == "decode" ? kBatch : 3.0 / 4 * kBatch * kInput + 1.0 / 4 * kBatch;
      double flops = 0;
      for (const StageCost& cost : step.stages) {
        if (cost.stage == "experts_gate/up" || cost.stage == "experts_down") flops += cost.flops;
      }
      EXPECT_EQ(flops, 4 * tokens * 2 * 2 * 3 * 256 * 128);
    }
  }
}

StepBreakdown example() {
  StepBreakdown step;
  step.step = "decode";
  step.precision = Precision::kFp8W8A8;
  step.batch = 64;
  step.input = 1024;
  step.context = 1032;
  step.stages = {{.stage = "gate/up",
                  .precision = Precision::kFp8W8A8,
                  .us = 750,
                  .calls = 32,
                  .weight_bytes = 3e9,
                  .activation_bytes = 5e8,
                  .flops = 4e11,
                  .share_of_limit = 0.9,
                  .limited_by_memory = false},
                 {.stage = "sample", .us = 250, .calls = 1, .activation_bytes = 2e7}};
  return step;
}

TEST(StepBreakdownForm, Json) {
  const nlohmann::ordered_json json = to_json(example());
  EXPECT_EQ(json["us"], 1000);
  ASSERT_EQ(json["stages"].size(), 2u);
  EXPECT_EQ(json["stages"][0].dump(),
            R"({"stage":"gate/up","precision":"fp8-w8a8","us":750.0,"calls":32.0,"weight_bytes":3000000000.0,)"
            R"("activation_bytes":500000000.0,"kv_bytes":0.0,"flops":400000000000.0,"share_of_limit":0.9,)"
            R"("limited_by":"arithmetic"})");
  EXPECT_FALSE(json["stages"][1].contains("share_of_limit"));
  EXPECT_FALSE(json["stages"][1].contains("precision"));
}

TEST(StepBreakdownForm, Table) {
  EXPECT_EQ(to_text(example()),
            "decode fp8-w8a8 batch 64 input 1024: 1000 us in all\n"
            "  stage                    precision  calls         us  share         MB      GFLOP  of its limit\n"
            "  gate/up                  fp8-w8a8      32      750.0  75.0%   3500.000    400.000  90% of arithmetic\n"
            "  sample                                  1      250.0  25.0%     20.000      0.000");
}

}  // namespace
}  // namespace nfp
