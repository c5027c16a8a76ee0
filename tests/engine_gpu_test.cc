// The engine on a GPU against the CPU's: logits of the tiny models, whole generations, and that nothing depends on how
// a sequence is cut into steps or on who shares them. Needs a Hopper GPU; skips elsewhere.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "backend/devices/devices.h"
#include "base/float_types.h"
#include "runtime/loaded_model.h"
#include "tiny_model.h"
#include "tune/tune_steps.h"

namespace nfp::testing {
namespace {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto backend = make_backend("cuda", {.threads = 1}); !backend.ok()) GTEST_SKIP() << backend.error().message;
  }
};

// Tiny models that the GPU computes: heads of a multiple of 16 features. All families are among them.
std::vector<std::string> models() {
  std::vector<std::string> names;
  std::set<FamilyId> found;
  for (const char* name : all_tiny_models()) {
    if (tiny_model_folder(name).empty()) continue;
    auto model = TinyModel::load(name, "scalar", 1);
    EXPECT_TRUE(model.ok()) << name << ": " << (model.ok() ? "" : model.error().message);
    if (!model.ok() || (*model)->config().head_dim % 16 != 0) continue;
    names.emplace_back(name);
    found.insert((*model)->config().family->id);
  }
  for (const Family& family : families()) EXPECT_TRUE(found.contains(family.id)) << family.architecture;
  return names;
}

std::vector<std::vector<int32_t>> random_sequences(uint32_t seed, int32_t vocab) {
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> sequences;
  for (const size_t length : {size_t{1}, size_t{9}, size_t{33}, size_t{70}, size_t{120}}) {
    auto& sequence = sequences.emplace_back();
    for (size_t i = 0; i < length; ++i) {
      sequence.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
    }
  }
  return sequences;
}

// Of rows of so many logits, but for the `parted` that are the farthest off.
double relative_error(const std::vector<std::vector<float>>& got, const std::vector<std::vector<float>>& want,
                      size_t vocab = 1, size_t parted = 0) {
  std::vector<double> errors;
  double sum = 0;
  for (size_t s = 0; s < want.size(); ++s) {
    EXPECT_EQ(got[s].size(), want[s].size());
    for (size_t i = 0; i < want[s].size(); ++i) {
      const double d = static_cast<double>(got[s][i]) - static_cast<double>(want[s][i]);
      if (i % vocab == 0) errors.push_back(0);
      errors.back() += d * d;
      sum += static_cast<double>(want[s][i]) * static_cast<double>(want[s][i]);
    }
  }
  std::sort(errors.begin(), errors.end());
  errors.resize(errors.size() - parted);
  return std::sqrt(std::accumulate(errors.begin(), errors.end(), 0.0) / sum);
}

// A copy of tiny Gemma 3 (BF16, one file) whose layers add up to hundreds of thousands, as trained ones do.
std::string gemma_beyond_fp16() {
  namespace fs = std::filesystem;
  const fs::path from = tiny_model_folder("gemma3"), to = fs::path(::testing::TempDir()) / "nfp-gemma3-wide";
  fs::remove_all(to);
  fs::copy(from, to);
  std::fstream file(to / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));
  int changed = 0;
  const auto tensors = nlohmann::json::parse(header);
  for (const auto& [name, tensor] : tensors.items()) {
    if (name.find("post_attention_layernorm") == std::string::npos &&
        name.find("post_feedforward_layernorm") == std::string::npos)
      continue;
    const auto begin = tensor["data_offsets"][0].get<uint64_t>(), end = tensor["data_offsets"][1].get<uint64_t>();
    std::vector<uint16_t> weights((end - begin) / 2, fp32_to_bf16(50000.0f));
    file.seekp(static_cast<std::streamoff>(8 + length + begin));
    file.write(reinterpret_cast<const char*>(weights.data()), static_cast<std::streamsize>(end - begin));
    ++changed;
  }
  EXPECT_EQ(changed, 6);
  return to.string();
}

// Gemma 2 and 3 with the heads that trained ones have, and random weights. A config.json each.
std::vector<std::string> models_with_heads_of_256() {
  std::vector<std::string> paths;
  for (const auto& [name, architecture] :
       {std::pair{"gemma2", "Gemma2ForCausalLM"}, {"gemma3_text", "Gemma3ForCausalLM"}}) {
    const auto folder = std::filesystem::path(::testing::TempDir()) / fmt::format("nfp-{}-256", name);
    std::filesystem::create_directories(folder);
    paths.push_back((folder / "config.json").string());
    std::ofstream(paths.back()) << fmt::format(
        R"({{"architectures": ["{}"], "model_type": "{}", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "query_pre_attn_scalar": 256,
            "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 512, "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"]}})",
        architecture, name);
  }
  return paths;
}

// FP16 activations are rounded about eight times a layer (2^-11 each at most, a third of it in the mean), and the
// errors add as a random walk; layers here are few, so four times that bounds what a residual stream makes of it.
TEST_F(GpuTest, LogitsOfTheTinyModelsAreTheCpus) {
  std::vector<std::string> names = models();
  ASSERT_FALSE(names.empty());
  names.push_back(gemma_beyond_fp16());
  for (const std::string& name : names) {
    auto cpu = TinyModel::load(name, "scalar", 2), gpu = TinyModel::load(name, "cuda", 2);
    ASSERT_TRUE(cpu.ok() && gpu.ok()) << name << ": " << (gpu.ok() ? "" : gpu.error().message);
    const auto sequences = random_sequences(1, (*cpu)->config().vocab);
    const double roundings = 8.0 * (*cpu)->config().layers + 3;
    const auto exact = (*cpu)->run(sequences, one_by_one(sequences), Precision::kFp16, DType::kF16);
    ASSERT_TRUE(exact.ok());
    for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
      const auto want = (*cpu)->run(sequences, one_by_one(sequences), precision, DType::kF16);
      const auto got = (*gpu)->run(sequences, one_by_one(sequences), precision, DType::kF16);
      ASSERT_TRUE(want.ok() && got.ok()) << name << (got.ok() ? "" : got.error().message);
      const bool experts = (*cpu)->config().experts.count > 0;
      // Where a router's logits of two experts are nearer to each other than what FP16 makes of them, the token may go
      // to either: fewer than one of a hundred here, each of which would be most of the error.
      size_t tokens = 0;
      for (const auto& sequence : sequences) tokens += sequence.size();
      const size_t parted = experts ? tokens / 100 : 0;
      const double error = relative_error(*got, *want, static_cast<size_t>((*cpu)->config().vocab), parted);
      // In FP8 a rounding (2^-4) that falls on the other side of a tie is rare but large, and the two round at
      // different places where a stacked weight has a dense part: what must agree is the distance from the exact
      // logits.
      const bool rounded = precision == Precision::kFp8W8A8;
      const double bound = !rounded ? 4 * std::sqrt(roundings) * 0x1p-11 : relative_error(*want, *exact);
      if (rounded) {
        EXPECT_LT(relative_error(*got, *exact), 1.25 * bound) << name;
      }
      // (Experts keep 16-bit activations on a GPU: nearer to the exact logits, and so as far from the CPU's.)
      EXPECT_LT(error, rounded && experts ? 1.5 * bound : bound) << name << " " << name_of(precision);
      printf("%s %s: relative error %.2e (bound %.2e)\n", name.c_str(), std::string(name_of(precision)).c_str(), error,
             bound);
    }
  }
}

// Keys that differ by an FP16 rounding may become different E4M3 numbers: rare but large, so again what must agree is
// the distance from the logits of an FP16 cache.
TEST_F(GpuTest, LogitsOverAnE4m3CacheAreTheCpus) {
  std::vector<std::string> names = models();
  ASSERT_FALSE(names.empty());
  for (std::string& path : models_with_heads_of_256()) names.push_back(std::move(path));
  for (const std::string& name : names) {
    auto cpu = TinyModel::load(name, "scalar", 2), gpu = TinyModel::load(name, "cuda", 2);
    ASSERT_TRUE(cpu.ok() && gpu.ok()) << name << ": " << (gpu.ok() ? "" : gpu.error().message);
    const auto sequences = random_sequences(1, (*cpu)->config().vocab);
    const auto exact = (*cpu)->run(sequences, one_by_one(sequences), Precision::kFp16, DType::kF16);
    const auto want = (*cpu)->run(sequences, one_by_one(sequences), Precision::kFp16, DType::kF8E4M3);
    ASSERT_TRUE(exact.ok() && want.ok()) << name;
    const double rounding = relative_error(*want, *exact);
    for (const Schedule& schedule : {one_by_one(sequences), random_schedule(2, sequences)}) {
      const auto got = (*gpu)->run(sequences, schedule, Precision::kFp16, DType::kF8E4M3);
      ASSERT_TRUE(got.ok()) << name << ": " << got.error().message;
      const double error = relative_error(*got, *want);
      EXPECT_LT(relative_error(*got, *exact), 1.25 * rounding) << name;
      EXPECT_LT(error, rounding) << name;
      printf("%s E4M3 cache: relative error %.2e (rounding the cache: %.2e)\n", name.c_str(), error, rounding);
    }
  }
}

// With the fastest kernels: many short prompts, single tokens and a long prompt's chunks in a step, of which only the
// last tokens go through the last layer.
TEST_F(GpuTest, LastTokensAloneAreTheCpus) {
  for (const std::string& name : models()) {
    auto cpu = TinyModel::load(name, "scalar", 2), gpu = TinyModel::load(name, "cuda fastest", 2);
    ASSERT_TRUE(cpu.ok() && gpu.ok()) << name << ": " << (gpu.ok() ? "" : gpu.error().message);
    const auto sequences = random_sequences(3, (*cpu)->config().vocab);
    const auto vocab = static_cast<ptrdiff_t>((*cpu)->config().vocab);
    const double bound = 4 * std::sqrt(8.0 * (*cpu)->config().layers + 3) * 0x1p-11;
    const auto want = (*cpu)->run(sequences, one_by_one(sequences), Precision::kFp16, DType::kF16);
    ASSERT_TRUE(want.ok()) << want.error().message;
    for (uint32_t seed = 0; seed < 3; ++seed) {
      const Schedule schedule = random_schedule(seed, sequences);
      const auto got = (*gpu)->run(sequences, schedule, Precision::kFp16, DType::kF16, /*last_only=*/true);
      ASSERT_TRUE(got.ok()) << got.error().message;
      std::vector<std::vector<float>> computed(sequences.size()), expected(sequences.size());
      std::vector<ptrdiff_t> end(sequences.size());
      for (const auto& step : schedule) {
        for (const Piece& piece : step) {
          const ptrdiff_t last = (end[piece.sequence] += static_cast<ptrdiff_t>(piece.count)) * vocab;
          const auto append = [&](std::vector<float>& to, const std::vector<float>& from) {
            to.insert(to.end(), from.begin() + last - vocab, from.begin() + last);
          };
          append(computed[piece.sequence], (*got)[piece.sequence]);
          append(expected[piece.sequence], (*want)[piece.sequence]);
        }
      }
      EXPECT_LT(relative_error(computed, expected), bound) << name;
    }
  }
}

TEST_F(GpuTest, CuttingAndCompanyChangeNothingWhereDeterministic) {
  for (const std::string& name : models()) {
    auto gpu = TinyModel::load(name, "cuda", 2);
    ASSERT_TRUE(gpu.ok()) << gpu.error().message;
    const auto sequences = random_sequences(2, (*gpu)->config().vocab);
    for (const Precision precision : {Precision::kFp16, Precision::kFp8W8A8}) {
      const auto whole = (*gpu)->run(sequences, one_by_one(sequences), precision, DType::kF16);
      ASSERT_TRUE(whole.ok());
      double worst = 0;
      for (uint32_t seed = 0; seed < 3; ++seed) {
        const auto cut = (*gpu)->run(sequences, random_schedule(seed, sequences), precision, DType::kF16);
        ASSERT_TRUE(cut.ok()) << cut.error().message;
        worst = std::max(worst, relative_error(*cut, *whole));
      }
      const auto last = (*gpu)->run(sequences, one_by_one(sequences), precision, DType::kF16, /*last_only=*/true);
      ASSERT_TRUE(last.ok()) << last.error().message;
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto vocab = static_cast<ptrdiff_t>((*gpu)->config().vocab);
        EXPECT_TRUE(std::equal((*last)[s].end() - vocab, (*last)[s].end(), (*whole)[s].end() - vocab)) << name;
      }
      printf("%s %s: cut against whole %.2e\n", name.c_str(), std::string(name_of(precision)).c_str(), worst);
      EXPECT_EQ(worst, 0.0) << name << " " << name_of(precision);
    }
  }
}

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
};

// All requests at once through the engine, with graphs, two steps in flight and a precision that changes if `policy`
// says so.
std::map<std::string, Answer> answers(LoadedModel& loaded, const std::vector<std::vector<int32_t>>& prompts,
                                      const char* policy, int32_t at_once, int32_t in_flight, float temperature,
                                      int64_t kv_bytes = int64_t{256} << 20, int32_t drafts = 0) {
  EngineConfig serving;
  serving.max_context = 512;
  serving.limits.max_sequences = at_once;
  serving.limits.max_step_tokens = 96;
  serving.steps_in_flight = in_flight;
  serving.kv_bytes = kv_bytes;
  serving.fp8 = Precision::kFp8W8A8;
  serving.speculative_tokens = drafts;
  serving.speculative_always = true;
  auto engine = make_engine(loaded, serving, std::move(parse_policy(policy).value()));
  EXPECT_TRUE(engine.ok()) << engine.error().message;
  std::map<std::string, Answer> all;
  if (!engine.ok()) return all;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request;
    request.id = std::to_string(i);
    request.prompt = prompts[i];
    request.sampling.temperature = temperature;
    request.sampling.seed = i;
    request.sampling.max_tokens = 48;
    request.sampling.ignore_eos = true;
    request.sampling.logprobs = true;
    EXPECT_TRUE(engine->engine->submit(std::move(request)).ok());
  }
  while (!engine->engine->idle()) {
    for (const RequestOutput& output : engine->engine->step()) {
      EXPECT_NE(output.finish, FinishReason::kError) << output.error;
      for (const OutputToken& token : output.tokens) {
        all[output.id].tokens.push_back(token.token);
        all[output.id].logprobs.push_back(token.logprob);
      }
    }
  }
  EXPECT_EQ(engine->engine->stats().kv_blocks_used, 0);
  if (drafts > 0) {
    const EngineStats stats = engine->engine->stats();
    EXPECT_GT(stats.accepted_tokens, 0u);
    EXPECT_LT(stats.accepted_tokens, stats.drafted_tokens);
    printf("%lu of %lu drafts were right\n", stats.accepted_tokens, stats.drafted_tokens);
  }
  return all;
}

// The demo model (NFP_DEMO_MODEL), or a tiny one where it is absent.
std::unique_ptr<LoadedModel> load_model_on(const char* device, bool deterministic) {
  const char* named = std::getenv("NFP_DEMO_MODEL");
  LoadedModelOptions options;
  options.device = device;
  options.deterministic = deterministic;
  const bool demo = named != nullptr && std::filesystem::exists(named);
  auto loaded = nfp::load(demo ? named : tiny_model_folder("llama-tied"), options);
  EXPECT_TRUE(loaded.ok()) << loaded.error().message;
  return loaded.ok() ? std::move(loaded).value() : nullptr;
}

std::vector<std::vector<int32_t>> prompts_for(const LoadedModel& loaded, size_t count) {
  std::mt19937 random(5);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < count; ++i) {
    auto& prompt = prompts.emplace_back();
    for (size_t t = 0; t < 3 + random() % 150; ++t) {
      prompt.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(loaded.config.vocab)));
    }
  }
  return prompts;
}

// Graphs, running ahead and padding change nothing, greedy or drawn: the same kernels get the same numbers.
TEST_F(GpuTest, RunningAheadAndGraphsGiveTheSameTokens) {
  auto gpu = load_model_on("cuda", true);
  ASSERT_NE(gpu, nullptr);
  const auto prompts = prompts_for(*gpu, 12);
  for (const float temperature : {0.0f, 0.8f}) {
    const auto one = answers(*gpu, prompts, "fp16", 7, 1, temperature),
               two = answers(*gpu, prompts, "fp16", 7, 2, temperature);
    for (const auto& [id, answer] : one) {
      EXPECT_EQ(answer.tokens.size(), 48u);
      EXPECT_EQ(answer.tokens, two.at(id).tokens) << id;
      EXPECT_EQ(answer.logprobs, two.at(id).logprobs) << id;
    }
  }
}

// Verified in one step, keys of which are written in it, a token has the bits that a step of its own gives it.
TEST_F(GpuTest, DraftsChangeNothingWhereDeterministic) {
  auto gpu = load_model_on("cuda", true);
  ASSERT_NE(gpu, nullptr);
  const auto prompts = prompts_for(*gpu, 12);
  for (const float temperature : {0.0f, 0.8f}) {
    const auto plain = answers(*gpu, prompts, "fp16", 7, 1, temperature);
    for (const int32_t drafts : {1, 3, 8}) {
      const auto drafted = answers(*gpu, prompts, "fp16", 7, 2, temperature, int64_t{256} << 20, drafts);
      for (const auto& [id, answer] : plain) {
        EXPECT_EQ(answer.tokens, drafted.at(id).tokens) << id << " with " << drafts;
        EXPECT_EQ(answer.logprobs, drafted.at(id).logprobs) << id << " with " << drafts;
      }
    }
  }
}

// With the fastest kernels, attention reads keys before the kernel ahead of it has ended, but not those that it writes:
// a token's log-probability is then as near to that of the token's own step as two runs' of other company.
TEST_F(GpuTest, DraftsOfTheFastestKernelsAreVerifiedByTheStepsOwnKeys) {
  auto gpu = load_model_on("cuda", false);
  ASSERT_NE(gpu, nullptr);
  const auto prompts = prompts_for(*gpu, 12);
  for (const int32_t at_once : {1, 7}) {
    const auto plain = answers(*gpu, prompts, "fp16", at_once, 1, 0.0f);
    const auto drafted = answers(*gpu, prompts, "fp16", at_once, 1, 0.0f, int64_t{256} << 20, 4);
    double worst = 0;
    size_t same = 0, all = 0;
    for (const auto& [id, answer] : plain) {
      const Answer& other = drafted.at(id);
      ASSERT_EQ(answer.tokens.size(), other.tokens.size());
      all += answer.tokens.size();
      for (size_t t = 0; t < answer.tokens.size() && answer.tokens[t] == other.tokens[t]; ++t, ++same) {
        worst = std::max(worst, static_cast<double>(std::fabs(answer.logprobs[t] - other.logprobs[t])));
      }
    }
    printf("%d at once: %zu of %zu tokens before the first other one, log-probabilities within %.4f\n", at_once, same,
           all, worst);
    EXPECT_LT(worst, 0.05);
    EXPECT_GT(same, all / 2);
  }
}

// Greedy answers are the CPU's up to ties that rounding decides: where they part, both tokens are about as likely.
TEST_F(GpuTest, GreedyAnswersAreTheCpusUpToTies) {
  auto gpu = load_model_on("cuda", false), cpu = load_model_on("cpu", false);
  ASSERT_TRUE(gpu != nullptr && cpu != nullptr);
  const auto prompts = prompts_for(*gpu, 16);
  const auto want = answers(*cpu, prompts, "fp16", 8, 1, 0.0f), got = answers(*gpu, prompts, "fp16", 8, 2, 0.0f);
  int parted = 0;
  for (const auto& [id, answer] : want) {
    const Answer& other = got.at(id);
    for (size_t t = 0; t < answer.tokens.size(); ++t) {
      // Greedy: the likeliest token's log-probability, whichever it is.
      EXPECT_NEAR(answer.logprobs[t], other.logprobs[t], 0.06) << id << " token " << t;
      if (answer.tokens[t] == other.tokens[t]) continue;
      ++parted;  // texts differ from here on
      break;
    }
  }
  printf("%d of %zu greedy answers part from the CPU's at a tie\n", parted, want.size());
  EXPECT_LE(parted, 8);
}

// Preemption and a precision that flips at every step: everything ends, nothing leaks.
TEST_F(GpuTest, SurvivesPreemptionAndFlips) {
  auto gpu = load_model_on("cuda", false);
  ASSERT_NE(gpu, nullptr);
  const KvCacheSpec spec = gpu->model->kv_spec(1, 16, DType::kF16);
  const auto blocks = static_cast<int64_t>(gpu->backend->kv_bytes_per_block(spec)) * 40;  // 640 tokens
  const auto all = answers(*gpu, prompts_for(*gpu, 24), "alternate:1", 12, 2, 0.7f, blocks);
  EXPECT_EQ(all.size(), 24u);
  for (const auto& [id, answer] : all) EXPECT_EQ(answer.tokens.size(), 48u) << id;
}

TEST_F(GpuTest, TunesStepsOfConfigurations) {
  for (const char* name : {"llama-tied", "mixtral"}) {
    const std::string folder = tiny_model_folder(name);
    if (folder.empty()) continue;
    const auto config = read_tuned_config(folder);
    ASSERT_TRUE(config.ok()) << config.error().message;
    TuneStepsOptions options;
    options.modes = {cuda::Mode::kF16, cuda::Mode::kE4M3, cuda::Mode::kW8A16};
    options.tokens = {1, 24};
    if (config->max_context >= 384) options.tokens.push_back(384);  // a prompt
    options.checked = {5, 50};
    options.candidates = 3;
    size_t lines = 0;
    options.progress = [&](const std::string&) { ++lines; };
    const auto tuned = tune_steps(folder + "/config.json", options);
    ASSERT_TRUE(tuned.ok()) << name << ": " << tuned.error().message;
    EXPECT_EQ(lines, 3 * (options.tokens.size() + options.checked.size()));
    EXPECT_EQ(tuned->check.lines().size(), 3u);
    const cuda::TuningTable* const table = &tuned->table;
    const int64_t qkv = config->query_features() + 2 * config->kv_features();
    for (const cuda::Mode mode : options.modes) {
      for (const int tokens : options.tokens) {
        EXPECT_TRUE(table->find({tokens, qkv, config->hidden, mode})) << name << " " << tokens;
        EXPECT_TRUE(table->find({tokens, config->hidden, config->query_features(), mode})) << name << " " << tokens;
      }
    }
    const auto again = cuda::TuningTable::parse(table->dump(), "choices");
    ASSERT_TRUE(again.ok()) << again.error().message;
    EXPECT_EQ(again->dump(), table->dump());
    options.tokens = {4096};
    options.checked = {};
    EXPECT_EQ(tune_steps(folder, options).error().code, ErrorCode::kUsage) << "a prompt beyond the context";
  }
}

}  // namespace
}  // namespace nfp::testing
