// Steps of two launches: what decodes in FP16, prompts beside it in FP8. And the probe that times steps of any shape.
#include <gtest/gtest.h>

#include <map>

#include "eval/step_probe.h"
#include "runtime/loaded_model.h"
#include "tiny_model.h"

namespace nfp {
namespace {

// Steps with prompts beside decoding sequences are computed as told, all others in FP16.
class BesidePolicy final : public PrecisionPolicy {
 public:
  BesidePolicy(Precision precision, bool exact_singles) : precision_(precision), exact_singles_(exact_singles) {}
  std::string name() const override { return "beside"; }
  Precision choose(const StepLoad&) override { return now_; }
  bool plans() const override { return true; }
  StepDecision decide(const StepState& state) override {
    StepDecision decision;
    bool decodes = false, prompts = false;
    for (size_t i = 0; i < state.sequences.size(); ++i) {
      const SequenceState& sequence = state.sequences[i];
      if (!sequence.ready) continue;
      // Prompts first: the engine must put single tokens before them.
      decision.chunks.insert(sequence.missing > 1 ? decision.chunks.begin() : decision.chunks.end(),
                             {i, sequence.missing});
      (sequence.missing > 1 ? prompts : decodes) = true;
    }
    now_ = decision.precision = decodes && prompts ? precision_ : Precision::kFp16;
    decision.fp8_share = is_exact(now_) ? 0.0 : 1.0;
    decision.exact_singles = exact_singles_;
    return decision;
  }

 private:
  Precision precision_;
  bool exact_singles_;
  Precision now_ = Precision::kFp16;
};

struct Watch final : EngineObserver {
  void on_step(const StepRecord& step) override { steps.push_back(step); }
  std::vector<StepRecord> steps;
};

struct Outcome {
  std::map<std::string, std::vector<OutputToken>> tokens, prompts;
  std::vector<StepRecord> steps;
  EngineStats stats;
};

class ExactDecode : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string folder = testing::tiny_model_folder("llama-tied");
    if (folder.empty()) GTEST_SKIP() << "the tiny models were not made (python3 with numpy makes them)";
    LoadedModelOptions options;
    options.threads = 2;
    auto loaded = load(folder, options);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    loaded_ = std::move(*loaded);
  }

  // Two sequences decode; in their second step a prompt with scored tokens comes, and one of a single token.
  Outcome run(Precision precision, bool exact_singles) {
    EngineConfig config;
    config.limits = {.max_sequences = 8, .max_step_tokens = 64};
    config.max_context = 64;
    auto serving = make_engine(*loaded_, config, std::make_unique<BesidePolicy>(precision, exact_singles));
    EXPECT_TRUE(serving.ok());
    Watch watch;
    Engine& engine = *serving->engine;
    engine.set_observer(&watch);
    const auto submit = [&](const char* id, int32_t size, bool scored, PrecisionClass kind) {
      Request request;
      request.id = id;
      for (int32_t i = 0; i < size; ++i) request.prompt.push_back((7 + 31 * i + 5 * id[0]) % 250);
      request.sampling.temperature = 0;
      request.sampling.max_tokens = 3;
      request.sampling.ignore_eos = true;
      request.sampling.logprobs = true;
      request.sampling.top_logprobs = 2;
      if (scored) request.sampling.prompt_logprobs = 3;
      request.precision = kind;
      EXPECT_TRUE(engine.submit(std::move(request)).ok());
    };
    submit("a", 12, false, PrecisionClass::kAuto);
    submit("b", 9, false, PrecisionClass::kExact);
    Outcome outcome;
    for (int step = 0; !engine.idle() && step < 20; ++step) {
      if (step == 1) submit("c", 11, true, PrecisionClass::kAuto), submit("d", 1, false, PrecisionClass::kAuto);
      for (const RequestOutput& output : engine.step()) {
        EXPECT_TRUE(output.error.empty()) << output.error;
        auto& tokens = outcome.tokens[output.id];
        tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
        if (!output.prompt_logprobs.empty()) outcome.prompts[output.id] = output.prompt_logprobs;
      }
    }
    outcome.steps = watch.steps;
    outcome.stats = engine.stats();
    return outcome;
  }

  static void expect_same(const OutputToken& a, const OutputToken& b) {
    EXPECT_EQ(a.token, b.token);
    EXPECT_EQ(a.logprob, b.logprob);
    EXPECT_EQ(a.rank, b.rank);
    ASSERT_EQ(a.top.size(), b.top.size());
    for (size_t i = 0; i < a.top.size(); ++i) EXPECT_EQ(a.top[i].token, b.top[i].token);
  }

  std::unique_ptr<LoadedModel> loaded_;
};

// On the CPU a sequence's results do not depend on what shares its launch, so each part must be bit for bit what a step
// of its precision alone gives.
TEST_F(ExactDecode, SingleTokensAreFp16sAndChunksAreFp8s) {
  const Outcome exact = run(Precision::kFp16, false), apart = run(Precision::kFp8, true);
  Outcome fp8 = run(Precision::kFp8, false);
  for (const char* id : {"a", "b", "d"}) {
    ASSERT_EQ(apart.tokens.at(id).size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      expect_same(apart.tokens.at(id)[i], exact.tokens.at(id)[i]);
      EXPECT_TRUE(is_exact(apart.tokens.at(id)[i].precision));
    }
  }
  expect_same(apart.tokens.at("c")[0], fp8.tokens.at("c")[0]);
  EXPECT_NE(apart.tokens.at("c")[0].logprob, exact.tokens.at("c")[0].logprob);
  EXPECT_FALSE(is_exact(apart.tokens.at("c")[0].precision));
  const auto &scored = apart.prompts.at("c"), &scored_fp8 = fp8.prompts.at("c");
  ASSERT_EQ(scored.size(), 11u);
  for (size_t i = 1; i < scored.size(); ++i) {
    expect_same(scored[i], scored_fp8[i]);
    EXPECT_FALSE(is_exact(scored[i].precision));
  }
  // Counted as computed: the step's other tokens are the 11 of the prompt.
  ASSERT_GE(apart.steps.size(), 2u);
  EXPECT_EQ(apart.steps[1].tokens, 14);
  EXPECT_EQ(apart.steps[1].exact_tokens, 3);
  EXPECT_EQ(apart.stats.tokens_by_precision[static_cast<size_t>(Precision::kFp8)], 11u);
}

TEST_F(ExactDecode, TheProbeTimesStepsOfAnyShape) {
  EngineConfig config;
  config.limits = {.max_sequences = 8, .max_step_tokens = 32};
  config.max_context = 128;
  auto made = StepProbe::create(*loaded_, config, 512);
  ASSERT_TRUE(made.ok()) << made.error().message;
  StepProbe& probe = **made;
  for (const StepTime& shape :
       {StepTime{0, 16}, StepTime{0, 32, 90}, StepTime{0, 0, 0, 8, 60}, StepTime{0, 8, 16, 4, 20}}) {
    for (const StepLevel& level : {StepLevel{Precision::kFp16, 0}, StepLevel{Precision::kFp8, 1}}) {
      ASSERT_TRUE(probe.fits(shape));
      const auto seconds = probe.run(shape, level, 3);
      ASSERT_TRUE(seconds.ok()) << seconds.error().message;
      ASSERT_EQ(seconds->size(), 3u);
      for (const double each : *seconds) EXPECT_GT(each, 0);
    }
  }
  for (const StepTime& shape :
       {StepTime{0, 33}, StepTime{0, 16, 120}, StepTime{0, 0, 0, 9, 8}, StepTime{0, 0, 0, 8, 128}}) {
    EXPECT_FALSE(probe.fits(shape));
    EXPECT_FALSE(probe.run(shape, {Precision::kFp16, 0}, 1).ok());
  }
}

}  // namespace
}  // namespace nfp
