// Requests whose activations overflow, on the device that NFP_TEST_DEVICE names: they end with an error that says
// where, and those beside them go on. FP16 overflows between operations on a GPU, FP32 on a CPU.
//
// The models are tiny ones in which one token alone, kTrigger, has a number in one channel of the residual stream,
// kChannel, which no layer adds to; a norm's weight of that channel makes it as large as a case needs.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "backend/devices/devices.h"
#include "base/float_types.h"
#include "base/testing/scratch_folder.h"
#include "engine/engine.h"
#include "policy/policy.h"
#include "runtime/loaded_model.h"
#include "tiny_model.h"

namespace nfp::testing {
namespace {

constexpr std::string_view kDevice = NFP_TEST_DEVICE;
constexpr bool kGpu = kDevice == "cuda";
constexpr int32_t kTrigger = 7;
constexpr size_t kChannel = 3;
constexpr float kInStream = 100.0f;  // so the norm of the trigger's row is nearly sqrt(hidden) = 8 in that channel

struct Matrix {
  size_t rows = 0, columns = 0;  // a norm is one row
  std::vector<float> values;
  float& at(size_t row, size_t column) { return values[row * columns + column]; }
  void fill_row(size_t row, float value) {
    for (size_t i = 0; i < columns; ++i) at(row, i) = value;
  }
  void fill_column(size_t column, float value) {
    for (size_t i = 0; i < rows; ++i) at(i, column) = value;
  }
};
using Edit = std::function<bool(const std::string& name, Matrix&)>;  // false = it was not changed

std::vector<float> widen(const std::string& dtype, const char* bytes, size_t size) {
  std::vector<float> values(size / (dtype == "F32" ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    if (dtype == "F32") {
      std::memcpy(&values[i], bytes + 4 * i, 4);
    } else {
      std::memcpy(&half, bytes + 2 * i, 2);
      values[i] = dtype == "F16" ? fp16_to_fp32(half) : bf16_to_fp32(half);
    }
  }
  return values;
}

// Tensors that are changed become FP32 ones.
void edit_file(const std::filesystem::path& path, const Edit& edit) {
  std::string file;
  {
    std::ifstream in(path, std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(in), {});
  }
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  auto header = nlohmann::json::parse(file.substr(8, length));
  std::string data;
  for (auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = tensor["data_offsets"][0].get<size_t>(), end = tensor["data_offsets"][1].get<size_t>();
    std::string bytes = file.substr(8 + length + begin, end - begin);
    const auto shape = tensor["shape"].get<std::vector<size_t>>();
    Matrix matrix{shape.size() == 2 ? shape[0] : 1, shape.back(), widen(tensor["dtype"], bytes.data(), bytes.size())};
    if (edit(name, matrix)) {
      tensor["dtype"] = "F32";
      bytes.assign(reinterpret_cast<const char*>(matrix.values.data()), matrix.values.size() * sizeof(float));
    }
    tensor["data_offsets"] = {data.size(), data.size() + bytes.size()};
    data += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  length = text.size();
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text << data;
}

enum class Where : uint8_t {
  kActivation,     // of gate and up in the last layer
  kDown,           // the last layer's down product
  kOutput,         // the last layer's o product
  kQuery,          // queries of the last layer, and neither keys nor values
  kFinalNorm,      // what the head reads
  kMiddle,         // as kActivation, in the first layer: the second one's keys see it
  kMiddleOfHeads,  // as kOutput, in the first layer
};

bool ends_with(const std::string& name, std::initializer_list<std::string_view> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](std::string_view e) { return name.ends_with(e); });
}

// Two layers. What a norm's weight makes of the trigger's channel is eight times that weight.
bool plant(Where where, const std::string& name, Matrix& m) {
  if (ends_with(name, {"embed_tokens.weight"})) {
    m.fill_column(kChannel, 0.0f);
    m.at(kTrigger, kChannel) = kInStream;
    return true;
  }
  const bool middle = where == Where::kMiddle || where == Where::kMiddleOfHeads;
  const bool here = name.find(middle ? "layers.0." : "layers.1.") != std::string::npos;
  const bool in_mlp = where == Where::kActivation || where == Where::kDown || where == Where::kMiddle;
  const bool in_heads = where == Where::kOutput || where == Where::kQuery || where == Where::kMiddleOfHeads;
  if (ends_with(name, {"o_proj.weight", "down_proj.weight", "w2.weight"})) {
    const bool sums = here && (in_mlp ? !ends_with(name, {"o_proj.weight"}) : ends_with(name, {"o_proj.weight"}));
    for (size_t row = 0; sums && row < m.rows; ++row) m.fill_row(row, 1.0f);
    m.fill_row(kChannel, 0.0f);
    return true;
  }
  if (where == Where::kFinalNorm && name == "model.norm.weight") {
    m.at(0, kChannel) = kGpu ? 3e4f : 3e38f;
    return true;
  }
  if (!here) return false;
  if (in_mlp && ends_with(name, {"gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"})) {
    m.fill_column(kChannel, 1.0f);
    return true;
  }
  if (in_mlp && ends_with(name, {"post_attention_layernorm.weight"})) {
    // Squared between the matrices, and there no sum overflows; or the sum of all their squares, and no square.
    m.at(0, kChannel) = where == Where::kDown ? (kGpu ? 12.0f : 1e18f) : (kGpu ? 1000.0f : 1e20f);
    return true;
  }
  if (in_heads && ends_with(name, {"q_proj.weight", "k_proj.weight", "v_proj.weight"})) {
    const bool read = ends_with(name, {where == Where::kQuery ? "q_proj.weight" : "v_proj.weight"});
    m.fill_column(kChannel, read ? 1.75f : 0.0f);
    return true;
  }
  if (in_heads && ends_with(name, {"input_layernorm.weight"})) {
    m.at(0, kChannel) = where == Where::kQuery ? 6000.0f : 1000.0f;
    return true;
  }
  return false;
}

struct Case {
  const char* model;
  Where where;
  const char* says;
};

std::vector<Case> cases() {
  // Of keys and values, whatever else is named before them.
  constexpr const char* kSecondLayer = "layer 1: ";
  std::vector<Case> cases = {{"llama-tied", Where::kActivation, "the logits are not finite: in layer 1, the last"},
                             {"llama-tied", Where::kDown, "the logits are not finite: in layer 1, the last"},
                             {"llama-tied", Where::kFinalNorm, "the logits are not finite: in layer 1, the last"},
                             {"llama-tied", Where::kMiddle, kSecondLayer},
                             {"mixtral", Where::kActivation, "the logits are not finite: in layer 1, the last"},
                             {"mixtral", Where::kMiddle, kSecondLayer},
                             // Soft caps, and on a GPU an FP32 stream.
                             {"gemma2", Where::kFinalNorm, "the logits are not finite: in layer "}};
  if (kGpu) {  // values that are FP16 cannot overflow FP32
    cases.push_back({"llama-tied", Where::kOutput, "the logits are not finite: in layer 1, the last"});
    cases.push_back({"llama-tied", Where::kMiddleOfHeads, kSecondLayer});
    cases.push_back({"llama-tied", Where::kQuery, kSecondLayer});
  }
  return cases;
}

struct Answer {
  std::vector<int32_t> tokens;
  std::optional<FinishReason> finish;
  std::string error;
  ErrorCode code{};
};
using Answers = std::map<std::string, Answer>;

struct Counts final : EngineObserver {
  int errors = 0, others = 0;
  void on_finished(const RequestRecord& record) override {
    ++(record.finish == FinishReason::kError ? errors : others);
  }
};

class Overflow : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (auto backend = make_backend(std::string(kDevice), {.threads = 1}); !backend.ok()) {
      GTEST_SKIP() << backend.error().message;
    }
    if (tiny_model_folder(GetParam().model).empty()) GTEST_SKIP() << "the tiny models were not made";
    namespace fs = std::filesystem;
    fs::copy(tiny_model_folder(GetParam().model), scratch_.path(), fs::copy_options::recursive);
    for (const auto& entry : fs::directory_iterator(scratch_.path())) {
      if (entry.path().extension() != ".safetensors") continue;
      edit_file(entry.path(), [](const std::string& name, Matrix& m) { return plant(GetParam().where, name, m); });
    }
  }

  void load_model(bool deterministic) {
    LoadedModelOptions options;
    options.device = kDevice;
    options.deterministic = deterministic;
    options.threads = 2;
    engine_.reset();
    auto loaded = nfp::load(scratch_.path(), options);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    loaded_ = std::move(loaded).value();
  }

  void start(const char* policy, DType kv_dtype = DType::kF16) {
    EngineConfig config;
    config.max_context = 256;
    config.limits.max_sequences = 8;
    config.limits.max_step_tokens = 64;
    config.kv_bytes = int64_t{64} << 20;
    config.kv_dtype = kv_dtype;
    engine_.reset();
    auto engine = make_engine(*loaded_, config, std::move(parse_policy(policy).value()));
    ASSERT_TRUE(engine.ok()) << engine.error().message;
    engine_.emplace(std::move(engine).value());
    counts_ = {};
    engine_->engine->set_observer(&counts_);
  }

  static Request request(std::string id, std::vector<int32_t> prompt) {
    Request r;
    r.id = std::move(id);
    r.prompt = std::move(prompt);
    r.sampling.max_tokens = 24;
    r.sampling.ignore_eos = true;
    r.sampling.temperature = 0;
    r.sampling.logit_bias.emplace_back(kTrigger, -100.0f);
    return r;
  }
  void submit(Request request) { ASSERT_TRUE(engine_->engine->submit(std::move(request)).ok()); }
  void submit_others() {
    for (int32_t i = 0; i < 5; ++i) submit(request("other" + std::to_string(i), {20 + i, 30, 40 + i}));
  }
  void step(Answers& answers) {
    for (const RequestOutput& output : engine_->engine->step()) {
      Answer& answer = answers[output.id];
      for (const OutputToken& token : output.tokens) answer.tokens.push_back(token.token);
      answer.finish = output.finish;
      answer.error = output.error;
      answer.code = output.error_code;
    }
  }
  Answers finish(Answers answers = {}) {
    while (!engine_->engine->idle()) step(answers);
    EXPECT_EQ(engine_->engine->stats().kv_blocks_used, 0);
    EXPECT_FALSE(engine_->engine->device_failure().has_value());
    return answers;
  }
  static void expect_error(const Answer& answer) {
    EXPECT_EQ(answer.finish, FinishReason::kError);
    EXPECT_EQ(answer.code, ErrorCode::kUnsupported);
    EXPECT_NE(answer.error.find(GetParam().says), std::string::npos) << answer.error;
  }
  // Errors of keys end all requests of a step.
  static bool alone() { return std::string_view(GetParam().says).starts_with("the logits"); }

  ScratchFolder scratch_;
  std::unique_ptr<LoadedModel> loaded_;
  std::optional<ServingEngine> engine_;
  Counts counts_;
};

std::vector<const char*> policies() {
  return kGpu ? std::vector<const char*>{"fp16", "fp8", "fp8-w8a8"} : std::vector<const char*>{"fp16", "fp8"};
}

// In a prompt, with log-probabilities of the answer or of the prompt, drawn or not; its hidden state asked for.
TEST_P(Overflow, OfAPromptIsAnError) {
  load_model(false);
  for (const char* policy : policies()) {
    for (const DType kv : {DType::kF16, DType::kF8E4M3}) {
      // Values over 448 are 448 there, and then no sum of them overflows.
      const bool in_heads = GetParam().where == Where::kOutput || GetParam().where == Where::kMiddleOfHeads;
      if (in_heads && kv == DType::kF8E4M3) continue;
      SCOPED_TRACE(std::string(policy) + " " + std::string(nfp::name_of(kv)));
      start(policy, kv);
      for (int kind = 0; kind < 5; ++kind) {
        Request bad = request("bad", {5, 6, kTrigger});
        if (kind == 1) bad.sampling.logprobs = true;
        if (kind == 2) bad.sampling.temperature = 0.7f;
        if (kind == 3) bad.prompt = {5, 6, kTrigger, 8}, bad.sampling.prompt_logprobs = 2;
        if (kind == 4) bad.sampling = {}, bad.pooling = Pooling::kMean;
        submit(std::move(bad));
        const Answers answers = finish();
        EXPECT_TRUE(answers.at("bad").tokens.empty());
        EXPECT_EQ(answers.at("bad").finish, FinishReason::kError) << kind;
        EXPECT_EQ(answers.at("bad").code, ErrorCode::kUnsupported) << kind;
        const std::string says = GetParam().says;
        const std::string hidden = "the hidden states are" + says.substr(std::min(says.size(), says.find(" not")));
        EXPECT_NE(answers.at("bad").error.find(kind == 4 && alone() ? hidden : says), std::string::npos)
            << answers.at("bad").error;
      }
      EXPECT_EQ(counts_.errors, 5);
      submit(request("other", {20, 30}));
      EXPECT_EQ(finish().at("other").finish, FinishReason::kLength);
    }
  }
}

// In a decoded token, among other sequences; on a GPU in a captured step too.
TEST_P(Overflow, OfADecodedTokenIsAnErrorOfItsRequest) {
  for (const bool deterministic : {true, false}) {
    load_model(deterministic);
    for (const char* policy : policies()) {
      SCOPED_TRACE(std::string(policy) + (deterministic ? " deterministic" : ""));
      start(policy);
      submit_others();
      const Answers want = finish();
      start(policy);
      submit_others();
      Answers answers;
      for (int i = 0; i < 8; ++i) step(answers);
      Request bad = request("bad", {5, 6});
      bad.sampling.logit_bias.front().second = 100.0f;
      submit(std::move(bad));
      answers = finish(std::move(answers));
      expect_error(answers.at("bad"));
      if (!alone()) continue;  // found maybe a step early, where two are in flight
      EXPECT_EQ(answers.at("bad").tokens, std::vector<int32_t>{kTrigger});
      EXPECT_EQ(counts_.errors, 1);
      EXPECT_EQ(counts_.others, 5);
      for (const auto& [id, answer] : want) {
        EXPECT_EQ(answers.at(id).finish, FinishReason::kLength) << id << ": " << answers.at(id).error;
        EXPECT_EQ(answers.at(id).tokens.size(), answer.tokens.size()) << id;
        if (deterministic || !kGpu) {
          EXPECT_EQ(answers.at(id).tokens, answer.tokens) << id;
        }
      }
    }
  }
}

class Allows final : public TokenConstraint {
 public:
  explicit Allows(uint32_t each) : each_(each) {}
  bool fill(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), each_);
    return true;
  }
  bool accept(int32_t token) override { return (each_ >> (token % 32) & 1u) != 0; }

 private:
  uint32_t each_;  // word of the mask
};

// What a grammar forbids is not what overflowed; where it forbids all, it says so itself.
TEST_P(Overflow, UnderAGrammar) {
  if (!alone()) return;
  load_model(false);
  start("fp16");
  for (const uint32_t each : {0x55555555u, 0u}) {
    Request bad = request("bad", {5, 6, kTrigger}), other = request("other", {20, 30});
    bad.constraint = std::make_unique<Allows>(0x55555555u);
    other.constraint = std::make_unique<Allows>(each);
    other.sampling.min_tokens = 2;
    submit(std::move(bad));
    submit(std::move(other));
    const Answers answers = finish();
    expect_error(answers.at("bad"));
    EXPECT_EQ(answers.at("other").finish, each != 0 ? FinishReason::kLength : FinishReason::kError);
    EXPECT_EQ(answers.at("other").error.find("finite"), std::string::npos) << answers.at("other").error;
    if (each == 0) {
      EXPECT_NE(answers.at("other").error.find("grammar"), std::string::npos) << answers.at("other").error;
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Case>& of) {
  constexpr std::array kNames = {"activation", "down", "output", "query", "final_norm", "middle", "middle_of_heads"};
  std::string name = std::string(of.param.model) + "_" + kNames[static_cast<size_t>(of.param.where)];
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Of, Overflow, ::testing::ValuesIn(cases()), name_of);

}  // namespace
}  // namespace nfp::testing
