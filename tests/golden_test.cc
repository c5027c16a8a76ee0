// Our models against Hugging Face transformers on tiny random models, and against themselves: however a sequence is cut
// into steps and whoever shares them, its logits are the same bits.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <random>

#include "backend/cpu/cpu_backend.h"
#include "base/float_types.h"
#include "eval/baselines.h"
#include "runtime/loaded_model.h"
#include "tiny_model.h"

namespace nfp::testing {
namespace {

constexpr int kThreads = 2;

struct Case {
  const char* model;
  const char* kernels;  // "" = the best this machine has
};

constexpr std::array kNamedKernels = {"scalar", "avx2", "avx512"};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const char* model : all_tiny_models()) {
    for (const char* kernels : kNamedKernels) cases.push_back({model, kernels});
    cases.push_back({model, ""});
  }
  return cases;
}

std::vector<Case> best_cases() {
  std::vector<Case> cases;
  for (const char* model : all_tiny_models()) cases.push_back({model, ""});
  return cases;
}

// GoogleTest's and CTest's listings show this.
void PrintTo(const Case& c, std::ostream* out) { *out << c.model << ", kernels " << (*c.kernels ? c.kernels : "best"); }

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = std::string(info.param.model) + "_" + (*info.param.kernels ? info.param.kernels : "best");
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class GoldenModelTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (tiny_model_folder(GetParam().model).empty()) {
      GTEST_SKIP() << "the tiny models were not made (numpy is missing); run scripts/test";
    }
    if (auto backend = make_cpu_backend({.threads = 1, .pin = false, .kernels = GetParam().kernels}); !backend.ok()) {
      GTEST_SKIP() << backend.error().message;
    }
    auto golden = read_golden(GetParam().model);
    ASSERT_TRUE(golden.ok()) << golden.error().message;
    golden_ = std::move(golden).value();
    model_ = load();
  }

  static std::unique_ptr<TinyModel> load(MatrixFilter filter = {}) {
    auto model = TinyModel::load(GetParam().model, GetParam().kernels, kThreads, std::move(filter));
    EXPECT_TRUE(model.ok()) << model.error().message;
    return model.ok() ? std::move(model).value() : nullptr;
  }

  std::vector<std::vector<int32_t>> prompts() const {
    std::vector<std::vector<int32_t>> result;
    for (const auto& sequence : golden_.fp16.sequences) result.push_back(sequence.tokens);
    return result;
  }

  std::vector<std::vector<float>> run(TinyModel& model, const std::vector<std::vector<int32_t>>& sequences,
                                      const Schedule& schedule, Precision precision, DType kv = DType::kF32) {
    auto logits = model.run(sequences, schedule, precision, kv);
    EXPECT_TRUE(logits.ok()) << logits.error().message;
    return logits.ok() ? std::move(logits).value() : std::vector<std::vector<float>>(sequences.size());
  }

  void compare(const GoldenPrecision& golden, Precision precision);
  // How far logits of sequence `s` may be from the golden's.
  double tolerance(Precision precision, size_t s) const;

  Golden golden_;
  std::unique_ptr<TinyModel> model_;
};

// Both sides are FP32 forward passes that differ in the order of their sums and in their exp and cos, so each is about
// fp32_error away from the true logits: twice that would do if it were a bound. It is the largest of one
// implementation's errors; four of them on either side leave room for the other's being larger.
//
// BF16 dot products and FP8 steps on AMX round the same inputs as the pass that bf16_error was measured on; once the
// rounding itself, and once for inputs that FP32 noise puts on the other side of a boundary. FP16 multiply-adds round
// sums of up to 64 products to 11 bits, 2^-11 sqrt(64 / 6) of random products' sum, where rounding the inputs to BF16's
// 8 bits gives 2^-9 / sqrt(3): as much, but other roundings than the pass's. FP16 steps on AMX leave out up to 2^-15 of
// each product (kernel_table.h), where rounding the input to BF16 changes it by up to 2^-8: 2^-7 of what it does.
double GoldenModelTest::tolerance(Precision precision, size_t s) const {
  const std::string kernels = model_->backend().info().kernels;
  const double bf16_error = golden_.fp8.sequences[s].bf16_error;
  if (precision == Precision::kFp16) {
    return 8 * golden_.fp16.fp32_error + (kernels == "amx" ? 2 * 0x1p-7 * bf16_error : 0.0);
  }
  const bool narrow = kernels == "avx512bf16" || kernels == "avx512fp16" || kernels == "amx";
  return 8 * golden_.fp8.fp32_error + (narrow ? 2 * bf16_error : 0.0);
}

void GoldenModelTest::compare(const GoldenPrecision& golden, Precision precision) {
  const auto vocab = static_cast<size_t>(model_->config().vocab);
  const auto logits = run(*model_, prompts(), one_by_one(prompts()), precision);
  for (size_t s = 0; s < golden.sequences.size(); ++s) {
    const GoldenSequence& expected = golden.sequences[s];
    const double tolerance = this->tolerance(precision, s);
    const size_t count = expected.tokens.size();
    ASSERT_EQ(logits[s].size(), count * vocab);
    ASSERT_EQ(expected.last_logits.size(), vocab);
    for (size_t v = 0; v < vocab; ++v) {
      ASSERT_NEAR(logits[s][(count - 1) * vocab + v], expected.last_logits[v], tolerance)
          << count << " tokens, logit " << v;
    }
    for (size_t p = 0; p < expected.argmax.size(); ++p) {
      const float* row = &logits[s][p * vocab];
      ASSERT_NEAR(row[expected.argmax[p]], expected.max_logit[p], tolerance) << count << " tokens, position " << p;
      double sum = 0;
      for (size_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<double>(row[v]) - expected.max_logit[p]);
      ASSERT_NEAR(expected.max_logit[p] + std::log(sum), expected.log_sum_exp[p], tolerance)
          << count << " tokens, position " << p;
    }
  }
}

class TinyModelTest : public GoldenModelTest {
 protected:
  void SetUp() override {
    GoldenModelTest::SetUp();
    if (HasFailure() || IsSkipped() || *GetParam().kernels) return;
    const std::string best = model_->backend().info().kernels;
    if (std::find(kNamedKernels.begin(), kNamedKernels.end(), best) != kNamedKernels.end()) {
      GTEST_SKIP() << "the best kernels of this machine are " << best << ", which have a case of their own";
    }
  }
};

TEST_P(TinyModelTest, Fp16LogitsAreThoseOfTransformers) { compare(golden_.fp16, Precision::kFp16); }

TEST_P(TinyModelTest, Fp8LogitsAreThoseOfTransformersWithRoundedWeights) { compare(golden_.fp8, Precision::kFp8); }

// Through the engine: scheduler, paged blocks and the sampler on the device.
TEST_P(TinyModelTest, GreedyContinuationIsThatOfTransformers) {
  LoadedModelOptions load_options;
  load_options.threads = kThreads;
  load_options.cpu_kernels = GetParam().kernels;
  auto loaded = nfp::load(tiny_model_folder(GetParam().model), load_options);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EngineConfig options;
  options.max_context = 128;           // within the original contexts of scaled ropes
  options.limits.max_step_tokens = 5;  // the prompt takes two steps
  options.kv_dtype = DType::kF32;
  for (const Precision precision : {Precision::kFp16, Precision::kFp8}) {
    const GoldenPrecision& golden = precision == Precision::kFp16 ? golden_.fp16 : golden_.fp8;
    auto policy = parse_policy(name_of(precision));
    ASSERT_TRUE(policy.ok()) << policy.error().message;
    auto serving = make_engine(**loaded, options, std::move(policy).value());
    ASSERT_TRUE(serving.ok()) << serving.error().message;
    Request request;
    request.id = "greedy";
    request.prompt = golden.greedy_prompt;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = static_cast<int32_t>(golden.greedy_continuation.size());
    request.sampling.ignore_eos = true;
    const Status submitted = serving->engine->submit(std::move(request));
    ASSERT_TRUE(submitted.ok()) << submitted.error().message;
    std::vector<int32_t> tokens;
    while (!serving->engine->idle()) {
      for (const RequestOutput& output : serving->engine->step()) {
        ASSERT_EQ(output.error, "");
        for (const OutputToken& token : output.tokens) tokens.push_back(token.token);
      }
    }
    EXPECT_EQ(tokens, golden.greedy_continuation) << name_of(precision);
  }
}

// What an embedding is made of: the logits of transformers are the head's product with its hidden states after the
// final norm. A head of full rank and more rows than columns leaves only one vector that gives them.
using PooledTest = GoldenModelTest;
TEST_P(PooledTest, HiddenStatesAreThoseThatGiveTheLogitsOfTransformers) {
  LoadedModelOptions load_options;
  load_options.threads = kThreads;
  load_options.cpu_kernels = GetParam().kernels;
  auto loaded = nfp::load(tiny_model_folder(GetParam().model), load_options);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  const ModelConfig& config = (*loaded)->config;
  const auto hidden = static_cast<size_t>(config.hidden), vocab = static_cast<size_t>(config.vocab);
  ASSERT_GT(vocab, hidden);
  const char* name = config.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
  std::vector<float> head(vocab * hidden);
  const Status read = (*loaded)->source->read_f32(name, head);
  ASSERT_TRUE(read.ok()) << read.error().message;
  if ((*loaded)->source->find(name)->dtype == DType::kF32) {  // the model has FP16 weights
    for (float& weight : head) weight = fp16_to_fp32(fp32_to_fp16(weight));
  }
  for (const int32_t step_tokens : {7, 128}) {
    EngineConfig options;
    options.max_context = 128;
    options.limits.max_sequences = 2;  // hidden states come two at a time
    options.limits.max_step_tokens = step_tokens;
    options.kv_dtype = DType::kF32;
    auto serving = make_engine(**loaded, options, parse_policy("fp16").value());
    ASSERT_TRUE(serving.ok()) << serving.error().message;
    const auto embed = [&](std::span<const int32_t> prompt, Pooling pooling) {
      Request request;
      request.id = "pooled";
      request.prompt.assign(prompt.begin(), prompt.end());
      request.pooling = pooling;
      const Status submitted = serving->engine->submit(std::move(request));
      EXPECT_TRUE(submitted.ok()) << submitted.error().message;
      std::vector<float> embedding;
      while (!serving->engine->idle()) {
        for (RequestOutput& output : serving->engine->step()) {
          EXPECT_EQ(output.error, "");
          embedding = std::move(output.embedding);
        }
      }
      EXPECT_EQ(embedding.size(), hidden);
      embedding.resize(hidden);
      return embedding;
    };
    for (size_t s = 0; s < golden_.fp16.sequences.size(); ++s) {
      const GoldenSequence& expected = golden_.fp16.sequences[s];
      const double near = tolerance(Precision::kFp16, s);
      const std::vector<float> last = embed(expected.tokens, Pooling::kLast);
      for (size_t v = 0; v < vocab; ++v) {
        double logit = 0;
        for (size_t i = 0; i < hidden; ++i) logit += static_cast<double>(head[v * hidden + i]) * last[i];
        logit *= static_cast<double>(config.logit_scale);
        if (config.logit_cap > 0) logit = config.logit_cap * std::tanh(logit / config.logit_cap);
        ASSERT_NEAR(logit, expected.last_logits[v], near) << expected.tokens.size() << " tokens";
      }
    }
    // The mean is that of the last states of all prefixes.
    const std::span<const int32_t> prompt(golden_.fp16.sequences[1].tokens);
    const std::vector<float> mean = embed(prompt, Pooling::kMean);
    std::vector<double> sum(hidden);
    for (size_t count = 1; count <= prompt.size(); ++count) {
      const std::vector<float> last = embed(prompt.first(count), Pooling::kLast);
      for (size_t i = 0; i < hidden; ++i) sum[i] += static_cast<double>(last[i]);
    }
    for (size_t i = 0; i < hidden; ++i) {
      EXPECT_EQ(mean[i], static_cast<float>(sum[i] / static_cast<double>(prompt.size())));
    }
  }
}

TEST_P(TinyModelTest, LogitsDoNotDependOnChunksNorOnTheRestOfTheBatch) {
  const auto sequences = prompts();
  Schedule decode;    // one token of each sequence a step, as long as it lasts
  Schedule together;  // all at once
  Schedule mixed;     // a long prompt in chunks of 13 while the others decode
  together.emplace_back();
  size_t longest = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    together.back().push_back({s, sequences[s].size()});
    longest = std::max(longest, sequences[s].size());
  }
  for (size_t p = 0; p < longest; ++p) {
    decode.emplace_back();
    for (size_t s = 0; s < sequences.size(); ++s) {
      if (p < sequences[s].size()) decode.back().push_back({s, 1});
    }
  }
  for (size_t p = 0; p < longest; p += 13) {
    mixed.push_back({{sequences.size() - 1, std::min<size_t>(13, sequences.back().size() - p)}});
    for (size_t s = 0; s + 1 < sequences.size(); ++s) {
      const size_t done = p / 13;
      if (done < sequences[s].size()) mixed.back().push_back({s, 1});
    }
  }
  const size_t rounds = mixed.size();
  for (size_t s = 0; s + 1 < sequences.size(); ++s) {
    const size_t done = std::min(rounds, sequences[s].size());
    if (done < sequences[s].size()) mixed.push_back({{s, sequences[s].size() - done}});
  }
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    for (const DType kv : {DType::kF32, DType::kF16}) {
      const auto expected = run(*model_, sequences, one_by_one(sequences), precision, kv);
      for (const auto& [name, schedule] :
           {std::pair<const char*, const Schedule&>{"decode", decode}, {"together", together}, {"mixed", mixed}}) {
        const auto actual = run(*model_, sequences, schedule, precision, kv);
        for (size_t s = 0; s < sequences.size(); ++s) {
          ASSERT_EQ(actual[s].size(), expected[s].size());
          EXPECT_EQ(0, std::memcmp(actual[s].data(), expected[s].data(), actual[s].size() * sizeof(float)))
              << name_of(precision) << ", " << name << ", sequence " << s;
        }
      }
    }
  }
}

// Prompts of random lengths cut into random pieces, several sequences' to a step. NFP_TEST_SEED repeats a run.
TEST_P(TinyModelTest, LogitsAreTheSameInRandomChunksAndRaggedBatches) {
  const char* given = std::getenv("NFP_TEST_SEED");
  const uint32_t seed = given != nullptr ? static_cast<uint32_t>(std::stoul(given)) : std::random_device()();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> sequences(2 + random() % 4);
  for (auto& sequence : sequences) {
    sequence.resize(1 + random() % 96);
    for (int32_t& token : sequence) {
      token = static_cast<int32_t>(random() % static_cast<uint32_t>(model_->config().vocab));
    }
  }
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    const DType kv = random() % 2 == 0 ? DType::kF32 : DType::kF16;
    const auto expected = run(*model_, sequences, one_by_one(sequences), precision, kv);
    const auto actual = run(*model_, sequences, random_schedule(random(), sequences), precision, kv);
    for (size_t s = 0; s < sequences.size(); ++s) {
      ASSERT_EQ(actual[s].size(), expected[s].size());
      EXPECT_EQ(0, std::memcmp(actual[s].data(), expected[s].data(), actual[s].size() * sizeof(float)))
          << name_of(precision) << ", sequence " << s << " of " << sequences.size();
    }
  }
}

// Where nobody asks for another token's, the last layer computes the last tokens' hidden states alone: the same bits.
TEST_P(TinyModelTest, LastTokensAloneHaveTheSameLogits) {
  const auto sequences = prompts();
  const auto vocab = static_cast<size_t>(model_->config().vocab);
  Schedule together(1), chunks;
  for (size_t s = 0; s < sequences.size(); ++s) together[0].push_back({s, sequences[s].size()});
  for (size_t p = 0; p < sequences.back().size(); p += 7) {  // beside single tokens of another sequence
    auto& step = chunks.emplace_back();
    if (p / 7 < sequences.front().size()) step.push_back({0, 1});
    step.push_back({sequences.size() - 1, std::min<size_t>(7, sequences.back().size() - p)});
  }
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    for (const Schedule& schedule : {together, chunks}) {
      const auto all = model_->run(sequences, schedule, precision, DType::kF16);
      const auto last = model_->run(sequences, schedule, precision, DType::kF16, /*last_only=*/true);
      ASSERT_TRUE(all.ok() && last.ok());
      std::vector<size_t> ends(sequences.size());
      for (const auto& step : schedule) {
        for (const Piece& piece : step) {
          const size_t end = ends[piece.sequence] += piece.count * vocab;
          ASSERT_EQ(0, std::memcmp(&(*last)[piece.sequence][end - vocab], &(*all)[piece.sequence][end - vocab],
                                   vocab * sizeof(float)))
              << name_of(precision) << ", sequence " << piece.sequence << ", " << end / vocab << " tokens";
        }
      }
    }
  }
}

TEST_P(TinyModelTest, NestedFp16IsBitForBitPlainFp16) {
  // Where BF16 sources are refined by negative row exponents, plain FP16 is not the same matrix.
  if (std::string(GetParam().model) == "llama-headdim") GTEST_SKIP() << "a BF16 source has no one FP16 matrix";
  const auto& fp8 = model_->source().stored_fp8();
  if (fp8 && fp8->by_rows) GTEST_SKIP() << "codes times FP32 scales are no FP16 matrix";
  const auto dense = load(dense_filter());
  ASSERT_NE(dense, nullptr);
  const auto sequences = prompts();
  const auto expected = run(*dense, sequences, one_by_one(sequences), Precision::kFp16);
  const auto actual = run(*model_, sequences, one_by_one(sequences), Precision::kFp16);
  for (size_t s = 0; s < sequences.size(); ++s) {
    ASSERT_EQ(actual[s].size(), expected[s].size());
    EXPECT_EQ(0, std::memcmp(actual[s].data(), expected[s].data(), actual[s].size() * sizeof(float)));
  }
}

TEST_P(TinyModelTest, NestingIsThatOfTheReference) {
  int64_t matrices = 0, by_paper = 0, rows = 0;
  std::vector<std::string> dense;
  for (const TensorInfo& tensor : model_->source().tensors()) {
    const std::string& name = tensor.name;
    const bool expert = name.find(".experts.") != std::string::npos;
    if (!name.ends_with("_proj.weight") && !expert && name != "lm_head.weight") continue;
    MatrixAnalysis analysis;
    auto reader = model_->source().matrix(name, model_->threads(), &analysis);
    ASSERT_TRUE(reader.ok()) << reader.error().message;
    ++matrices;
    by_paper += analysis.nests_by_paper ? 1 : 0;
    rows += std::count_if(analysis.exponents.begin(), analysis.exponents.end(), [](int8_t e) { return e > 0; });
    if (analysis.storage != Storage::kNested) dense.push_back(name);
  }
  EXPECT_EQ(matrices, golden_.matrices);
  EXPECT_EQ(by_paper, golden_.nested_by_paper);
  EXPECT_EQ(rows, golden_.rows_with_exponent);
  EXPECT_EQ(dense, golden_.dense);
}

INSTANTIATE_TEST_SUITE_P(Models, PooledTest, ::testing::ValuesIn(best_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Models, TinyModelTest, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace nfp::testing
