// What must hold on a real model and real text: the demo model (NFP_DEMO_MODEL) over wikitext2-test.txt. Skipped,
// saying so, where either is absent.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/mapped_file.h"
#include "eval/baselines.h"
#include "eval/sequence_runner.h"
#include "runtime/generation.h"
#include "runtime/loaded_model.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;

std::string shared_text() {
  const char* named = std::getenv("NFP_SHARED_DATA");
  const fs::path folder = named != nullptr ? fs::path(named) : fs::path(NFP_SOURCE_DIR) / ".." / "shared" / "data";
  return (folder / "wikitext2-test.txt").string();
}

class Demo : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* named = std::getenv("NFP_DEMO_MODEL");
    if (named == nullptr || !fs::exists(named)) GTEST_SKIP() << "NFP_DEMO_MODEL does not name the demo model";
    model_ = named;
    if (!fs::exists(shared_text())) GTEST_SKIP() << "no " << shared_text() << "; set NFP_SHARED_DATA";
  }
  std::unique_ptr<LoadedModel> load(MatrixFilter filter = {}) {
    LoadedModelOptions options;
    options.filter = std::move(filter);
    auto loaded = nfp::load(model_, options);
    EXPECT_TRUE(loaded.ok()) << loaded.error().message;
    return std::move(loaded).value();
  }
  std::vector<int32_t> tokens(const LoadedModel& loaded, size_t count) {
    const std::string text = read_text_file(shared_text()).value();
    auto ids = loaded.tokenizer->encode(std::string_view(text).substr(0, count * 8), {.parse_special = false});
    EXPECT_TRUE(ids.ok());
    EXPECT_GE(ids->size(), count);
    ids->resize(count);
    return *ids;
  }
  std::string model_;
};

// Sanitizers make a step ten times as slow, and look at the code, not at the text.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kComparedChunks = 1;
#else
constexpr size_t kComparedChunks = 5;
#endif

TEST_F(Demo, NestedWeightsGiveTheLogitsOfPlainFp16BitForBit) {
  const auto nested = load();
  const auto plain = load(dense_filter());
  constexpr int32_t kChunk = 512;
  const auto all = tokens(*nested, kComparedChunks * kChunk);
  auto a = SequenceRunner::create(*nested->model, kChunk, kChunk);
  auto b = SequenceRunner::create(*plain->model, kChunk, kChunk);
  ASSERT_TRUE(a.ok() && b.ok());
  const auto vocab = static_cast<size_t>(nested->config.vocab);
  std::vector<float> of_a(kChunk * vocab), of_b(kChunk * vocab);
  for (size_t chunk = 0; chunk < kComparedChunks; ++chunk) {
    const auto part = std::span(all).subspan(chunk * kChunk, kChunk);
    for (auto* runner : {&*a, &*b}) {
      (*runner)->restart();
      ASSERT_TRUE((*runner)->feed(part, Precision::kFp16).ok());
    }
    ASSERT_TRUE((*a)->logits(0, kChunk, Precision::kFp16, of_a.data()).ok());
    ASSERT_TRUE((*b)->logits(0, kChunk, Precision::kFp16, of_b.data()).ok());
    ASSERT_EQ(std::memcmp(of_a.data(), of_b.data(), of_a.size() * sizeof(float)), 0) << "chunk " << chunk;
  }
}

TEST_F(Demo, ChunkingChangesNothingInAnyPrecision) {
  const auto loaded = load();
  constexpr int32_t kTokens = 96;
  const auto all = tokens(*loaded, kTokens);
  auto runner = SequenceRunner::create(*loaded->model, kTokens, kTokens);
  ASSERT_TRUE(runner.ok());
  const auto vocab = static_cast<size_t>(loaded->config.vocab);
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    std::vector<float> whole(vocab), pieces(vocab);
    (*runner)->restart();
    ASSERT_TRUE((*runner)->feed(all, precision).ok());
    ASSERT_TRUE((*runner)->logits(kTokens - 1, 1, precision, whole.data()).ok());
    for (const int32_t piece : {1, 5, 17, 64}) {
      (*runner)->restart();
      int32_t last = 0;
      for (int32_t done = 0; done < kTokens; done += last) {
        last = std::min(piece, kTokens - done);
        ASSERT_TRUE((*runner)
                        ->feed(std::span(all).subspan(static_cast<size_t>(done), static_cast<size_t>(last)), precision)
                        .ok());
      }
      ASSERT_TRUE((*runner)->logits(last - 1, 1, precision, pieces.data()).ok());
      EXPECT_EQ(std::memcmp(whole.data(), pieces.data(), vocab * sizeof(float)), 0)
          << name_of(precision) << " in pieces of " << piece;
    }
  }
}

// The same request alone and in a crowd, with little KV memory (so that some are preempted) and precision by request.
TEST_F(Demo, AnswersDoNotDependOnTheCompany) {
  const auto loaded = load();
  const char* prompts[] = {"The capital of France is",
                           "Once upon a time there was",
                           "In mathematics, a prime number is",
                           "The first president of the United States was",
                           "Water boils at",
                           "def fibonacci(n):"};
  const auto request = [&](size_t i) {
    Request r;
    r.id = std::to_string(i);
    r.prompt = loaded->tokenizer->encode(prompts[i]).value();
    r.sampling.max_tokens = 24;
    r.sampling.temperature = i % 2 == 0 ? 0.0f : 0.9f;
    r.sampling.seed = 7 + i;
    r.sampling.ignore_eos = true;
    r.sampling.repetition_penalty = i % 3 == 0 ? 1.1f : 1.0f;
    r.precision = PrecisionClass::kExact;
    return r;
  };
  EngineConfig options;
  options.max_context = 64;
  options.limits.max_sequences = 6;
  options.limits.max_step_tokens = 9;
  std::vector<std::string> alone;
  for (size_t i = 0; i < std::size(prompts); ++i) {
    auto serving = make_engine(*loaded, options, std::move(parse_policy("fp16").value()));
    ASSERT_TRUE(serving.ok()) << serving.error().message;
    auto answer = generate(*serving->engine, request(i), {});
    ASSERT_TRUE(answer.ok()) << answer.error().message;
    alone.push_back(answer->text);
  }
  const KvCacheSpec spec = loaded->model->kv_spec(1, options.block_size, options.kv_dtype);
  options.kv_bytes = static_cast<int64_t>(loaded->backend->kv_bytes_per_block(spec)) * 8;
  auto serving = make_engine(*loaded, options, std::move(parse_policy("alternate:2").value()));
  ASSERT_TRUE(serving.ok());
  std::vector<std::string> together(std::size(prompts));
  for (size_t i = 0; i < std::size(prompts); ++i) ASSERT_TRUE(serving->engine->submit(request(i)).ok());
  Request other = request(0);
  other.id = "in fp8";
  other.precision = PrecisionClass::kFast;
  ASSERT_TRUE(serving->engine->submit(std::move(other)).ok());
  while (!serving->engine->idle()) {
    for (const RequestOutput& output : serving->engine->step()) {
      if (output.id != "in fp8") together[std::stoul(output.id)] += output.text;
    }
  }
  EXPECT_EQ(together, alone);
  EXPECT_GT(serving->engine->stats().preemptions, 0u);
  EXPECT_EQ(serving->engine->stats().kv_blocks_used, 0);
}

TEST_F(Demo, PromptLogprobsAreThoseOfTheLogits) {
  const auto loaded = load();
  const auto prompt = tokens(*loaded, 50);
  EngineConfig options;
  options.max_context = 64;
  options.limits.max_step_tokens = 16;
  auto serving = make_engine(*loaded, options, std::move(parse_policy("fp16").value()));
  ASSERT_TRUE(serving.ok());
  Request request;
  request.id = "a";
  request.prompt = prompt;
  request.sampling.max_tokens = 1;
  request.sampling.prompt_logprobs = 3;
  std::vector<OutputToken> scores;
  ASSERT_TRUE(generate(*serving->engine, std::move(request), [&](const RequestOutput& output) {
                if (!output.prompt_logprobs.empty()) scores = output.prompt_logprobs;
              }).ok());
  ASSERT_EQ(scores.size(), prompt.size());
  auto runner = SequenceRunner::create(*loaded->model, 64, 64);
  ASSERT_TRUE(runner.ok());
  ASSERT_TRUE((*runner)->feed(prompt, Precision::kFp16).ok());
  const auto vocab = static_cast<size_t>(loaded->config.vocab);
  std::vector<float> logits(prompt.size() * vocab);
  ASSERT_TRUE((*runner)->logits(0, static_cast<int32_t>(prompt.size()), Precision::kFp16, logits.data()).ok());
  for (size_t i = 1; i < prompt.size(); ++i) {
    const std::span<const float> row(logits.data() + (i - 1) * vocab, vocab);
    double sum = 0;
    const float top = *std::max_element(row.begin(), row.end());
    for (float v : row) sum += std::exp(static_cast<double>(v - top));
    const double expected = row[static_cast<size_t>(prompt[i])] - top - std::log(sum);
    EXPECT_NEAR(scores[i].logprob, expected, 1e-4) << i;
    ASSERT_EQ(scores[i].top.size(), 3u);
    EXPECT_FLOAT_EQ(row[static_cast<size_t>(scores[i].top[0].token)], top);
  }
}

}  // namespace
}  // namespace nfp
