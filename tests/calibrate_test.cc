// Calibration of whole (tiny, random) models: exactness, determinism, going on after an interruption, bad input.
#include "calibrate/calibrate.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <filesystem>
#include <map>

#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "calibrate/activations.h"
#include "engine/model_runner.h"
#include "runtime/loaded_model.h"
#include "tiny_calibration.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;
using testing::logits;

class CalibrateTest : public testing::TinyCalibrationTest {
 protected:
  CalibrateTest() : TinyCalibrationTest("llama-tied") {}

  std::string write(const std::string& name, std::string_view text) const {
    EXPECT_TRUE(write_file(path(name), text).ok());
    return path(name);
  }
  static std::unique_ptr<LoadedModel> load_with(const std::string& model, MatrixFilter filter) {
    LoadedModelOptions options;
    options.threads = 2;
    options.filter = std::move(filter);
    auto loaded = load(model, options);
    EXPECT_TRUE(loaded.ok()) << loaded.error().message;
    return loaded.ok() ? std::move(*loaded) : nullptr;
  }
  static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i)
      sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    return sum;
  }
  static void expect_equal(const Calibration& a, const Calibration& b) {
    ASSERT_EQ(a.choices.size(), b.choices.size());
    for (const auto& [name, choice] : a.choices) {
      ASSERT_TRUE(b.choices.contains(name)) << name;
      EXPECT_EQ(choice->bits, b.choices.find(name)->second->bits) << name;
    }
  }
};

// The errors of the layers before left as they are, or made up for.
class CalibrateBothWaysTest : public CalibrateTest, public ::testing::WithParamInterface<bool> {
 protected:
  CalibrationOptions options(const std::string& cache, int threads = 2) const {
    CalibrationOptions options = CalibrateTest::options(cache, threads);
    options.compensate = GetParam();
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, CalibrateBothWaysTest, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "compensating" : "plain"; });

TEST_P(CalibrateBothWaysTest, Fp16StaysBitForBitAndFp8ComesCloser) {
  const auto calibration = calibrate(model_, options("cache"));
  ASSERT_TRUE(calibration.ok()) << calibration.error().message;
  EXPECT_EQ(calibration->compensated, GetParam());
  EXPECT_EQ(calibration->choices.size(), 14u);  // seven matrices a layer
  const auto plain = load_with(model_, {});
  const auto calibrated = load_with(model_, calibration->filter());
  const auto exact = logits(*plain->model, Precision::kFp16);
  EXPECT_EQ(logits(*calibrated->model, Precision::kFp16), exact);
  EXPECT_LT(distance(logits(*calibrated->model, Precision::kFp8), exact),
            distance(logits(*plain->model, Precision::kFp8), exact));
}

// Every family, every second one with compensation.
class CalibrateEveryModelTest : public CalibrateTest, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, CalibrateEveryModelTest, ::testing::ValuesIn(testing::kTinyModels),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(CalibrateEveryModelTest, Fp16StaysBitForBitCalibratedAndInParts) {
  const auto place = std::find(std::begin(testing::kTinyModels), std::end(testing::kTinyModels), GetParam());
  auto settings = options("cache");
  settings.tokens = 256;
  settings.compensate = (place - std::begin(testing::kTinyModels)) % 2 == 1;
  const std::string model = testing::tiny_model_folder(GetParam());
  const auto calibration = calibrate(model, settings);
  ASSERT_TRUE(calibration.ok()) << calibration.error().message;
  const auto plain = load_with(model, {});
  const auto calibrated = load_with(model, calibration->filter());
  const auto exact = logits(*plain->model, Precision::kFp16);
  EXPECT_EQ(logits(*calibrated->model, Precision::kFp16), exact);
  const auto whole = logits(*calibrated->model, Precision::kFp8);
  EXPECT_NE(whole, exact);
  EXPECT_NE(whole, logits(*plain->model, Precision::kFp8));
  for (const double share : {0.5, 0.0}) {
    const auto reached = set_fp8_share(*calibrated->model, calibration->sensitivities, share);
    ASSERT_TRUE(reached.ok()) << reached.error().message;
    EXPECT_EQ(logits(*calibrated->model, Precision::kFp16), exact);
    const auto part = logits(*calibrated->model, Precision::kFp8);
    EXPECT_NE(part, whole);
    EXPECT_EQ(part == exact, *reached == 0.0);
  }
}

TEST_P(CalibrateBothWaysTest, TheSameForAnyNumberOfThreads) {
  auto one = options("one", 1);
  one.measure_sensitivity = false;
  const auto expected = calibrate(model_, one);
  ASSERT_TRUE(expected.ok()) << expected.error().message;
  for (int threads : {2, 3}) {
    auto more = options("more" + std::to_string(threads), threads);
    more.measure_sensitivity = false;
    const auto got = calibrate(model_, more);
    ASSERT_TRUE(got.ok());
    expect_equal(*expected, *got);
  }
}

TEST_F(CalibrateTest, CompensatingChoosesAsBeforeForTheFirstLayerAlone) {
  auto settings = options("cache");
  settings.measure_sensitivity = false;
  const auto plain = calibrate(model_, settings);
  settings.compensate = true;
  const auto compensated = calibrate(model_, settings);
  ASSERT_TRUE(plain.ok() && compensated.ok());
  // Nothing comes before q, k and v of the first layer: their inputs are exact.
  for (const auto& [name, choice] : plain->choices) {
    const bool first = name.find("layers.0.self_attn") != std::string::npos && name.find("o_proj") == std::string::npos;
    EXPECT_EQ(choice->bits == compensated->choices.find(name)->second->bits, first) << name;
  }
}

TEST_F(CalibrateTest, AForwardEndsBeforeTheLinearLayerThatIsNamed) {
  struct Names final : LinearObserver {
    void on_linear(const Linear& linear, void*, int32_t) override { told.push_back(&linear); }
    void on_error(const Error& error) override { ADD_FAILURE() << error.message; }
    std::vector<const Linear*> told;
  };
  const auto loaded = load_with(model_, {});
  Model& model = *loaded->model;
  std::vector<int32_t> tokens(20);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 37 % 251);
  const auto runner = SequenceRunner::create(model, 20, 20);
  ASSERT_TRUE(runner.ok());
  const auto hidden_after = [&](const LayerRange& layers) {
    (*runner)->restart();
    EXPECT_TRUE((*runner)->feed(tokens, Precision::kFp16, layers).ok());
    std::vector<float> values(tokens.size() * static_cast<size_t>(model.config().hidden));
    EXPECT_TRUE(model.backend().download(values.data(), model.hidden().data(), values.size() * sizeof(float)).ok());
    return values;
  };
  const auto embedded = hidden_after({0, 0, nullptr, nullptr}), whole = hidden_after({0, 1, nullptr, nullptr});
  std::vector<std::vector<float>> seen;
  for (size_t i = 0; i < 4; ++i) {
    Names names;
    const Linear* until = model.linears()[i];
    seen.push_back(hidden_after({0, 1, &names, until}));
    ASSERT_EQ(names.told.size(), i + 1);
    EXPECT_EQ(names.told.back(), until);
  }
  // Only the second (o) and the fourth (down) add to the residual stream.
  EXPECT_EQ(seen[0], embedded);
  EXPECT_EQ(seen[1], embedded);
  EXPECT_NE(seen[2], embedded);
  EXPECT_EQ(seen[3], seen[2]);
  EXPECT_NE(whole, seen[3]);
}

TEST_F(CalibrateTest, ExpertsTellOfTheirRowsAndComputeTheSame) {
  struct Rows final : LinearObserver {
    void on_linear(const Linear& linear, void*, int32_t rows) override { told[&linear] += rows; }
    void on_error(const Error& error) override { ADD_FAILURE() << error.message; }
    std::map<const Linear*, int32_t> told;
  };
  const auto loaded = load_with(testing::tiny_model_folder("qwen2-moe"), {});
  Model& model = *loaded->model;
  std::vector<int32_t> tokens(33);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 37 % 251);
  const auto runner = SequenceRunner::create(model, 33, 33);
  ASSERT_TRUE(runner.ok());
  for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
    const auto hidden_after = [&](const LayerRange& layers) {
      (*runner)->restart();
      EXPECT_TRUE((*runner)->feed(tokens, precision, layers).ok());
      std::vector<float> values(tokens.size() * static_cast<size_t>(model.config().hidden));
      EXPECT_TRUE(model.backend().download(values.data(), model.hidden().data(), values.size() * sizeof(float)).ok());
      return values;
    };
    Rows rows;
    EXPECT_EQ(hidden_after({0, -1, &rows, nullptr}), hidden_after({}));
    std::map<std::pair<int32_t, GemmType>, int32_t> by_layer;
    for (const auto& [linear, count] : rows.told) {
      if (linear->expert >= 0) {
        by_layer[{linear->layer, linear->type}] += count;
      } else {
        EXPECT_EQ(count, 33) << linear->names.front();
      }
    }
    ASSERT_EQ(by_layer.size(), 4u);  // the third layer is dense
    for (const auto& [place, count] : by_layer) EXPECT_EQ(count, 33 * model.config().experts.top);
    // Before an expert's down: all of gate and up were told, and none of the layer's result is there.
    const auto linears = model.linears();
    const auto down = std::find_if(linears.begin(), linears.end(), [](const Linear* linear) {
      return linear->expert == 1 && linear->type == GemmType::kDown;
    });
    ASSERT_NE(down, linears.end());
    Rows until;
    const auto before = hidden_after({0, 1, &until, *down});
    EXPECT_NE(before, hidden_after({0, 1, nullptr, nullptr}));
    for (const auto& [linear, count] : until.told) EXPECT_EQ(linear->layer, 0);
    EXPECT_TRUE(until.told.contains(*down));
  }
}

TEST_P(CalibrateBothWaysTest, ExpertsAreCalibratedEach) {
  const std::string model = testing::tiny_model_folder("qwen2-moe");
  auto settings = options("cache");
  settings.measure_sensitivity = false;
  const auto calibration = calibrate(model, settings);
  ASSERT_TRUE(calibration.ok()) << calibration.error().message;
  // Two layers of six experts and a shared one, three matrices each, but for the one that does not nest; a dense MLP;
  // four matrices of attention in each of three layers.
  EXPECT_EQ(calibration->choices.size(), 2u * 7 * 3 - 1 + 3 + 4 * 3);
  EXPECT_TRUE(calibration->choices.contains("model.layers.1.mlp.experts.5.gate_proj.weight"));
  EXPECT_TRUE(calibration->choices.contains("model.layers.0.mlp.shared_expert.down_proj.weight"));
  const auto plain = load_with(model, {});
  const auto calibrated = load_with(model, calibration->filter());
  const auto exact = logits(*plain->model, Precision::kFp16);
  EXPECT_EQ(logits(*calibrated->model, Precision::kFp16), exact);
  EXPECT_LT(distance(logits(*calibrated->model, Precision::kFp8), exact),
            distance(logits(*plain->model, Precision::kFp8), exact));
}

TEST_F(CalibrateTest, ALayerReadAgainComputesWithItsNewUppers) {
  auto settings = options("cache");
  settings.measure_sensitivity = false;
  const auto calibration = calibrate(model_, settings);
  ASSERT_TRUE(calibration.ok()) << calibration.error().message;
  const auto whole = load_with(model_, calibration->filter());
  const auto loaded = load_with(model_, {});
  const auto linears = loaded->model->linears();
  const auto plain = logits(*loaded->model, Precision::kFp8);
  LoadOptions options;
  options.filter = calibration->filter();
  WeightLoader loader(*loaded->source, *loaded->backend, *loaded->threads, options);
  for (int32_t layer = 0; layer < loaded->config.layers; ++layer) {
    ASSERT_TRUE(loaded->model->reload(layer, loader).ok());
    EXPECT_NE(logits(*loaded->model, Precision::kFp8), plain);
  }
  EXPECT_EQ(loaded->model->linears(), linears);
  EXPECT_EQ(logits(*loaded->model, Precision::kFp8), logits(*whole->model, Precision::kFp8));
}

TEST_F(CalibrateTest, AFileIsCompensatedForAndOwnTextIsNot) {
  CalibrationOptions options;
  EXPECT_FALSE(compensates(options));
  options.text = "a.txt";
  EXPECT_TRUE(compensates(options));
  options.compensate = false;
  EXPECT_FALSE(compensates(options));
}

TEST_P(CalibrateBothWaysTest, GoesOnAfterAnInterruption) {
  const auto source = ModelSource::open(model_);
  ASSERT_TRUE(source.ok());
  EXPECT_FALSE(is_calibrated(**source, options("cache")));
  const auto whole = calibrate(model_, options("cache"));
  ASSERT_TRUE(whole.ok()) << whole.error().message;
  EXPECT_TRUE(is_calibrated(**source, options("cache")));
  CalibrationOptions others = options("cache");
  others.seed = 99;
  EXPECT_FALSE(is_calibrated(**source, others));
  std::string torn, damaged;
  // As if it had been stopped after the first layer, and the order's file had been torn.
  for (const auto& entry : fs::recursive_directory_iterator(path("cache"))) {
    const std::string name = entry.path().filename().string();
    if (name == "layer-0001.bin") fs::remove(entry.path());
    if (name == "order.json") torn = entry.path().string();
  }
  ASSERT_TRUE(write_file(torn, "[{").ok());
  EXPECT_FALSE(is_calibrated(**source, options("cache")));
  const auto again = calibrate(model_, options("cache"));
  ASSERT_TRUE(again.ok()) << again.error().message;
  expect_equal(*whole, *again);
  EXPECT_EQ(whole->to_json(), again->to_json());
  // A layer whose file is damaged is computed again.
  for (const auto& entry : fs::recursive_directory_iterator(path("cache"))) {
    if (entry.path().filename() == "layer-0000.bin") damaged = entry.path().string();
  }
  ASSERT_TRUE(write_file(damaged, "NFPCHOI1").ok());
  const auto repaired = calibrate(model_, options("cache"));
  ASSERT_TRUE(repaired.ok()) << repaired.error().message;
  expect_equal(*whole, *repaired);
  // So is a text that is none of this model's.
  for (const char* text : {"[]", "[[]]", "[[2147483647, 1]]"}) {
    const std::string folder = fs::path(damaged).parent_path().string();
    ASSERT_TRUE(write_file(folder + "/text.json", text).ok());
    ASSERT_TRUE(write_file(folder + "/order.json", "[]").ok());
    const auto rewritten = calibrate(model_, options("cache"));
    ASSERT_TRUE(rewritten.ok()) << rewritten.error().message;
    EXPECT_EQ(whole->to_json(), rewritten->to_json()) << text;
  }
}

TEST_F(CalibrateTest, RestrictedTakesFewerAndAnotherSeedOthers) {
  auto settings = options("cache");
  settings.measure_sensitivity = false;
  const auto free = calibrate(model_, settings);
  settings.rule = UpperRule::kRestricted;
  const auto restricted = calibrate(model_, settings);
  settings.seed = 1;
  const auto seeded = calibrate(model_, settings);
  ASSERT_TRUE(free.ok() && restricted.ok() && seeded.ok());
  const auto taken = [](const Calibration& c) {
    int64_t count = 0;
    for (const auto& [name, choice] : c.choices) {
      for (uint8_t byte : choice->bits) count += std::popcount(byte);
    }
    return count;
  };
  EXPECT_LT(taken(*restricted), taken(*free));
  EXPECT_NE(restricted->choices.begin()->second->bits, seeded->choices.begin()->second->bits);
}

TEST_F(CalibrateTest, OrderHoldsEveryLayerAndItsPrefixesAreTheFp8Set) {
  const auto calibration = calibrate(model_, options("cache"));
  ASSERT_TRUE(calibration.ok()) << calibration.error().message;
  ASSERT_EQ(calibration->sensitivities.size(), 8u);  // q/k/v, o, gate/up and down of two layers
  const auto loaded = load_with(model_, calibration->filter());
  const auto exact = logits(*loaded->model, Precision::kFp16);
  double last = -1;
  for (double share : {0.0, 0.3, 0.7, 1.0}) {
    const auto reached = set_fp8_share(*loaded->model, calibration->sensitivities, share);
    ASSERT_TRUE(reached.ok());
    EXPECT_LE(*reached, share + 1e-9);
    EXPECT_GE(*reached, last);
    last = *reached;
    const auto got = logits(*loaded->model, Precision::kFp8);
    EXPECT_EQ(got == exact, share == 0.0);
  }
  EXPECT_DOUBLE_EQ(last, 1.0);
  auto other = calibration->sensitivities;
  other[0].matrices[0] = "model.layers.9.mlp.down_proj";
  const auto wrong = set_fp8_share(*loaded->model, other, 0.5);
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.error().message.find("model.layers.9.mlp.down_proj"), std::string::npos);
}

TEST_F(CalibrateTest, AStepRunsTheShareOfTheWeightsThatItsPolicyPicked) {
  const auto calibration = calibrate(model_, options("cache"));
  ASSERT_TRUE(calibration.ok()) << calibration.error().message;
  const auto loaded = load_with(model_, calibration->filter());
  ASSERT_TRUE(set_fp8_order(*loaded->model, calibration->sensitivities).ok());
  double last = 0;
  for (const Sensitivity& entry : calibration->sensitivities) {
    for (const Linear* linear : loaded->model->linears()) {
      if (linear->names != entry.matrices) continue;
      EXPECT_GT(linear->fp8_from, last);
      last = linear->fp8_from;
    }
  }
  EXPECT_DOUBLE_EQ(last, 1.0);
  // The same prompt through the engine: graded from 10 to 50 tokens, prompts of 10 (FP16), 30 (half) and 50 tokens.
  const auto first_token_logprob = [&](const char* policy_text, int32_t prompt, double cap) {
    EXPECT_TRUE(set_fp8_share(*loaded->model, calibration->sensitivities, cap).ok());
    EngineConfig serving;
    serving.max_context = 64;
    serving.limits.max_step_tokens = 64;
    auto policy = parse_policy(policy_text);
    EXPECT_TRUE(policy.ok());
    auto engine = make_engine(*loaded, serving, std::move(*policy));
    EXPECT_TRUE(engine.ok());
    Request request;
    request.id = "r";
    for (int32_t i = 0; i < prompt; ++i) request.prompt.push_back(i * 37 % 251);
    request.sampling.max_tokens = 1;
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.logprobs = true;
    EXPECT_TRUE(engine->engine->submit(std::move(request)).ok());
    float logprob = 1;
    while (!engine->engine->idle()) {
      for (const RequestOutput& output : engine->engine->step()) {
        for (const OutputToken& token : output.tokens) logprob = token.logprob;
      }
    }
    return logprob;
  };
  EXPECT_EQ(first_token_logprob("graded:10:50", 10, 1.0), first_token_logprob("fp16", 10, 1.0));
  EXPECT_EQ(first_token_logprob("graded:10:50", 30, 1.0), first_token_logprob("fp8", 30, 0.5));
  EXPECT_NE(first_token_logprob("graded:10:50", 30, 1.0), first_token_logprob("fp8", 30, 1.0));
  EXPECT_NE(first_token_logprob("graded:10:50", 30, 1.0), first_token_logprob("fp16", 30, 1.0));
  EXPECT_EQ(first_token_logprob("graded:10:50", 50, 1.0), first_token_logprob("fp8", 50, 1.0));
}

TEST_F(CalibrateTest, DelayedScalesFollowTheStepsBefore) {
  const auto loaded = load_with(model_, {});
  const Linear& linear = *loaded->model->linears().front();
  const auto count = static_cast<size_t>(linear.weight->k());
  Backend& backend = *loaded->backend;
  auto x = backend.allocate(count * sizeof(float));
  ASSERT_TRUE(x.ok());
  ActivationRanges ranges;
  std::vector<float> ones(count, 1.0f);
  ranges[linear.names.front()].add(ones.data(), static_cast<int64_t>(count));
  ActivationRounder delayed(backend, ActivationScaling::kDelayed, ranges, 1.0);
  ActivationRounder fixed(backend, ActivationScaling::kStatic, ranges, 1.0);
  const auto step = [&](ActivationRounder& rounder, float value) {
    std::vector<float> values(count, value);
    EXPECT_TRUE(backend.upload(x->data(), values.data(), count * sizeof(float)).ok());
    rounder.on_linear(linear, x->data(), 1);
    EXPECT_TRUE(rounder.status().ok());
    EXPECT_TRUE(backend.download(values.data(), x->data(), count * sizeof(float)).ok());
    return values.front();
  };
  EXPECT_FLOAT_EQ(step(delayed, 5.0f), 1.0f);  // the first step has the static scale: clipped
  EXPECT_FLOAT_EQ(step(delayed, 5.0f), 5.0f);  // the second that of the first
  for (int i = 0; i < kDelayedSteps; ++i) step(delayed, 2.0f);
  EXPECT_FLOAT_EQ(step(delayed, 5.0f), 2.0f);  // the largest one is forgotten
  EXPECT_FLOAT_EQ(step(fixed, 5.0f), 1.0f);
  EXPECT_FLOAT_EQ(step(fixed, 5.0f), 1.0f);
}

TEST_F(CalibrateTest, AFullDiskIsAnErrorAndLeavesNothingHalfWritten) {
  // As a full disk: no file may grow over 3 kB. The text's file and the layers' are larger.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 3000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto full = calibrate(model_, options("cache"));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(full.ok());
  EXPECT_NE(full.error().message.find(path("cache")), std::string::npos) << full.error().message;
  for (const auto& entry : fs::recursive_directory_iterator(path("cache"))) {
    EXPECT_TRUE(entry.is_directory()) << entry.path();
  }
  const auto again = calibrate(model_, options("cache"));
  EXPECT_TRUE(again.ok());
}

TEST_F(CalibrateTest, AnotherModelsChoicesAreAnErrorThatNamesTheMatrix) {
  const auto calibration = calibrate(model_, options("cache"));
  ASSERT_TRUE(calibration.ok());
  LoadedModelOptions other;
  other.filter = calibration->filter();
  const auto loaded = load(testing::tiny_model_folder("llama-headdim"), other);
  ASSERT_FALSE(loaded.ok());
  EXPECT_NE(loaded.error().message.find("another model"), std::string::npos) << loaded.error().message;
}

TEST_F(CalibrateTest, TextThatCannotServeIsAnErrorThatNamesIt) {
  const std::pair<std::string, std::string> cases[] = {
      {write("empty.txt", ""), "longer text"},
      {write("short.txt", "Only a few words."), "longer text"},
      {write("bytes.txt", std::string(5000, '\xff')), "not UTF-8"},
      {path("absent.txt"), "absent.txt"},
  };
  for (const auto& [path, part] : cases) {
    auto settings = options("cache");
    settings.text = path;
    bool loads = false;
    settings.progress = [&loads](const Progress& progress) { loads = loads || progress.what == "loading"; };
    const auto result = calibrate(model_, settings);
    ASSERT_FALSE(result.ok()) << path;
    EXPECT_FALSE(loads) << path;
    EXPECT_NE(result.error().message.find(path), std::string::npos) << result.error().message;
    EXPECT_NE(result.error().message.find(part), std::string::npos) << result.error().message;
  }
  EXPECT_FALSE(fs::exists(path("cache")));
}

TEST_F(CalibrateTest, AFileOfTextIsAnotherForAnotherTokenizer) {
  auto settings = options("cache");
  std::string words;
  for (int i = 0; i < 4000; ++i) words += i % 3 == 0 ? "the " : i % 7 == 0 ? "in with " : "what then ";
  settings.text = write("text.txt", words);
  settings.measure_sensitivity = false;
  const std::string other = path("other");
  fs::copy(model_, other);
  const auto first = calibrate(other, settings);
  ASSERT_TRUE(first.ok()) << first.error().message;
  const auto calibrated = [&] {
    const auto source = ModelSource::open(other);
    EXPECT_TRUE(source.ok());
    return is_calibrated(**source, settings);
  };
  EXPECT_TRUE(calibrated());
  // One that cuts "the" in two.
  const auto json = nlohmann::json::parse(*read_text_file(other + "/tokenizer.json"));
  auto changed = json;
  changed["model"]["merges"].erase(1);
  ASSERT_NE(changed, json);
  ASSERT_TRUE(write_file(other + "/tokenizer.json", changed.dump()).ok());
  EXPECT_FALSE(calibrated());
  // What it does not use of the file is no difference.
  changed = json;
  changed["comment"] = "none";
  ASSERT_TRUE(write_file(other + "/tokenizer.json", changed.dump()).ok());
  EXPECT_TRUE(calibrated());
}

TEST_F(CalibrateTest, OwnTextIsAnotherWhereTheTokenizerBeginsItOtherwise) {
  auto settings = options("cache");
  settings.measure_sensitivity = false;
  const std::string other = path("other");
  fs::copy(model_, other);
  const auto calibrated = [&] {
    const auto source = ModelSource::open(other);
    EXPECT_TRUE(source.ok());
    return is_calibrated(**source, settings);
  };
  const auto file = other + "/tokenizer_config.json";
  auto json = nlohmann::json::parse(*read_text_file(file));
  json["tokenizer_class"] = "LlamaTokenizerFast";  // whose add_bos_token counts
  const auto set_bos = [&](bool added) {
    json["add_bos_token"] = added;
    ASSERT_TRUE(write_file(file, json.dump()).ok());
  };
  set_bos(false);
  const auto without = calibrate(other, settings);
  ASSERT_TRUE(without.ok()) << without.error().message;
  EXPECT_TRUE(calibrated());
  set_bos(true);
  EXPECT_FALSE(calibrated());
  const auto with = calibrate(other, settings);
  ASSERT_TRUE(with.ok()) << with.error().message;
  EXPECT_TRUE(calibrated());
  set_bos(false);
  EXPECT_TRUE(calibrated());
}

TEST_F(CalibrateTest, ACacheThatCannotBeWrittenIsAnError) {
  auto settings = options("cache");
  settings.cache = write("file", "not a folder");
  bool works = false;  // for minutes, where the model is large
  settings.progress = [&works](const Progress& progress) {
    works = works || progress.what != "looking for a calibration";
  };
  const auto result = calibrate(model_, settings);
  ASSERT_FALSE(result.ok());
  EXPECT_FALSE(works);
  EXPECT_NE(result.error().message.find(settings.cache), std::string::npos);
}

TEST(SensitivityOrder, ReadsBackAsWrittenAndRefusesAnythingElse) {
  const std::vector<Sensitivity> order = {{{"a", "b"}, 12, 0.5}, {{"c"}, 7, 1e-9}};
  const auto back = sensitivity_from_json(sensitivity_to_json(order), "file");
  ASSERT_TRUE(back.ok());
  ASSERT_EQ(back->size(), 2u);
  EXPECT_EQ((*back)[0].matrices, order[0].matrices);
  EXPECT_EQ((*back)[1].kld, 1e-9);
  for (const char* bad : {"", "{}", "[1]", "[{\"matrices\":[]}]", "[{\"matrices\":[1],\"weights\":1,\"kld\":1}]"}) {
    const auto wrong = sensitivity_from_json(bad, "file");
    ASSERT_FALSE(wrong.ok()) << bad;
    EXPECT_NE(wrong.error().message.find("file"), std::string::npos);
  }
}

}  // namespace
}  // namespace nfp
