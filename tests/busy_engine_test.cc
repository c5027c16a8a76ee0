// Requests of all kinds with a model, on the device that NFP_TEST_DEVICE names: in a busy engine, whose KV cache is too
// small, which runs ahead, cuts prompts and changes its precision, exact ones get bit for bit what each gets alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>

#include "backend/devices/devices.h"
#include "base/testing/scratch_folder.h"
#include "engine/testing/allowed_tokens_of.h"
#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"
#include "runtime/loaded_model.h"

namespace nfp::testing::busy {
namespace {

constexpr int32_t kVocab = 300, kContext = 144;

// Random weights.
constexpr const char* kConfig =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 300,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 2, "torch_dtype": "float16"})";

// Allows a fifth of the tokens, by those before, and ends after some; is not ready now and then, if told so.
class Fifth final : public TokenConstraint {
 public:
  Fifth(int32_t tokens, bool slow) : left_(tokens), slow_(slow) {}
  bool ready(std::chrono::microseconds) override { return !slow_ || random_() % 3 == 0; }
  bool fill(std::span<uint32_t> mask) override {
    for (int32_t v = 0; v < kVocab; ++v) {
      if (allows(v)) mask[static_cast<size_t>(v / 32)] |= 1u << (v % 32);
    }
    return true;
  }
  bool accept(int32_t token) override {
    if (!allows(token)) return false;
    state_ = state_ * 31 + static_cast<uint32_t>(token);
    --left_;
    return true;
  }

 private:
  bool allows(int32_t token) const {
    if (left_ <= 0 || token <= 2) return left_ <= 0 && token == 2;
    return (static_cast<uint32_t>(token) * 2654435761u ^ state_) % 5 == 0;
  }
  uint32_t state_ = 1;
  int32_t left_;
  bool slow_;
  std::mt19937 random_;
};

struct Asked {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  std::vector<int32_t> allowed_ids;
  std::vector<std::vector<int32_t>> bad_words;
  Pooling pooling = Pooling::kNone;
  bool prompt_only = false;
  int32_t grammar = 0;  // tokens
  int32_t priority = 0;

  Request request(std::string id, bool slow) const {
    Request r;
    r.id = std::move(id);
    r.prompt = prompt;
    r.sampling = sampling;
    if (!allowed_ids.empty() || !bad_words.empty()) {
      r.sampling.allowed = allowed_tokens_of(kVocab, allowed_ids, bad_words);
    }
    r.pooling = pooling;
    r.prompt_only = prompt_only;
    r.precision = PrecisionClass::kExact;
    r.priority = priority;
    if (grammar > 0) r.constraint = std::make_unique<Fifth>(grammar, slow);
    return r;
  }
};

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}
  int32_t below(int32_t limit) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(limit)); }
  bool one_in(int32_t count) { return below(count) == 0; }
  float real() { return static_cast<float>(below(1000)) / 1000; }

 private:
  std::mt19937 random_;
};

Asked any_request(Draw& draw) {
  Asked a;
  const int32_t length = 1 + draw.below(draw.one_in(3) ? 100 : 40), family = draw.below(2);
  // Few beginnings, so that prefixes are shared.
  for (int32_t t = 0; t < length; ++t) a.prompt.push_back(t < 36 ? 5 + family + t % 9 : 3 + draw.below(290));
  SamplingParams& p = a.sampling;
  p.max_tokens = 1 + draw.below(30);
  p.temperature = draw.one_in(3) ? 0.0f : 0.5f + 2 * draw.real();
  p.seed = static_cast<uint64_t>(draw.below(1 << 30));
  if (draw.one_in(3)) p.top_k = 1 + draw.below(50);
  if (draw.one_in(3)) p.top_p = 0.1f + 0.9f * draw.real();
  if (draw.one_in(4)) p.min_p = 0.3f;
  if (draw.one_in(3)) p.repetition_penalty = 1.3f;
  if (draw.one_in(3)) p.presence_penalty = draw.one_in(2) ? 1.5f : -1.0f;
  if (draw.one_in(3)) p.frequency_penalty = 0.7f;
  for (int32_t k = draw.one_in(3) ? 1 + draw.below(20) : 0; k > 0; --k) {
    const float bias = 20 * draw.real() - 10;
    p.logit_bias.emplace_back(draw.below(kVocab), draw.one_in(4) ? -std::numeric_limits<float>::infinity() : bias);
  }
  if (draw.one_in(3)) p.min_tokens = draw.below(*p.max_tokens + 1);
  for (int32_t k = draw.one_in(2) ? 1 + draw.below(40) : 0; k > 0; --k) {
    p.stop_token_ids.push_back(3 + draw.below(290));
  }
  const auto forbid = [&](int32_t most) {
    std::vector<int32_t>& word = a.bad_words.emplace_back();
    for (int32_t n = 1 + draw.below(most); n > 0; --n) word.push_back(3 + draw.below(290));
  };
  if (draw.one_in(4)) {
    for (int32_t k = 100 + draw.below(200); k > 0; --k) a.allowed_ids.push_back(draw.below(kVocab));
  }
  if (draw.one_in(4)) {
    // With hundreds of them many begin with any two tokens.
    const int32_t most = draw.one_in(2) ? 1 : 2;
    for (int32_t k = most == 1 ? 40 : 4000; k > 0; --k) forbid(most);
    if (most == 2) std::erase_if(a.bad_words, [](const auto& word) { return word.size() == 1 && word[0] % 4 != 0; });
  }
  p.logprobs = draw.one_in(2);
  if (p.logprobs) p.top_logprobs = draw.below(6);
  if (draw.one_in(4)) p.prompt_logprobs = draw.below(5);
  p.ignore_eos = draw.one_in(8);
  a.prompt_only = draw.one_in(8);
  if (draw.one_in(8)) {
    a.pooling = draw.one_in(2) ? Pooling::kLast : Pooling::kMean;
  } else if (draw.one_in(4)) {
    a.grammar = 1 + draw.below(20);
  }
  a.priority = draw.below(3) - 1;
  return a;
}

struct Got {
  std::vector<OutputToken> tokens, prompt;
  std::vector<float> embedding;
  std::optional<FinishReason> finish;
};

void take(std::vector<RequestOutput> outputs, std::map<std::string, Got>& got) {
  for (RequestOutput& output : outputs) {
    Got& of = got[output.id];
    std::move(output.tokens.begin(), output.tokens.end(), std::back_inserter(of.tokens));
    std::move(output.prompt_logprobs.begin(), output.prompt_logprobs.end(), std::back_inserter(of.prompt));
    if (output.finish) of.finish = output.finish, of.embedding = std::move(output.embedding);
  }
}

// Whether an answer keeps to its request's allowed_token_ids and bad_words.
bool obeys(const std::vector<OutputToken>& tokens, const Asked& asked) {
  std::vector<int32_t> ids;
  for (const OutputToken& token : tokens) {
    ids.push_back(token.token);
    const auto& allowed = asked.allowed_ids;
    if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), ids.back()) == allowed.end()) return false;
    for (const std::vector<int32_t>& word : asked.bad_words) {
      if (word.back() == ids.back() && ids.size() >= word.size() &&
          std::equal(word.rbegin(), word.rend(), ids.rbegin()))
        return false;
    }
  }
  return true;
}

using Told = std::vector<std::pair<int32_t, uint32_t>>;  // numbers as their bits

Told told(const std::vector<OutputToken>& tokens) {
  Told all;
  for (const OutputToken& token : tokens) {
    all.emplace_back(token.token, std::bit_cast<uint32_t>(token.logprob));
    all.emplace_back(token.rank, 0u);
    for (const TokenLogprob& top : token.top) all.emplace_back(top.token, std::bit_cast<uint32_t>(top.logprob));
  }
  return all;
}

std::unique_ptr<PrecisionPolicy> any_policy(Draw& draw) {
  if (draw.one_in(2)) {
    SloOptions options;
    options.exact_decode = draw.one_in(2);
    auto model = StepModel::fit(synthetic_table());
    return std::move(make_slo_policy(std::move(model).value(), options)).value();
  }
  return std::move(parse_policy(draw.one_in(2) ? "alternate:1" : "fp16", Precision::kFp8W8A8)).value();
}

Result<std::unique_ptr<LoadedModel>> random_model() {
  const ScratchFolder folder;
  std::ofstream(folder.path() + "/config.json") << kConfig;
  LoadedModelOptions options;
  options.device = NFP_TEST_DEVICE;
  options.dummy = true;
  options.deterministic = true;
  options.threads = 1;
  return load(folder.path(), options);
}

TEST(BusyEngine, ExactAnswersAreThoseOfTheRequestAlone) {
  if (auto backend = make_backend(NFP_TEST_DEVICE, {.threads = 1}); !backend.ok()) {
    GTEST_SKIP() << backend.error().message;
  }
  auto loaded = random_model();
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  uint64_t preemptions = 0, hits = 0, drafted = 0, accepted = 0;
  for (uint32_t seed = 0; seed < 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    std::vector<Asked> asked;
    asked.reserve(24);
    for (int i = 0; i < 24; ++i) asked.push_back(any_request(draw));
    EngineConfig config;
    config.max_context = kContext;
    config.kv_blocks = 2 * kContext / config.block_size;
    config.prefix_caching = false;
    config.steps_in_flight = 1;
    std::map<std::string, Got> alone, together;
    {
      auto serving = make_engine(**loaded, config, std::move(parse_policy("fp16")).value());
      ASSERT_TRUE(serving.ok()) << serving.error().message;
      for (size_t i = 0; i < asked.size(); ++i) {
        ASSERT_TRUE(serving->engine->submit(asked[i].request(std::to_string(i), false)).ok());
        while (!serving->engine->idle()) take(serving->engine->step(), alone);
      }
    }
    config.kv_blocks = kContext / config.block_size + draw.below(8);
    config.prefix_caching = !draw.one_in(4);
    config.steps_in_flight = 1 + draw.below(2);
    config.limits.max_sequences = 1 + draw.below(10);
    config.limits.max_step_tokens = config.limits.max_sequences + draw.below(40);
    config.speculative_tokens = draw.one_in(2) ? 1 + draw.below(5) : 0;
    config.speculative_always = true;
    auto serving = make_engine(**loaded, config, any_policy(draw));
    ASSERT_TRUE(serving.ok()) << serving.error().message;
    Engine& engine = *serving->engine;
    for (size_t i = 0; i < asked.size(); ++i) {
      const std::string id = std::to_string(i);
      ASSERT_TRUE(engine.submit(asked[i].request(id, draw.one_in(2))).ok());
      if (draw.one_in(3)) {  // one beside it that need not be exact
        Request other = asked[i].request(id + "b", false);
        other.precision = draw.one_in(2) ? PrecisionClass::kAuto : PrecisionClass::kFast;
        ASSERT_TRUE(engine.submit(std::move(other)).ok());
      }
      for (int32_t steps = draw.below(4); steps > 0; --steps) take(engine.step(), together);
      if (draw.one_in(6)) engine.cancel(std::to_string(draw.below(24)) + "b");
    }
    while (!engine.idle()) take(engine.step(), together);
    EXPECT_EQ(engine.stats().kv_blocks_used, 0);
    preemptions += engine.stats().preemptions;
    hits += engine.stats().prefix_hits;
    drafted += engine.stats().drafted_tokens;
    accepted += engine.stats().accepted_tokens;
    for (size_t i = 0; i < asked.size(); ++i) {
      SCOPED_TRACE(i);
      const Got &want = alone[std::to_string(i)], &got = together[std::to_string(i)];
      EXPECT_EQ(got.finish, want.finish);
      EXPECT_EQ(told(got.tokens), told(want.tokens));
      EXPECT_EQ(told(got.prompt), told(want.prompt));
      EXPECT_EQ(got.embedding, want.embedding);
      EXPECT_TRUE(obeys(got.tokens, asked[i]));
      EXPECT_TRUE(obeys(together[std::to_string(i) + "b"].tokens, asked[i]));
    }
  }
  EXPECT_GT(preemptions, 50u);
  EXPECT_GT(hits, 1000u);
  EXPECT_GT(accepted, 200u);
  EXPECT_GT(drafted, accepted);
}

// Drafts are drawn from the same tokens as what verifies them: else few of them would be right.
TEST(BusyEngine, DraftsKeepToTheTokensThatMayCome) {
  if (auto backend = make_backend(NFP_TEST_DEVICE, {.threads = 1}); !backend.ok()) {
    GTEST_SKIP() << backend.error().message;
  }
  auto loaded = random_model();
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  Asked asked;
  asked.prompt = {5, 6, 7};
  asked.sampling.temperature = 0;
  asked.sampling.max_tokens = 100;
  asked.sampling.ignore_eos = true;
  for (int32_t token = 3; token < 30; ++token) asked.allowed_ids.push_back(token);
  for (int32_t token = 3; token < 30; token += 2) asked.bad_words.push_back({token});
  EngineConfig config;
  config.max_context = kContext;
  config.kv_blocks = kContext / config.block_size;
  config.speculative_tokens = 4;
  config.speculative_always = true;
  auto serving = make_engine(**loaded, config, std::move(parse_policy("fp16")).value());
  ASSERT_TRUE(serving.ok()) << serving.error().message;
  ASSERT_TRUE(serving->engine->submit(asked.request("a", false)).ok());
  std::map<std::string, Got> got;
  while (!serving->engine->idle()) take(serving->engine->step(), got);
  EXPECT_EQ(got["a"].tokens.size(), 100u);
  EXPECT_TRUE(obeys(got["a"].tokens, asked));
  const EngineStats stats = serving->engine->stats();
  EXPECT_GT(stats.accepted_tokens * 2, stats.drafted_tokens);
}

}  // namespace
}  // namespace nfp::testing::busy
