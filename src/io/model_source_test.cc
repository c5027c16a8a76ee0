#include "io/model_source.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>

#include "base/cpu_topology.h"
#include "io/inspect.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

using testing::random_tensor;
using testing::set_weight;
using testing::tiny_model;
using testing::write_model;

class Source : public testing::ScratchTest {
 protected:
  std::string failure(const std::string& model) {
    auto source = ModelSource::open(model);
    EXPECT_FALSE(source.ok()) << model;
    if (source.ok()) return "";
    EXPECT_EQ(source.error().message.find('\n'), std::string::npos);
    return source.error().message;
  }
  ThreadPool threads_{2};
};

TEST_F(Source, ReadsTensorsInAnyForm) {
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    const auto tensors = tiny_model(dtype);
    write_model(path("m"), tensors, 2);
    auto opened = ModelSource::open(path("m"));
    ASSERT_TRUE(opened.ok()) << opened.error().message;
    const ModelSource& source = **opened;
    EXPECT_EQ(source.tensors().size(), tensors.size());
    EXPECT_EQ(source.text_file("tokenizer.json").value(), "{}");
    EXPECT_FALSE(source.text_file("chat_template.jinja").value().has_value());
    for (const auto& t : tensors) {
      std::vector<float> values(static_cast<size_t>(t.shape.elements()));
      ASSERT_TRUE(source.read_f32(t.name, values).ok());
      std::vector<uint16_t> halves(values.size());
      ASSERT_TRUE(source.read_fp16_rows(t.name, 0, t.shape[0], halves.data()).ok());
      for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(halves[i], fp32_to_fp16(values[i]));
      source.release(*source.find(t.name));
      std::vector<float> again(values.size());
      ASSERT_TRUE(source.read_f32(t.name, again).ok());
      EXPECT_EQ(values, again);
    }
    std::vector<float> one(1);
    EXPECT_FALSE(source.read_f32("model.norm.weight", one).ok());
    EXPECT_FALSE(source.read_f32("none", one).ok());
    EXPECT_FALSE(source.matrix("model.norm.weight", threads_).ok());
    EXPECT_FALSE(source.matrix("none", threads_).ok());
    std::filesystem::remove_all(path("m"));
  }
}

TEST_F(Source, NamesMayLackModel) {
  auto tensors = tiny_model(DType::kF16);
  tensors.push_back(random_tensor("lm_head.weight", DType::kF16, {50, 32}, 99));
  std::vector<std::string> names;
  for (auto& tensor : tensors) {
    names.push_back(tensor.name);
    if (tensor.name.starts_with("model.")) tensor.name.erase(0, 6);
  }
  write_model(path("m"), tensors, 2);
  auto source = ModelSource::open(path("m"));
  ASSERT_TRUE(source.ok()) << source.error().message;
  for (const std::string& name : names) EXPECT_TRUE((*source)->has(name)) << name;
  EXPECT_EQ((*source)->tensors().size(), names.size());
  // "model." belongs to no tensor of a file where another has it already.
  tensors[0].name = "model." + tensors[0].name;
  write_model(path("m"), tensors, 2);
  source = ModelSource::open(path("m"));
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_TRUE((*source)->has("norm.weight"));
}

TEST_F(Source, FilesWithoutAHeadOfItsOwnAreOfAModelWithoutOne) {
  auto tensors = tiny_model(DType::kF16);
  for (auto& tensor : tensors) {
    if (tensor.name.starts_with("model.")) tensor.name.erase(0, 6);
  }
  write_model(path("m"), tensors);
  auto config = nlohmann::json::parse(testing::kTinyConfig);
  const auto architecture = [&](std::string_view folder) {
    const auto source = ModelSource::open(path(std::string(folder)));
    EXPECT_TRUE(source.ok()) << source.error().message;
    return nlohmann::json::parse((*source)->config_json())["architectures"].dump();
  };
  EXPECT_EQ(architecture("m"), R"(["LlamaForCausalLM"])");  // the embedding is the head
  config["tie_word_embeddings"] = false;
  ASSERT_TRUE(write_file(path("m/config.json"), config.dump()).ok());
  EXPECT_EQ(architecture("m"), R"(["LlamaModel"])");
  config.erase("architectures");
  ASSERT_TRUE(write_file(path("m/config.json"), config.dump()).ok());
  EXPECT_EQ(architecture("m"), R"(["LlamaModel"])");
  for (const char* odd : {R"({"architectures": [7], "tie_word_embeddings": false})", R"({"tie_word_embeddings": 1})",
                          R"({"architectures": "x", "model_type": [], "tie_word_embeddings": false})"}) {
    ASSERT_TRUE(write_file(path("m/config.json"), odd).ok());
    EXPECT_TRUE(ModelSource::open(path("m")).ok()) << odd;
  }
  tensors.push_back(random_tensor("lm_head.weight", DType::kF16, {50, 32}, 99));
  write_model(path("m"), tensors);
  config["architectures"] = {"LlamaForCausalLM"};
  ASSERT_TRUE(write_file(path("m/config.json"), config.dump()).ok());
  EXPECT_EQ(architecture("m"), R"(["LlamaForCausalLM"])");
}

TEST_F(Source, WeightsThatAreNotFloatsAreRefusedByName) {
  auto tensors = tiny_model(DType::kF16);
  tensors[2].dtype = DType::kI16;
  write_model(path("m"), tensors);
  auto source = ModelSource::open(path("m"));
  ASSERT_TRUE(source.ok());
  auto matrix = (*source)->matrix(tensors[2].name, threads_);
  ASSERT_FALSE(matrix.ok());
  EXPECT_NE(matrix.error().message.find("q_proj.weight' has dtype i16"), std::string::npos) << matrix.error().message;
}

TEST_F(Source, NanIsRefusedByName) {
  auto tensors = tiny_model(DType::kF16);
  set_weight(tensors[2], 7, 3, 0x7e00);
  tensors.back().bytes.replace(0, 2, std::string("\x00\x7c", 2));
  write_model(path("m"), tensors);
  auto source = ModelSource::open(path("m"));
  ASSERT_TRUE(source.ok());
  EXPECT_NE((*source)->matrix(tensors[2].name, threads_).error().message.find("row 7, column 3"), std::string::npos);
  std::vector<float> norm(32);
  EXPECT_NE((*source)->read_f32("model.norm.weight", norm).error().message.find("model.norm.weight"),
            std::string::npos);
}

TEST_F(Source, TheCacheIsSearchedAndTheDownloadNamed) {
  write_model(path("hub/models--org--name/snapshots/abc"), tiny_model(DType::kF16));
  ASSERT_EQ(setenv("HF_HUB_CACHE", path("hub").c_str(), 1), 0);
  EXPECT_NE(failure("org/name").find("nestedfp pull org/name"), std::string::npos);
  std::filesystem::create_directories(path("hub/models--org--name/refs"));
  ASSERT_TRUE(write_file(path("hub/models--org--name/refs/main"), "abc\n").ok());
  auto source = ModelSource::open("org/name");
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->path(), path("hub/models--org--name/snapshots/abc"));
  EXPECT_NE(failure("org/other").find("nestedfp pull org/other"), std::string::npos);
  for (const char* model : {"", "none", "../x/y", "/no/where", "a/b/c", "org/", "/name"}) {
    EXPECT_NE(failure(model).find("no such file or directory"), std::string::npos) << model;
  }
  unsetenv("HF_HUB_CACHE");
}

// The files of a snapshot are links to blobs, those in its folders too.
TEST_F(Source, TheCacheMayHoldShardsInFolders) {
  namespace fs = std::filesystem;
  const auto tensors = tiny_model(DType::kF16);
  const std::string folder = path("hub/models--org--name"), snapshot = folder + "/snapshots/abc";
  fs::create_directories(snapshot + "/weights");
  fs::create_directories(folder + "/blobs");
  fs::create_directories(folder + "/refs");
  ASSERT_TRUE(write_file(folder + "/refs/main", "abc").ok());
  std::string map;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string blob = fmt::format("{:040x}", i), shard = fmt::format("{}.safetensors", i);
    testing::write_tensors(fmt::format("{}/blobs/{}", folder, blob), {tensors[i]});
    const bool inside = i % 2 == 0;
    fs::create_symlink(fmt::format("{}../../blobs/{}", inside ? "../" : "", blob),
                       fmt::format("{}/{}{}", snapshot, inside ? "weights/" : "", shard));
    map += fmt::format(R"({}"{}": "{}{}")", i > 0 ? "," : "", tensors[i].name, inside ? "weights/" : "", shard);
  }
  ASSERT_TRUE(write_file(folder + "/blobs/index", R"({"weight_map": {)" + map + "}}").ok());
  ASSERT_TRUE(write_file(folder + "/blobs/config", testing::kTinyConfig).ok());
  fs::create_symlink("../../blobs/index", snapshot + "/model.safetensors.index.json");
  fs::create_symlink("../../blobs/config", snapshot + "/config.json");
  ASSERT_EQ(setenv("HF_HUB_CACHE", path("hub").c_str(), 1), 0);
  const auto source = ModelSource::open("org/name");
  unsetenv("HF_HUB_CACHE");
  ASSERT_TRUE(source.ok()) << source.error().message;
  for (const auto& t : tensors) {
    std::vector<uint16_t> halves(static_cast<size_t>(t.shape.elements()));
    ASSERT_TRUE((*source)->read_fp16_rows(t.name, 0, t.shape[0], halves.data()).ok()) << t.name;
    EXPECT_EQ(std::memcmp(halves.data(), t.bytes.data(), t.bytes.size()), 0) << t.name;
  }
}

TEST_F(Source, AGgufFileBesideAConfigurationIsTheModel) {
  std::filesystem::create_directories(path("m"));
  ASSERT_TRUE(write_file(path("m/config.json"), "{}").ok());
  auto gguf = testing::tiny_gguf_keys();
  gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  ASSERT_TRUE(write_file(path("m/a.gguf"), gguf.build()).ok());
  auto source = ModelSource::open(path("m"));
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->kind(), SourceKind::kGguf);
  ASSERT_TRUE(write_file(path("m/b.gguf"), gguf.build()).ok());
  EXPECT_NE(failure(path("m")).find("holds 2 GGUF files"), std::string::npos);
}

TEST_F(Source, SamplingOfAGgufFileMayLieBesideIt) {
  auto gguf = testing::tiny_gguf_keys();
  gguf.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  ASSERT_TRUE(write_file(path("a.gguf"), gguf.build()).ok());
  auto source = ModelSource::open(path("a.gguf"));
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_FALSE((*source)->text_file("generation_config.json").value().has_value());
  ASSERT_TRUE(write_file(path("a.generation_config.json"), "{}").ok());
  ASSERT_TRUE(write_file(path("a.tokenizer.json"), "{}").ok());
  EXPECT_EQ((*source)->text_file("generation_config.json").value(), "{}");
  EXPECT_FALSE((*source)->text_file("tokenizer.json").value().has_value());
}

TEST_F(Source, FilesThatAreMissingOrUnreadableAreNamed) {
  std::filesystem::create_directories(path("m"));
  EXPECT_NE(failure(path("m")).find("config.json"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/params.json"), "{}").ok());
  EXPECT_NE(failure(path("m")).find("has params.json and no config.json"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/adapter_config.json"), "{}").ok());
  EXPECT_NE(failure(path("m")).find("is an adapter of another model (adapter_config.json)"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/config.json"), testing::kTinyConfig).ok());
  EXPECT_NE(failure(path("m")).find("model.safetensors: is missing"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/pytorch_model.bin"), "x").ok());
  EXPECT_NE(failure(path("m")).find("has its weights in pytorch_model.bin, which is not read"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/config.json"), R"({"nestedfp": 3})").ok());
  EXPECT_NE(failure(path("m")).find("nestedfp"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/config.json"), R"({"nestedfp")").ok());
  EXPECT_NE(failure(path("m")).find("config.json"), std::string::npos);
  ASSERT_TRUE(write_file(path("m/model.safetensors"), "x").ok());
  EXPECT_NE(failure(path("m/model.safetensors")).find("directory"), std::string::npos);
  // Which inspect takes alone.
  ASSERT_TRUE(write_file(path("m/config.json"), "{}").ok());
  EXPECT_NE(failure(path("m/config.json")).find("directory"), std::string::npos);
  if (geteuid() == 0) GTEST_SKIP() << "root may read everything";
  std::filesystem::permissions(path("m/config.json"), std::filesystem::perms::none);
  EXPECT_NE(failure(path("m")).find("config.json: cannot be opened"), std::string::npos);
}

TEST_F(Source, APipeIsNotWaitedFor) {
  for (const char* name : {"config.json", "model.safetensors.index.json", "model.safetensors"}) {
    std::filesystem::remove_all(path("m"));
    write_model(path("m"), tiny_model(DType::kF16), 2);
    std::filesystem::remove(path("m") + "/" + name);
    ASSERT_EQ(mkfifo((path("m") + "/" + name).c_str(), 0600), 0);
    EXPECT_NE(failure(path("m")).find(std::string(name) + ": not a regular file"), std::string::npos) << name;
  }
  std::filesystem::remove(path("m/model.safetensors"));
  const auto source = ModelSource::open(path("m"));
  ASSERT_TRUE(source.ok()) << source.error().message;
  ASSERT_EQ(mkfifo(path("m/chat_template.jinja").c_str(), 0600), 0);
  EXPECT_FALSE((*source)->text_file("chat_template.jinja").ok());
}

TEST_F(Source, SplitGgufFilesAreOneModel) {
  using testing::GgufBuilder;
  GgufBuilder first = testing::tiny_gguf_keys();
  first.key("split.count", 2, GgufBuilder::raw<uint16_t>(2));
  first.tensor("token_embd.weight", {32, 4}, 1, random_tensor("", DType::kF16, {4, 32}, 1).bytes);
  GgufBuilder second;
  const auto norm = random_tensor("", DType::kF32, {32}, 2);
  second.tensor("output_norm.weight", {32}, 0, norm.bytes);
  ASSERT_TRUE(write_file(path("m-00001-of-00002.gguf"), first.build()).ok());
  EXPECT_NE(failure(path("m-00001-of-00002.gguf")).find("m-00002-of-00002.gguf"), std::string::npos);
  ASSERT_TRUE(write_file(path("m-00002-of-00002.gguf"), second.build()).ok());
  auto source = ModelSource::open(path("m-00001-of-00002.gguf"));
  ASSERT_TRUE(source.ok()) << source.error().message;
  std::vector<float> values(32);
  ASSERT_TRUE((*source)->read_f32("model.norm.weight", values).ok());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(values.data()), 128), norm.bytes);
  ASSERT_TRUE(write_file(path("renamed.gguf"), first.build()).ok());
  EXPECT_NE(failure(path("renamed.gguf")).find("one of 2 parts"), std::string::npos);
  // As llama.cpp splits files, later parts say of the model no more than that they are parts.
  second.key("split.count", 2, GgufBuilder::raw<uint16_t>(2));
  ASSERT_TRUE(write_file(path("m-00002-of-00002.gguf"), second.build()).ok());
  EXPECT_NE(failure(path("m-00002-of-00002.gguf")).find("open the first, whose name ends in -00001-of-00002.gguf"),
            std::string::npos);
  const std::string text = testing::tiny_gguf_keys().string("split.count", "2").build();
  ASSERT_TRUE(write_file(path("text.gguf"), text).ok());
  EXPECT_NE(failure(path("text.gguf")).find("'split.count' is not a whole number"), std::string::npos);
}

TEST_F(Source, AGgufFileWhoseNameIsLikeAParts) {
  for (const char* name : {"one/art-of-war.gguf", "two/m-00001-of-00002.gguf"}) {
    ASSERT_TRUE(std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path()));
    ASSERT_TRUE(write_file(path(name), testing::tiny_gguf()).ok());
  }
  ASSERT_TRUE(write_file(path("two/m-00002-of-00002.gguf"), "").ok());
  for (const char* folder : {"one", "two"}) {
    const auto source = ModelSource::open(path(folder));
    EXPECT_TRUE(source.ok()) << source.error().message;
  }
}

TEST_F(Source, ADirectoryMayHoldAGgufFile) {
  ASSERT_TRUE(write_file(path("a.gguf"), testing::tiny_gguf()).ok());
  auto source = ModelSource::open(dir_);
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->kind(), SourceKind::kGguf);
  // That for images, of a multimodal model, is not asked about.
  ASSERT_TRUE(write_file(path("mmproj-a-F16.gguf"), "x").ok());
  source = ModelSource::open(dir_);
  ASSERT_TRUE(source.ok()) << source.error().message;
  EXPECT_EQ((*source)->path(), path("a.gguf"));
  ASSERT_TRUE(write_file(path("b.gguf"), testing::tiny_gguf()).ok());
  EXPECT_NE(failure(dir_).find("2 GGUF files"), std::string::npos);
}

// NFP_DEMO_MODEL: the GGUF file of SmolLM2-135M-Instruct (Q4_1).
TEST(DemoModel, RowExponentsNestEveryMatrix) {
  const char* model = std::getenv("NFP_DEMO_MODEL");
  if (model == nullptr || !std::filesystem::exists(model))
    GTEST_SKIP() << "NFP_DEMO_MODEL does not name the demo model";
  auto source = ModelSource::open(model);
  ASSERT_TRUE(source.ok()) << source.error().message;
  ThreadPool threads(usable_cpu_count());
  auto report = inspect(**source, threads, {});
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->total.matrices, 210);
  EXPECT_EQ(report->total.matrices - report->total.by_paper, 152);
  EXPECT_EQ(report->total.dense, 0);
  EXPECT_EQ(report->rows, 155520);
  EXPECT_EQ(report->shifted_rows, 673);
  EXPECT_EQ(report->exponents.begin()->first, 1);
  EXPECT_EQ(report->exponents.rbegin()->first, 3);
  float largest = 0;
  for (const MatrixReport& m : report->matrices) largest = std::max(largest, m.largest);
  EXPECT_EQ(largest, 9.25f);
}

}  // namespace
}  // namespace nfp
