#include "io/safetensors.h"

#include <gtest/gtest.h>

#include "io/safetensors_writer.h"
#include "io/shard_set.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

using testing::random_tensor;
using testing::write_tensors;

std::string file_of(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data_bytes, 'x');
}

Result<SafetensorsHeader> parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "f.safetensors");
}

std::string message(const std::string& file) {
  auto parsed = parse(file);
  EXPECT_FALSE(parsed.ok()) << file;
  return parsed.ok() ? "" : parsed.error().message;
}

TEST(Safetensors, ReadsWhatTheFormatDescribes) {
  auto header =
      parse(file_of(R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                    R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   )",
                    16));
  ASSERT_TRUE(header.ok()) << header.error().message;
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[0].shape.rank(), 0u);
  EXPECT_EQ(header->tensors[1].shape, (Shape{2, 3}));
  EXPECT_EQ(header->tensors[1].end - header->tensors[1].begin, 12u);
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(Safetensors, EveryFaultIsNamed) {
  const auto one = [](const std::string& fields, size_t bytes = 8) {
    return file_of("{\"t\":{" + fields + "}}", bytes);
  };
  const std::vector<std::pair<std::string, std::string>> faults = {
      {"", "too few"},
      {"1234567", "too few"},
      {std::string(8, '\xff') + "{}", "truncated"},
      {file_of("{}", 0).substr(0, 9), "truncated"},
      {file_of("{", 0), "JSON"},
      {file_of("[]", 0), "JSON object"},
      {file_of(std::string(5000, '['), 0), "JSON"},
      {file_of("{\"t\": 5}", 0), "'t' has no dtype"},
      {one(R"("dtype":"F4","shape":[-2],"data_offsets":[0,8])"), "impossible shape"},
      {one(R"("dtype":"F4","shape":[2],"data_offsets":[1,9])"), "outside the file (8 bytes"},
      {one(R"("dtype":4,"shape":[2],"data_offsets":[0,8])"), "no dtype"},
      {one(R"("dtype":"F32","data_offsets":[0,8])"), "no shape"},
      {one(R"("dtype":"F32","shape":[2])"), "no data_offsets"},
      {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), "impossible shape"},
      {one(R"("dtype":"F32","shape":[2.5],"data_offsets":[0,8])"), "impossible shape"},
      {one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])"), "impossible shape"},
      {one(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8])"), "impossible shape"},
      {one(R"("dtype":"F32","shape":[1152921504606846976,0],"data_offsets":[0,0])"), "impossible shape"},
      {one(R"("dtype":"F32","shape":[0,1152921504606846976,8],"data_offsets":[0,0])"), "impossible shape"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), "outside"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), "outside"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "outside"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[1,9])"), "outside the file (8 bytes"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615])"), "outside"},
      {one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), "need 12"},
      {file_of(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
           8),
       "'a' and 'b' overlap"},
      {file_of(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
           8),
       "'a' appears twice"},
      {file_of(R"({"__metadata__":{"a":1}})", 0), "'a' is not a string"},
      // What is printed is not the file's to choose.
      {file_of(R"({"\u001b[31m":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4),
       "tensor 1 is no printable text"},
      {file_of(R"({"a b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4), "no printable text"},
      {file_of(R"({"":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4), "no printable text"},
      {file_of("{\"" + std::string(201, 'a') + R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4),
       "no printable text"},
      {one(R"("dtype":"\u001b[31m","shape":[2],"data_offsets":[0,8])"), "'t' has a dtype that is no printable text"},
      {file_of(R"({"__metadata__":{"\n\u001b":1}})", 0), "value of __metadata__"},
  };
  for (const auto& [file, naming] : faults) {
    const std::string text = message(file);
    EXPECT_NE(text.find(naming), std::string::npos) << text << "\n" << naming;
    EXPECT_EQ(text.find("f.safetensors: "), 0u) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  }
}

// Files may hold what no layer needs. Its bytes are read as they are.
TEST(Safetensors, TensorsOfOtherDtypesAreKeptByTheirBytes) {
  const auto header = parse(file_of(R"({"a":{"dtype":"F4","shape":[4,6],"data_offsets":[0,12]},)"
                                    R"("b":{"dtype":"F16","shape":[2],"data_offsets":[12,16]}})",
                                    16));
  ASSERT_TRUE(header.ok()) << header.error().message;
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].stored, "F4");
  EXPECT_EQ(header->tensors[0].dtype, DType::kU8);
  EXPECT_EQ(header->tensors[0].shape, (Shape{12}));
  EXPECT_EQ(header->tensors[1].stored, "F16");
}

class SafetensorsFiles : public testing::ScratchTest {
 protected:
  std::string set_error() {
    auto set = ShardSet::open(dir_, "m");
    EXPECT_FALSE(set.ok());
    return set.ok() ? "" : set.error().message;
  }
  void index(const std::string& weight_map) {
    ASSERT_TRUE(write_file(path("m.safetensors.index.json"), weight_map).ok());
  }
};

TEST_F(SafetensorsFiles, WhatIsWrittenIsRead) {
  const auto a = random_tensor("a", DType::kF32, {3, 5}, 1);
  const auto b = random_tensor("b", DType::kF16, {7}, 2);
  write_tensors(path("m.safetensors"), {a, b});
  auto set = ShardSet::open(dir_, "m");
  ASSERT_TRUE(set.ok()) << set.error().message;
  for (const auto& t : {a, b}) {
    const SafetensorsEntry* found = set->find(t.name);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->shape, t.shape);
    const auto bytes = set->bytes(*found);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), t.bytes);
  }
  EXPECT_EQ(set->find("c"), nullptr);
}

ShardOptions m_options() {
  ShardOptions options;
  options.prefix = "m";
  return options;
}

// With a search for each name this would take minutes; the test's own time limit is what fails then.
TEST_F(SafetensorsFiles, ManyTensorsAreWrittenInLinearTime) {
  constexpr int kTensors = 100'000;
  const auto read = [](int64_t, int64_t, std::byte*) { return ok_status(); };
  std::vector<TensorSource> tensors;
  tensors.reserve(kTensors);
  for (int i = 0; i < kTensors; ++i) tensors.push_back({fmt::format("t{}", i), DType::kF16, {0}, read, {}});
  ThreadPool threads(1);
  ASSERT_TRUE(write_safetensors(dir_, tensors, m_options(), threads).ok());
  const auto set = ShardSet::open(dir_, "m");
  ASSERT_TRUE(set.ok()) << set.error().message;
  EXPECT_EQ(set->entries().size(), static_cast<size_t>(kTensors));
}

TEST_F(SafetensorsFiles, ANameIsWrittenOnce) {
  const auto read = [](int64_t, int64_t, std::byte*) { return ok_status(); };
  ThreadPool threads(1);
  for (const std::string& name : {std::string("b"), std::string("__metadata__")}) {
    const auto status = write_safetensors(
        dir_,
        {{"b", DType::kF16, {0}, read, {}}, {"c", DType::kF16, {0}, read, {}}, {name, DType::kF16, {0}, read, {}}},
        m_options(), threads);
    ASSERT_FALSE(status.ok()) << name;
    EXPECT_NE(status.error().message.find("'" + name + "' would be written twice"), std::string::npos)
        << status.error().message;
  }
  EXPECT_TRUE(entries().empty());
}

TEST_F(SafetensorsFiles, IndexFaultsAreNamed) {
  write_tensors(path("m1.safetensors"), {random_tensor("a", DType::kF32, {3}, 1)});
  write_tensors(path("m2.safetensors"),
                {random_tensor("a", DType::kF32, {3}, 1), random_tensor("b", DType::kF32, {3}, 1)});
  index(R"({"weight_map":{"a":"m1.safetensors","b":"m2.safetensors"}})");
  EXPECT_TRUE(ShardSet::open(dir_, "m").ok());
  index(R"({"weight_map":{"a":"m1.safetensors","b":"m3.safetensors"}})");
  EXPECT_NE(set_error().find("m3.safetensors: is missing"), std::string::npos);
  index(R"({"weight_map":{"a":"m1.safetensors","c":"m2.safetensors"}})");
  EXPECT_NE(set_error().find("m2.safetensors: tensor 'c' is missing"), std::string::npos);
  for (const char* file : {"../m1.safetensors", "/etc/passwd", "", "..", "a\\u001b[31mred\\n.safetensors"}) {
    index(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", file));
    EXPECT_NE(set_error().find("m.safetensors.index.json: weight_map 'a'"), std::string::npos) << file;
  }
  index(R"({"weight_map":{"\u001b[31m":"m1.safetensors"}})");
  EXPECT_NE(set_error().find("m.safetensors.index.json: a name in weight_map"), std::string::npos);
  EXPECT_EQ(set_error().find('\x1b'), std::string::npos);
  for (const char* text :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":1}})"}) {
    index(text);
    EXPECT_NE(set_error().find("m.safetensors.index.json"), std::string::npos) << text;
  }
  std::filesystem::remove(path("m.safetensors.index.json"));
  EXPECT_NE(set_error().find("m.safetensors: is missing"), std::string::npos);
}

TEST_F(SafetensorsFiles, ShardsMayLieInFoldersOfTheModel) {
  namespace fs = std::filesystem;
  fs::create_directories(path("weights/early"));
  fs::create_directories(path("elsewhere"));
  const auto a = random_tensor("a", DType::kF32, {3}, 1);
  write_tensors(path("weights/early/1.safetensors"), {a});
  write_tensors(path("2.safetensors"), {random_tensor("b", DType::kF32, {3}, 2)});
  index(R"({"weight_map":{"a":"weights/early/1.safetensors","b":"2.safetensors"}})");
  const auto set = ShardSet::open(dir_, "m");
  ASSERT_TRUE(set.ok()) << set.error().message;
  const auto bytes = set->bytes(*set->find("a"));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), a.bytes);
  EXPECT_TRUE(ShardSet::open(dir_ + "/./", "m").ok());
  for (const char* file : {"weights/../2.safetensors", "weights//early/1.safetensors", "./2.safetensors",
                           "weights/early/", "/weights/early/1.safetensors"}) {
    index(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", file));
    EXPECT_NE(set_error().find("weight_map 'a' does not name a file of this directory"), std::string::npos) << file;
  }
}

// A link to a folder elsewhere leads out of the model; one within it does not.
TEST_F(SafetensorsFiles, FoldersOfShardsThatAreLinksStayInTheModel) {
  namespace fs = std::filesystem;
  const std::string model = path("model");
  fs::create_directories(model + "/inside");
  fs::create_directories(path("elsewhere"));
  for (const std::string& folder : {model + "/inside", path("elsewhere")}) {
    write_tensors(folder + "/1.safetensors", {random_tensor("a", DType::kF32, {3}, 1)});
  }
  const auto open = [&](const fs::path& target) {
    fs::remove(model + "/link");
    fs::create_directory_symlink(target, model + "/link");
    return ShardSet::open(model, "m");
  };
  ASSERT_TRUE(write_file(model + "/m.safetensors.index.json", R"({"weight_map":{"a":"link/1.safetensors"}})").ok());
  EXPECT_TRUE(open("inside").ok());
  for (const fs::path& target : {fs::path("../elsewhere"), fs::path(path("elsewhere"))}) {
    const auto set = open(target);
    ASSERT_FALSE(set.ok()) << target;
    EXPECT_NE(set.error().message.find("weight_map 'a' does not name a file of this directory"), std::string::npos)
        << set.error().message;
  }
}

// As transformers leaves a folder in which it wrote one file over several.
TEST_F(SafetensorsFiles, OneFileCountsBesideAnIndex) {
  index(R"({"weight_map":{"a":"m1.safetensors"}})");
  for (const bool shard_there : {false, true}) {
    if (shard_there) write_tensors(path("m1.safetensors"), {random_tensor("a", DType::kF32, {3}, 1)});
    write_tensors(path("m.safetensors"), {random_tensor("a", DType::kF16, {3}, 2)});
    const auto set = ShardSet::open(dir_, "m");
    ASSERT_TRUE(set.ok()) << set.error().message;
    EXPECT_EQ(set->find("a")->dtype, DType::kF16);
  }
}

}  // namespace
}  // namespace nfp
