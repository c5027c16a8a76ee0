#include "io/convert.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <random>

#include "io/inspect.h"
#include "io/shard_set.h"
#include "io/staged_directory.h"
#include "io/testing/model_files.h"
#include "nested/format.h"

namespace nfp {
namespace {

using testing::files_of;
using testing::random_tensor;
using testing::set_weight;
using testing::TestTensor;
using testing::tiny_model;
using testing::write_model;

constexpr const char* kQ = "model.layers.0.self_attn.q_proj.weight";
constexpr const char* kV = "model.layers.0.self_attn.v_proj.weight";

class Convert : public testing::ScratchTest {
 protected:
  std::unique_ptr<ModelSource> open(const std::string& name) {
    auto source = ModelSource::open(path(name));
    EXPECT_TRUE(source.ok()) << source.error().message;
    return source.ok() ? std::move(source).value() : nullptr;
  }
  Result<ConvertReport> convert_dir(const std::string& from, const std::string& to,
                                    const ConvertOptions& options = {}) {
    auto source = ModelSource::open(path(from));
    if (!source.ok()) return std::move(source).error();
    return convert(**source, path(to), options, threads_);
  }
  Result<RestoreReport> restore_dir(const std::string& from, const std::string& to,
                                    const ConvertOptions& options = {}) {
    auto source = ModelSource::open(path(from));
    if (!source.ok()) return std::move(source).error();
    return restore(**source, path(to), options, threads_);
  }
  nlohmann::json json(const std::string& name) { return nlohmann::json::parse(read_text_file(path(name)).value()); }
  ThreadPool threads_{3};
};

// Of an FP32 tensor.
void set_value(TestTensor& tensor, int64_t row, int64_t col, float value) {
  std::memcpy(tensor.bytes.data() + 4 * (row * tensor.shape[1] + col), &value, sizeof(value));
}

// Every tensor of a model: name -> dtype and bytes.
std::map<std::string, std::pair<DType, std::string>> tensors_of(const ModelSource& source) {
  std::map<std::string, std::pair<DType, std::string>> out;
  for (const TensorInfo& t : source.tensors()) {
    std::string bytes(t.bytes(), '\0');
    EXPECT_TRUE(source.read_rows(t, 0, t.rows(), reinterpret_cast<std::byte*>(bytes.data())).ok()) << t.name;
    out[t.name] = {t.dtype, std::move(bytes)};
  }
  return out;
}

std::vector<uint16_t> fp16_of(const MatrixReader& reader) {
  std::vector<uint16_t> out(static_cast<size_t>(reader.rows() * reader.cols()));
  EXPECT_TRUE(reader.read_fp16(0, reader.rows(), out.data()).ok());
  return out;
}

TEST_F(Convert, Fp16ComesBackBitForBit) {
  for (size_t shards : {1u, 3u}) {
    for (uint64_t limit : {uint64_t{1} << 30, uint64_t{2000}}) {
      write_model(path("src"), tiny_model(DType::kF16), shards);
      ConvertOptions options;
      options.shard_bytes = limit;
      auto done = convert_dir("src", "nested", options);
      ASSERT_TRUE(done.ok()) << done.error().message;
      EXPECT_EQ(done->nested, 7);
      EXPECT_TRUE(done->dense.empty());
      auto back = restore_dir("nested", "back", options);
      ASSERT_TRUE(back.ok()) << back.error().message;
      EXPECT_TRUE(tensors_of(*open("src")) == tensors_of(*open("back")));
      EXPECT_TRUE(json("src/config.json") == json("back/config.json"));
      EXPECT_EQ(entries(), (std::vector<std::string>{"back", "nested", "src"}));
      for (const char* name : {"src", "nested", "back"}) std::filesystem::remove_all(path(name));
    }
  }
}

TEST_F(Convert, Bf16ComesBackBitForBitWhereItWasExact) {
  auto tensors = tiny_model(DType::kBF16);
  for (int64_t col = 0; col < 4; ++col) set_weight(tensors[5], 7, col, fp32_to_bf16(0x1.02p-40f));  // v_proj
  write_model(path("src"), tensors, 2);
  auto done = convert_dir("src", "nested");
  ASSERT_TRUE(done.ok()) << done.error().message;
  auto back = restore_dir("nested", "back");
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_NE(std::find(back->inexact.begin(), back->inexact.end(), kV), back->inexact.end());
  EXPECT_EQ(json("nested/config.json")["nestedfp"]["source_dtype"], "BF16");
  const auto one = tensors_of(*open("src"));
  const auto two = tensors_of(*open("back"));
  for (const auto& [name, tensor] : one) {
    const bool inexact = std::find(back->inexact.begin(), back->inexact.end(), name) != back->inexact.end();
    EXPECT_EQ(two.at(name) == tensor, !inexact) << name;
  }
  // Nothing more is lost the second time.
  ASSERT_TRUE(convert_dir("back", "again").ok());
  ASSERT_TRUE(restore_dir("again", "twice").ok());
  EXPECT_TRUE(tensors_of(*open("back")) == tensors_of(*open("twice")));
}

TEST_F(Convert, WhatFp16ChangesOfFp32IsTold) {
  auto tensors = tiny_model(DType::kF32);
  for (TestTensor& tensor : tensors) {
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      for (int64_t col = 0; tensor.shape.rank() == 2 && col < tensor.shape[1]; ++col) {
        set_value(tensor, row, col, 0.5f);
      }
    }
  }
  set_value(tensors[5], 7, 1, 0.5f + 0x1p-13f);  // v_proj
  set_value(tensors[6], 1, 0, 5.0f);             // o_proj stays dense ...
  set_value(tensors[6], 1, 1, 0x1.8p-24f);       // ... and is not exact either
  write_model(path("src"), tensors);
  auto report = inspect(*open("src"), threads_, {});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_TRUE(report->f32.present);
  EXPECT_EQ(report->f32.inexact, 2);
  EXPECT_EQ(report->f32.largest_error, 0x1p-13f);
  EXPECT_FALSE(report->bf16.present);
  auto done = convert_dir("src", "nested");
  ASSERT_TRUE(done.ok()) << done.error().message;
  auto back = restore_dir("nested", "back");
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(back->inexact, (std::vector<std::string>{"model.layers.0.self_attn.o_proj.weight", kV}));

  set_value(tensors[5], 7, 1, 1e5f);
  write_model(path("large"), tensors);
  auto large = convert_dir("large", "not");
  ASSERT_FALSE(large.ok());
  EXPECT_NE(large.error().message.find("row 7, column 1 is 100000, beyond FP16"), std::string::npos)
      << large.error().message;
}

TEST_F(Convert, ProgressIsOfTheReadingToo) {
  write_model(path("src"), tiny_model(DType::kF16));
  ConvertOptions options;
  std::map<std::string, uint64_t> done;
  options.progress = [&](const Progress& progress) {
    EXPECT_LE(progress.done, progress.total);
    auto& last = done[std::string(progress.what)];
    EXPECT_GE(progress.done, last);
    last = progress.done;
  };
  auto report = convert_dir("src", "nested", options);
  ASSERT_TRUE(report.ok());
  EXPECT_GT(done["reading"], 0u);
  EXPECT_EQ(done["converting"], report->bytes);
}

TEST_F(Convert, RoutersStayDenseInOtherEngines) {
  auto tensors = tiny_model(DType::kF16);
  tensors.push_back(random_tensor("model.layers.0.mlp.gate.weight", DType::kF16, {4, 32}, 21));
  tensors.push_back(random_tensor("model.layers.0.mlp.shared_expert_gate.weight", DType::kF16, {1, 32}, 22));
  write_model(path("src"), tensors);
  ASSERT_TRUE(convert_dir("src", "nested").ok());
  const auto ignore = json("nested/config.json")["quantization_config"]["ignore"];
  EXPECT_EQ(ignore, (nlohmann::json{"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate", "lm_head"}));
}

TEST_F(Convert, OtherEnginesFindACompressedTensorsModel) {
  auto tensors = tiny_model(DType::kF16);
  set_weight(tensors[6], 1, 0, 0x4500);  // o_proj: 5 ...
  set_weight(tensors[6], 1, 1, 0x0001);  // ... and a weight that no exponent keeps
  write_model(path("src"), tensors);
  auto done = convert_dir("src", "nested");
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(done->dense, std::vector<std::string>{"model.layers.0.self_attn.o_proj.weight"});
  const auto config = json("nested/config.json");
  EXPECT_EQ(config["hidden_size"], 32);
  const auto& quantization = config["quantization_config"];
  EXPECT_EQ(quantization["quant_method"], "compressed-tensors");
  EXPECT_EQ(quantization["format"], "float-quantized");
  EXPECT_EQ(quantization["ignore"], (nlohmann::json{"model.layers.0.self_attn.o_proj", "lm_head"}));
  EXPECT_EQ(quantization["config_groups"]["group_0"]["targets"], nlohmann::json{"Linear"});
  // Uppers times scales are the FP8 model; with the lowers they are the original.
  auto uppers = ShardSet::open(path("nested"), "model");
  ASSERT_TRUE(uppers.ok()) << uppers.error().message;
  const SafetensorsEntry* upper = uppers->find(kQ);
  const SafetensorsEntry* scale = uppers->find(std::string(kQ) + "_scale");
  ASSERT_TRUE(upper != nullptr && scale != nullptr);
  EXPECT_EQ(upper->dtype, DType::kF8E4M3);
  EXPECT_EQ(scale->shape, (Shape{32, 1}));
  for (size_t i = 0; i < tensors[2].bytes.size() / 2; ++i) {
    uint16_t w = 0;
    float s = 0;
    std::memcpy(&w, tensors[2].bytes.data() + 2 * i, 2);
    std::memcpy(&s, uppers->bytes(*scale).data() + 4 * (i / 32), 4);
    const float value = e4m3_to_fp32(static_cast<uint8_t>(uppers->bytes(*upper)[static_cast<size_t>(i)])) * s;
    EXPECT_NEAR(value, fp16_to_fp32(w), std::max(std::abs(fp16_to_fp32(w)) * 0.0626f, s * 0x1p-10f));
  }
  for (const SafetensorsEntry* entry : uppers->entries()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(uppers->bytes(*entry).data()) % size_of(entry->dtype), 0u) << entry->name;
  }
}

TEST_F(Convert, AGroupThatEnginesFuseIsNestedOrDenseAsAWhole) {
  const std::string layer = "model.layers.0.";
  const std::vector<std::string> group = {layer + "self_attn.q_proj.weight", layer + "self_attn.k_proj.weight",
                                          layer + "self_attn.v_proj.weight"};
  auto tensors = tiny_model(DType::kF16);
  set_weight(tensors[4], 1, 0, 0x4500);  // k_proj: 5, and
  set_weight(tensors[4], 1, 1, 0x0001);  // a weight that no exponent keeps
  set_weight(tensors[8], 2, 0, 0x4500);  // up_proj
  set_weight(tensors[8], 2, 1, 0x0001);
  write_model(path("src"), tensors);
  auto done = convert_dir("src", "nested");
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(done->nested, 2);  // o_proj and down_proj
  EXPECT_EQ(std::set<std::string>(done->dense.begin(), done->dense.end()),
            (std::set<std::string>{group[0], group[1], group[2], layer + "mlp.gate_proj.weight",
                                   layer + "mlp.up_proj.weight"}));
  EXPECT_EQ(
      done->dense_with,
      (std::map<std::string, std::string>{
          {group[0], group[1]}, {group[2], group[1]}, {layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"}}));
  for (const std::string& name : group) {
    const auto source = open("nested");
    ASSERT_NE(source->find(name), nullptr);
    EXPECT_EQ(source->find(name)->dtype, DType::kF16) << name;
  }
  auto back = restore_dir("nested", "back");
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_TRUE(tensors_of(*open("src")) == tensors_of(*open("back")));
}

TEST_F(Convert, ANestedCheckpointReadsAsItsSource) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    write_model(path("src"), tiny_model(dtype));
    ASSERT_TRUE(convert_dir("src", "nested").ok());
    auto source = open("src");
    auto nested = open("nested");
    EXPECT_EQ(nested->kind(), SourceKind::kNested);
    ASSERT_EQ(source->tensors().size(), nested->tensors().size());
    for (const TensorInfo& t : source->tensors()) {
      ASSERT_TRUE(nested->has(t.name));
      if (t.shape.rank() != 2) continue;
      auto a = source->matrix(t.name, threads_);
      auto b = nested->matrix(t.name, threads_);
      ASSERT_TRUE(a.ok() && b.ok());
      ASSERT_EQ((*a)->storage(), Storage::kNested);
      ASSERT_EQ((*b)->storage(), Storage::kNested);
      const auto size = static_cast<size_t>(t.shape.elements());
      std::vector<uint8_t> upper[2], lower[2];
      std::vector<int8_t> exponent[2];
      int i = 0;
      for (const MatrixReader* reader : {a->get(), b->get()}) {
        upper[i].resize(size);
        lower[i].resize(size);
        exponent[i].resize(static_cast<size_t>(t.rows()));
        ASSERT_TRUE(reader->read_nested(0, t.rows(), upper[i].data(), lower[i].data(), exponent[i].data()).ok());
        ++i;
      }
      EXPECT_EQ(upper[0], upper[1]);
      EXPECT_EQ(lower[0], lower[1]);
      EXPECT_EQ(exponent[0], exponent[1]);
      EXPECT_EQ(fp16_of(**a), fp16_of(**b));
    }
    std::filesystem::remove_all(path("src"));
    std::filesystem::remove_all(path("nested"));
  }
}

TEST_F(Convert, RandomLayoutsRoundTrip) {
  std::mt19937 random(20250601);
  const auto below = [&](uint32_t limit) { return static_cast<int64_t>(random() % limit); };
  for (int round = 0; round < 12; ++round) {
    std::vector<TestTensor> tensors;
    for (const char* name : {"layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "norm", "layers.0.mlp.up_proj",
                             "layers.0.mlp.down_proj", "embed_tokens"}) {
      const DType dtype = below(2) == 0 ? DType::kF16 : DType::kBF16;
      const float sigmas[] = {0.02f, 0.5f, 4.0f};
      tensors.push_back(random_tensor(fmt::format("model.{}.weight", name), dtype, {1 + below(20), 1 + below(40)},
                                      static_cast<uint32_t>(random()), sigmas[below(3)]));
    }
    write_model(path("src"), tensors, static_cast<size_t>(1 + below(3)));
    ConvertOptions options;
    options.shard_bytes = static_cast<uint64_t>(100 + below(4000));
    auto done = convert_dir("src", "nested", options);
    ASSERT_TRUE(done.ok()) << done.error().message;
    auto back = restore_dir("nested", "back", options);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(tensors_of(*open("src")) == tensors_of(*open("back")), back->inexact.empty()) << round;
    for (const char* name : {"src", "nested", "back"}) std::filesystem::remove_all(path(name));
  }
}

TEST_F(Convert, AFilterLaysOtherUppersOver) {
  struct Other final : MatrixReader {
    explicit Other(std::unique_ptr<MatrixReader> r) : reader(std::move(r)) {}
    int64_t rows() const override { return reader->rows(); }
    int64_t cols() const override { return reader->cols(); }
    Storage storage() const override { return reader->storage(); }
    const std::string& name() const override { return reader->name(); }
    bool uppers_restricted() const override { return false; }
    Status read_fp16(int64_t f, int64_t c, uint16_t* out) const override { return reader->read_fp16(f, c, out); }
    Status read_nested(int64_t f, int64_t c, uint8_t* u, uint8_t* l, int8_t* e) const override {
      NFP_RETURN_IF_ERROR(reader->read_nested(f, c, u, l, e));
      for (int64_t i = 0; i < c * cols(); ++i) u[i] = other_neighbour(join(u[i], l[i]));
      return ok_status();
    }
    std::unique_ptr<MatrixReader> reader;
  };
  write_model(path("src"), tiny_model(DType::kF16));
  ConvertOptions options;
  options.calibration = R"({"rule": "free"})";
  options.uppers = UpperRule::kFree;
  auto plain = open("src");
  options.matrix = [&](const std::string& tensor) -> Result<std::unique_ptr<MatrixReader>> {
    NFP_ASSIGN_OR_RETURN(auto matrix, plain->matrix(tensor, threads_));
    if (tensor != kV) return matrix;
    return std::unique_ptr<MatrixReader>(std::make_unique<Other>(std::move(matrix)));
  };
  ASSERT_TRUE(convert_dir("src", "nested", options).ok());
  EXPECT_EQ(json("nested/config.json")["nestedfp"]["uppers"], "free");
  EXPECT_EQ(json("nested/config.json")["nestedfp"]["calibration"]["rule"], "free");
  auto nested = open("nested");
  auto reader = nested->matrix(kV, threads_);
  ASSERT_TRUE(reader.ok());
  EXPECT_FALSE((*reader)->uppers_restricted());
  ASSERT_TRUE(restore_dir("nested", "back").ok());
  EXPECT_TRUE(tensors_of(*plain) == tensors_of(*open("back")));
}

TEST_F(Convert, GgufBecomesANestedCheckpointWithItsTokenizer) {
  using testing::GgufBuilder;
  ASSERT_TRUE(write_file(path("m.gguf"), testing::tiny_gguf()).ok());
  auto source = open("m.gguf");
  ASSERT_NE(source, nullptr);
  ASSERT_TRUE(convert(*source, path("nested"), {}, threads_).ok());
  ASSERT_TRUE(restore_dir("nested", "back").ok());
  for (const char* name : {"nested", "back"}) {
    auto other = open(name);
    ASSERT_NE(other, nullptr);
    ASSERT_NE(other->gguf_tokenizer(), nullptr);
    EXPECT_EQ(other->gguf_tokenizer()->tokens, source->gguf_tokenizer()->tokens);
    EXPECT_EQ(other->gguf_tokenizer()->bos, source->gguf_tokenizer()->bos);
    for (const TensorInfo& t : source->tensors()) {
      const TensorInfo* found = other->find(t.name);
      ASSERT_NE(found, nullptr) << t.name;
      EXPECT_EQ(found->dtype, t.dtype);
      std::vector<std::byte> a(t.bytes()), b(t.bytes());
      ASSERT_TRUE(source->read_rows(t, 0, t.rows(), a.data()).ok());
      ASSERT_TRUE(other->read_rows(*found, 0, t.rows(), b.data()).ok());
      EXPECT_EQ(a, b) << t.name;
    }
  }
}

TEST_F(Convert, WhatIsThereStaysUnlessForced) {
  write_model(path("src"), tiny_model(DType::kF16));
  ASSERT_TRUE(convert_dir("src", "nested").ok());
  const auto before = files_of(path("nested"));
  auto again = convert_dir("src", "nested");
  ASSERT_FALSE(again.ok());
  EXPECT_NE(again.error().message.find("--force"), std::string::npos);
  EXPECT_TRUE(files_of(path("nested")) == before);
  ConvertOptions force;
  force.force = true;
  EXPECT_TRUE(convert_dir("src", "nested/", force).ok());
  EXPECT_TRUE(files_of(path("nested")) == before);
  EXPECT_FALSE(convert_dir("src", "src", force).ok());              // the source itself
  EXPECT_FALSE(convert(*open("src"), dir_, force, threads_).ok());  // its parent
  std::filesystem::create_directory(path("other"));
  ASSERT_TRUE(write_file(path("other/precious"), "x").ok());
  EXPECT_FALSE(convert_dir("src", "other", force).ok());
  ASSERT_TRUE(write_file(path("file"), "x").ok());
  EXPECT_FALSE(convert_dir("src", "file", force).ok());
  EXPECT_FALSE(convert_dir("src", "no/such/place", force).ok());
  auto quantised = tiny_model(DType::kF16);
  quantised[2].dtype = DType::kF8E4M3;
  quantised[2].shape = {32, 64};
  write_model(path("src8"), quantised);
  auto twice = convert_dir("src8", "twice");
  ASSERT_FALSE(twice.ok());
  EXPECT_NE(twice.error().message.find("quantised already"), std::string::npos) << twice.error().message;
  std::filesystem::remove_all(path("src8"));
  EXPECT_FALSE(convert_dir("nested", "twice").ok());
  EXPECT_FALSE(restore_dir("src", "twice").ok());
  EXPECT_EQ(entries(), (std::vector<std::string>{"file", "nested", "other", "src"}));
}

TEST_F(Convert, WhatCameMeanwhileStaysUnlessForced) {
  write_model(path("src"), tiny_model(DType::kF16));
  ConvertOptions options;
  options.progress = [&](const Progress&) {
    std::filesystem::create_directory(path("nested"));
    EXPECT_TRUE(write_file(path("nested/precious"), "x").ok());
  };
  auto late = convert_dir("src", "nested", options);
  ASSERT_FALSE(late.ok());
  EXPECT_NE(late.error().message.find("--force"), std::string::npos) << late.error().message;
  EXPECT_EQ(read_text_file(path("nested/precious")).value(), "x");
  EXPECT_EQ(entries(), (std::vector<std::string>{"nested", "src"}));
}

TEST_F(Convert, ALinkStaysAndWhatItLeadsToIsReplaced) {
  write_model(path("src"), tiny_model(DType::kF16));
  std::filesystem::create_directory(path("disk"));
  std::filesystem::create_directory_symlink("disk", path("link"));
  ConvertOptions force;
  force.force = true;
  auto done = convert_dir("src", "link", force);
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_TRUE(std::filesystem::exists(path("disk/config.json")));
  EXPECT_TRUE(convert_dir("src", "disk/.", force).ok());
  EXPECT_FALSE(convert_dir("src", "disk/..", force).ok());  // holds the source
  EXPECT_EQ(entries(), (std::vector<std::string>{"disk", "link", "src"}));
}

TEST_F(Convert, WhatCannotBeReplacedIsRefusedBeforeTheWork) {
  write_model(path("src"), tiny_model(DType::kF16));
  ConvertOptions force;
  force.force = true;
  std::filesystem::create_directory(path("here"));
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(path("here"));
  const Status here = check_convert(*open("src"), ".", force);
  std::filesystem::current_path(before);
  ASSERT_FALSE(here.ok());
  EXPECT_NE(here.error().message.find("current directory"), std::string::npos) << here.error().message;
  const Status mounted = check_convert(*open("src"), "/proc", force);
  ASSERT_FALSE(mounted.ok());
  EXPECT_NE(mounted.error().message.find("mount point"), std::string::npos) << mounted.error().message;
  EXPECT_FALSE(check_convert(*open("src"), path("here"), {}).ok());
  EXPECT_TRUE(check_convert(*open("src"), path("here"), force).ok());
  EXPECT_EQ(entries(), (std::vector<std::string>{"here", "src"}));
}

TEST_F(Convert, AFailureNamesTheTensorAndLeavesNothing) {
  for (const char* name : {kQ, "model.norm.weight"}) {
    auto tensors = tiny_model(DType::kF16);
    for (TestTensor& t : tensors) {
      if (t.name == name) std::memcpy(t.bytes.data() + 10, "\x00\x7e", 2);  // NaN
    }
    write_model(path("src"), tensors);
    auto done = convert_dir("src", "nested");
    ASSERT_FALSE(done.ok());
    EXPECT_NE(done.error().message.find(name), std::string::npos) << done.error().message;
    EXPECT_EQ(entries(), std::vector<std::string>{"src"});
  }
}

TEST_F(Convert, AFullDiskIsAClearErrorAndLeavesNothing) {
  write_model(path("src"), tiny_model(DType::kF16));
  auto source = open("src");
  // A limit on file sizes stands for the full disk: write() fails half-way in the same manner.
  rlimit old = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = old;
  small.rlim_cur = 5000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  auto done = convert(*source, path("nested"), {}, threads_);
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);
  ASSERT_FALSE(done.ok());
  EXPECT_NE(done.error().message.find(path("nested") + "/"), std::string::npos) << done.error().message;
  EXPECT_NE(done.error().message.find("cannot be written"), std::string::npos) << done.error().message;
  EXPECT_EQ(done.error().message.find(".tmp-"), std::string::npos) << done.error().message;
  EXPECT_EQ(entries(), std::vector<std::string>{"src"});
}

TEST_F(Convert, DamagedNestedCheckpointsAreRefused) {
  write_model(path("src"), tiny_model(DType::kF16));
  const auto damaged = [&](const std::string& name, const std::function<void(const std::string&)>& damage,
                           const std::string& naming) {
    ASSERT_TRUE(convert_dir("src", "nested").ok());
    damage(path("nested"));
    auto back = restore_dir("nested", "back");
    ASSERT_FALSE(back.ok()) << name;
    EXPECT_NE(back.error().message.find(naming), std::string::npos) << name << ": " << back.error().message;
    EXPECT_EQ(entries(), (std::vector<std::string>{"nested", "src"})) << name;
    std::filesystem::remove_all(path("nested"));
  };
  const auto overwrite = [](const std::string& file, uint64_t at, const std::string& bytes) {
    std::string text = read_text_file(file).value();
    text.replace(at, bytes.size(), bytes);
    ASSERT_TRUE(write_file(file, text).ok());
  };
  const auto replace = [](const std::string& file, const std::string& from, const std::string& to) {
    std::string text = read_text_file(file).value();
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos);
    ASSERT_TRUE(write_file(file, text.replace(at, from.size(), to)).ok());
  };
  const auto begin_of = [](const std::string& folder, const std::string& single, const std::string& tensor) {
    auto file = MappedFile::open(folder + "/" + single);
    auto header = parse_safetensors(file->bytes(), single);
    for (const SafetensorsEntry& entry : header->tensors) {
      if (entry.name == tensor) return entry.begin;
    }
    return uint64_t{0};
  };
  const std::string main_file = "model-00001-of-00001.safetensors";
  const std::string lower_file = "nestedfp/lower-00001-of-00001.safetensors";
  damaged(
      "no lowers", [](const auto& d) { std::filesystem::remove_all(d + "/nestedfp"); }, "lower");
  damaged(
      "short lowers", [&](const auto& d) { std::filesystem::resize_file(d + "/" + lower_file, 3000); }, lower_file);
  damaged(
      "scale",
      [&](const auto& d) {
        overwrite(d + "/" + main_file, begin_of(d, main_file, std::string(kQ) + "_scale") + 4, std::string(4, '\x3f'));
      },
      "q_proj.weight_scale' holds");
  damaged(
      "NaN upper", [&](const auto& d) { overwrite(d + "/" + main_file, begin_of(d, main_file, kV), "\x7f"); }, kV);
  damaged(
      "version", [&](const auto& d) { replace(d + "/config.json", "\"version\": 1", "\"version\": 9"); },
      "nested format version 9");
  damaged(
      "rule", [&](const auto& d) { replace(d + "/config.json", "nearest", "farther"); }, "'uppers'");
  damaged(
      "renamed lower",
      [&](const auto& d) {
        replace(d + "/" + lower_file, "k_proj.weight_lower", "k_proj.weight_louer");
        replace(d + "/nestedfp/lower.safetensors.index.json", "k_proj.weight_lower", "k_proj.weight_louer");
      },
      "k_proj");
}

TEST_F(Convert, InspectCountsByKind) {
  auto tensors = tiny_model(DType::kF16);
  set_weight(tensors[6], 1, 0, 0x4500);
  set_weight(tensors[6], 1, 1, 0x0001);
  write_model(path("src"), tensors);
  auto source = open("src");
  auto report = inspect(*source, threads_, {});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->total.matrices, 7);
  EXPECT_EQ(report->total.by_paper, 5);
  EXPECT_EQ(report->total.by_exponents, 1);
  EXPECT_EQ(report->total.dense, 1);
  EXPECT_EQ(report->shifted_rows, 2);
  EXPECT_EQ(report->exponents, (std::map<int, int64_t>{{1, 1}, {3, 1}}));
  for (const MatrixReport& m : report->matrices) {
    if (m.name == "model.layers.0.self_attn.o_proj.weight") {
      EXPECT_FALSE(m.nests);
      EXPECT_NE(m.reason.find("row 1: largest |w| 5"), std::string::npos) << m.reason;
      continue;
    }
    EXPECT_GT(m.fp8.relative_error, 0.015) << m.name;
    EXPECT_LT(m.fp8.relative_error, 0.032) << m.name;
  }
  ThreadPool one(1);
  auto again = inspect(*source, one, {});
  ASSERT_TRUE(again.ok());
  for (size_t i = 0; i < again->matrices.size(); ++i) {
    EXPECT_NEAR(again->matrices[i].fp8.relative_error, report->matrices[i].fp8.relative_error, 1e-12);
  }
  ASSERT_TRUE(convert_dir("src", "nested").ok());
  auto nested_source = open("nested");
  auto nested = inspect(*nested_source, threads_, {});
  ASSERT_TRUE(nested.ok()) << nested.error().message;
  EXPECT_EQ(nested->exponents, report->exponents);
}

TEST_F(Convert, TheVerdictTellsOfWhatDoesNotNest) {
  auto tensors = tiny_model(DType::kF16);
  const auto keep_dense = [](TestTensor& tensor) {
    set_weight(tensor, 1, 0, 0x4500);  // 5 ...
    set_weight(tensor, 1, 1, 0x0001);  // ... and a weight that no exponent keeps
  };
  keep_dense(tensors[6]);
  write_model(path("part"), tensors);
  auto part = inspect(*open("part"), threads_, {});
  ASSERT_TRUE(part.ok());
  EXPECT_EQ(part->verdict, Fp8Verdict::kGood);
  EXPECT_NE(part->verdict_text.find("% of the linear layers' weights do not nest"), std::string::npos)
      << part->verdict_text;
  for (TestTensor& tensor : tensors) {
    if (tensor.name.find("proj") != std::string::npos) keep_dense(tensor);
  }
  write_model(path("none"), tensors);
  auto none = inspect(*open("none"), threads_, {});
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->total.dense, none->total.matrices);
  EXPECT_EQ(none->verdict, Fp8Verdict::kPoor);
  EXPECT_NE(none->verdict_text.find("no linear layer nests"), std::string::npos) << none->verdict_text;
}

TEST_F(Convert, NarrowRowsAndPoorModelsAreToldOf) {
  auto tensors = tiny_model(DType::kF16);
  tensors[8] = random_tensor(tensors[8].name, DType::kF16, tensors[8].shape, 3, 0x1p-16f);
  write_model(path("src"), tensors);
  auto report = inspect(*open("src"), threads_, {});
  ASSERT_TRUE(report.ok());
  int64_t narrow = 0;
  for (const MatrixReport& m : report->matrices) narrow += m.fp8.narrow_rows;
  EXPECT_EQ(narrow, 48);
  EXPECT_NE(report->verdict, Fp8Verdict::kGood);
}

TEST(StagedDirectory, TooLittleRoomIsSaidInFittingUnits) {
  const auto staged = StagedDirectory::create("/proc/model", false, "", 5000);  // where nothing is free
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().message, "/proc/model: needs 4.9 KiB, but only 0.0 KiB are free on that disk");
}

}  // namespace
}  // namespace nfp
