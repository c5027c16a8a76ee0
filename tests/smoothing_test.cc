// Smoothing of whole (tiny, random) models of every kind: FP16 stays bit for bit, FP8 goes on working, and what is kept
// in the cache or written into a checkpoint is the same.
#include "calibrate/smoothing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "base/atomic_file.h"
#include "calibrate/calibrate.h"
#include "io/convert.h"
#include "runtime/loaded_model.h"
#include "tiny_calibration.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;
using testing::logits;

std::unique_ptr<LoadedModel> load_with(const std::string& model, const TensorScalings* scalings,
                                       MatrixFilter filter = {}, const std::string& kernels = "") {
  LoadedModelOptions options;
  options.threads = 2;
  options.cpu_kernels = kernels;
  options.filter = std::move(filter);
  if (scalings != nullptr) options.scalings = std::make_shared<const TensorScalings>(*scalings);
  auto loaded = load(model, options);
  EXPECT_TRUE(loaded.ok()) << loaded.error().message;
  return loaded.ok() ? std::move(*loaded) : nullptr;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return sum;
}

// Channels of very different sizes, so that every exponent goes to its limit.
ChannelMaxima wild_maxima(const Model& model, const std::vector<Linear*>& linears) {
  ChannelMaxima maxima;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 6.0f);
  for (const Linear* linear : linears) {
    if (linear->layer >= model.config().layers) continue;
    auto& channels = maxima[linear->names.front()];
    for (int64_t c = 0; c < linear->weight->k(); ++c) channels.push_back(std::exp2(normal(random)));
  }
  return maxima;
}

class SmoothedModel : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    model_ = testing::tiny_model_folder(GetParam());
    if (model_.empty()) GTEST_SKIP() << "the tiny models were not made (python3 with numpy makes them)";
  }
  std::string model_;
};

TEST_P(SmoothedModel, Fp16StaysBitForBitAtTheLimits) {
  const auto plain = load_with(model_, nullptr);
  ASSERT_NE(plain, nullptr);
  const auto scalings = choose_smoothing(*plain->source, plain->config,
                                         wild_maxima(*plain->model, plain->model->linears()), *plain->threads);
  ASSERT_TRUE(scalings.ok()) << scalings.error().message;
  // Both norms, q, k, v, gate, up (columns and rows) and down of each layer.
  int norms = 0, columns = 0, both = 0, moved = 0;
  for (const auto& [name, scaling] : *scalings) {
    norms += name.find("layernorm") != std::string::npos ? 1 : 0;
    columns += scaling.columns.empty() ? 0 : 1;
    both += !scaling.rows.empty() && !scaling.columns.empty() ? 1 : 0;
    for (int8_t e : scaling.columns) moved += e != 0 ? 1 : 0;
    EXPECT_EQ(name.find("o_proj"), std::string::npos);
  }
  const int layers = plain->config.layers;
  // Norms of (1 + weight) stay, and so does what reads them, or reads no norm; gate and up in one matrix are scaled by
  // columns only.
  const Family& family = *plain->config.family;
  const bool offset = family.norm_offset != 0 || plain->config.reads_stream(), fused = family.has(TensorRole::kGateUp);
  // What a router or experts may read stays as it is: q, k and v are left, and a dense layer's down.
  int dense = 0;
  for (int i = 0; i < layers; ++i) dense += plain->config.has_experts(i) ? 0 : 1;
  const bool experts = dense < layers;
  EXPECT_EQ(norms, offset ? 0 : experts ? layers : 2 * layers);
  const int qkv = family.has(TensorRole::kQueryKeyValue) ? 1 : 3;
  EXPECT_EQ(columns, offset ? layers : experts ? 3 * layers + dense : fused ? (qkv + 1) * layers : 6 * layers);
  EXPECT_EQ(both, offset || fused || experts ? 0 : layers);
  EXPECT_GT(moved, (offset ? 20 : 100) * layers);
  const auto smoothed = load_with(model_, &*scalings);
  ASSERT_NE(smoothed, nullptr);
  const auto plain_scalar = load_with(model_, nullptr, {}, "scalar");
  const auto smoothed_scalar = load_with(model_, &*scalings, {}, "scalar");
  EXPECT_EQ(logits(*smoothed_scalar->model, Precision::kFp16), logits(*plain_scalar->model, Precision::kFp16));
  const auto exact = logits(*plain->model, Precision::kFp16);
  EXPECT_EQ(logits(*smoothed->model, Precision::kFp16), exact);
  for (Precision precision : {Precision::kFp8, Precision::kFp8W8A8}) {
    // Other roundings of the same numbers: of the same size, but not the same.
    const auto before = logits(*plain->model, precision), after = logits(*smoothed->model, precision);
    EXPECT_NE(after, before);
    EXPECT_LT(distance(after, exact), 16 * distance(before, exact));
  }
}

INSTANTIATE_TEST_SUITE_P(All, SmoothedModel, ::testing::ValuesIn(testing::kTinyModels), [](const auto& tested) {
  std::string name = tested.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(SmoothedDemoModel, Fp16StaysBitForBitAtTheLimits) {
  const char* model = std::getenv("NFP_DEMO_MODEL");
  if (model == nullptr || !fs::exists(model)) GTEST_SKIP() << "NFP_DEMO_MODEL does not name the demo model";
  std::vector<float> exact;
  TensorScalings scalings;
  {
    const auto plain = load_with(model, nullptr);
    ASSERT_NE(plain, nullptr);
    exact = logits(*plain->model, Precision::kFp16);
    const auto chosen = choose_smoothing(*plain->source, plain->config,
                                         wild_maxima(*plain->model, plain->model->linears()), *plain->threads);
    ASSERT_TRUE(chosen.ok()) << chosen.error().message;
    scalings = *chosen;
  }
  EXPECT_FALSE(scalings.empty());
  const auto smoothed = load_with(model, &scalings);
  ASSERT_NE(smoothed, nullptr);
  EXPECT_EQ(logits(*smoothed->model, Precision::kFp16), exact);
}

class SmoothedCalibration : public testing::TinyCalibrationTest {
 protected:
  SmoothedCalibration() : TinyCalibrationTest("llama-bias") {}

  CalibrationOptions options(const std::string& cache, int threads = 2) const {
    CalibrationOptions options = TinyCalibrationTest::options(cache, threads);
    options.measure_sensitivity = false;
    options.smooth = true;
    return options;
  }
  std::string kept(const std::string& name) const {
    for (const auto& entry : fs::recursive_directory_iterator(path("cache"))) {
      if (entry.path().filename() == name) return entry.path().string();
    }
    return {};
  }
};

TEST_F(SmoothedCalibration, ChoosesOnTheSmoothedModelAndIsKeptApart) {
  const auto smoothed = calibrate(model_, options("cache"));
  ASSERT_TRUE(smoothed.ok()) << smoothed.error().message;
  ASSERT_NE(smoothed->scalings, nullptr);
  EXPECT_FALSE(smoothed->scalings->empty());
  auto without = options("cache");
  without.smooth = false;
  const auto plain = calibrate(model_, without);
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->scalings, nullptr);
  EXPECT_NE(smoothed->to_json().find("\"smoothed\":true"), std::string::npos);
  EXPECT_NE(plain->to_json().find("\"smoothed\":false"), std::string::npos);

  const auto original = load_with(model_, nullptr);
  const auto uncalibrated = load_with(model_, smoothed->scalings.get());
  const auto calibrated = load_with(model_, smoothed->scalings.get(), smoothed->filter());
  const auto exact = logits(*original->model, Precision::kFp16);
  EXPECT_EQ(logits(*calibrated->model, Precision::kFp16), exact);
  EXPECT_LT(distance(logits(*calibrated->model, Precision::kFp8), exact),
            distance(logits(*uncalibrated->model, Precision::kFp8), exact));
}

TEST_F(SmoothedCalibration, TheSameForAnyNumberOfThreadsAndFromTheCache) {
  const auto expected = calibrate(model_, options("cache", 1));
  ASSERT_TRUE(expected.ok()) << expected.error().message;
  const auto same = [&](const Result<Calibration>& got) {
    ASSERT_TRUE(got.ok()) << got.error().message;
    EXPECT_EQ(*got->scalings, *expected->scalings);
    ASSERT_EQ(got->choices.size(), expected->choices.size());
    for (const auto& [name, choice] : expected->choices) {
      EXPECT_EQ(got->choices.find(name)->second->bits, choice->bits) << name;
    }
  };
  same(calibrate(model_, options("three", 3)));
  same(calibrate(model_, options("cache", 2)));
  // A damaged file is made again.
  ASSERT_FALSE(kept("smoothing.json").empty());
  ASSERT_TRUE(write_file(kept("smoothing.json"), "{\"model").ok());
  same(calibrate(model_, options("cache", 2)));
}

TEST_F(SmoothedCalibration, AConvertedCheckpointIsTheSmoothedModel) {
  const auto made = calibrate(model_, options("cache"));
  ASSERT_TRUE(made.ok()) << made.error().message;
  auto opened = ModelSource::open(model_);
  ASSERT_TRUE(opened.ok());
  auto source = scale_source(std::move(*opened), *made->scalings);
  ASSERT_TRUE(source.ok());
  ThreadPool threads(2);
  ConvertOptions convert_options;
  convert_options.uppers = made->rule;
  convert_options.calibration = made->to_json();
  convert_options.matrix = [&](const std::string& name) -> Result<std::unique_ptr<MatrixReader>> {
    NFP_ASSIGN_OR_RETURN(auto reader, (*source)->matrix(name, threads));
    return made->filter()(name, std::move(reader));
  };
  const std::string nested = path("nested");
  const auto report = convert(**source, nested, convert_options, threads);
  ASSERT_TRUE(report.ok()) << report.error().message;
  const auto original = load_with(model_, nullptr);
  const auto converted = load_with(nested, nullptr);
  const auto loaded = load_with(model_, made->scalings.get(), made->filter());
  ASSERT_TRUE(original && converted && loaded);
  EXPECT_EQ(logits(*converted->model, Precision::kFp16), logits(*original->model, Precision::kFp16));
  EXPECT_EQ(logits(*converted->model, Precision::kFp8), logits(*loaded->model, Precision::kFp8));
}

TEST_F(SmoothedCalibration, ScalingsOfAnotherModelAreAnErrorThatNamesTheTensor) {
  const auto made = calibrate(model_, options("cache"));
  ASSERT_TRUE(made.ok());
  LoadedModelOptions other;
  other.scalings = made->scalings;
  const auto loaded = load(testing::tiny_model_folder("llama-headdim"), other);
  ASSERT_FALSE(loaded.ok());
  EXPECT_NE(loaded.error().message.find("model.layers."), std::string::npos) << loaded.error().message;
}

}  // namespace
}  // namespace nfp
