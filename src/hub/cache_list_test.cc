#include "hub/cache_list.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "io/testing/model_files.h"

namespace nfp {
namespace {

class CacheListTest : public testing::ScratchTest {
 protected:
  void put(const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path(file)).parent_path());
    ASSERT_TRUE(write_file(path(file), text).ok());
  }
};

TEST_F(CacheListTest, ModelsByTheNamesThatOpenThem) {
  put("models--a--plain/refs/main", "c1");
  put("models--a--plain/refs/v2", "c2");
  put("models--a--plain/snapshots/c1/config.json", "{}");
  put("models--a--plain/blobs/w", "12345");
  std::filesystem::create_symlink("../../blobs/w", path("models--a--plain/snapshots/c1/model.safetensors"));
  put("models--a--plain/snapshots/c2/config.json", "{}");
  put("models--b--gguf/refs/main", "c");
  put("models--b--gguf/snapshots/c/q4-00001-of-00002.gguf", "123");
  put("models--b--gguf/snapshots/c/q4-00002-of-00002.gguf", "1234");
  put("models--b--name/refs/main", "c");
  put("models--b--name/snapshots/c/art-of-war.gguf", "123");
  put("models--b--with-images/refs/main", "c");
  put("models--b--with-images/snapshots/c/m.gguf", "123");
  put("models--b--with-images/snapshots/c/mmproj-m-F16.gguf", "1");
  put("models--c--several/refs/main", "c");
  put("models--c--several/snapshots/c/a.gguf", "1");
  put("models--c--several/snapshots/c/sub/b.gguf", "12");
  put("models--c--pinned/snapshots/c3/model.safetensors", "1234");
  put("models--d--half/blobs/x.incomplete", "123456");
  put("models--d--half/snapshots/c/config.json", "{}");
  put("models--nothing/refs/main", "c");
  put("datasets--a--b/refs/main", "c");
  put("version.txt", "1");
  const CacheList list = list_hub_cache(dir_);
  std::string text;
  for (const CachedModel& model : list.models) text += model.name + " " + std::to_string(model.bytes) + "\n";
  EXPECT_EQ(text,
            "a/plain 7\n"
            "a/plain@v2 2\n"
            "b/gguf 7\n"
            "b/name 3\n"
            "b/with-images 3\n"
            "c/pinned@c3 4\n"
            "c/several:a.gguf 1\n"
            "c/several:sub/b.gguf 2\n");
  EXPECT_EQ(list.models[0].path, path("models--a--plain/snapshots/c1"));
  EXPECT_EQ(list.models[2].path, path("models--b--gguf/snapshots/c/q4-00001-of-00002.gguf"));
  ASSERT_EQ(list.unfinished.size(), 1u);
  EXPECT_EQ(list.unfinished[0].repository, "d/half");
  EXPECT_EQ(list.unfinished[0].bytes, 6u);
}

TEST_F(CacheListTest, NoCacheIsAnEmptyOne) {
  EXPECT_TRUE(list_hub_cache(path("none")).models.empty());
  std::filesystem::create_directories(path("loop/models--a--b/refs"));
  std::filesystem::create_symlink(".", path("loop/models--a--b/refs/main"));
  EXPECT_TRUE(list_hub_cache(path("loop")).models.empty());
}

}  // namespace
}  // namespace nfp
