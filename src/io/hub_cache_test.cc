#include "io/hub_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <initializer_list>
#include <utility>

#include "base/user_folders.h"
#include "io/testing/model_files.h"

namespace nfp {
namespace {

TEST(HubName, PartsAreTold) {
  const auto plain = parse_hub_name("org/name-1.5_B");
  ASSERT_TRUE(plain);
  EXPECT_EQ(plain->repository, "org/name-1.5_B");
  EXPECT_EQ(plain->revision, "main");
  EXPECT_EQ(plain->file, "");
  EXPECT_EQ(plain->text(), "org/name-1.5_B");
  const auto full = parse_hub_name("org/name@refs/pr/1:sub/x.gguf");
  ASSERT_TRUE(full);
  EXPECT_EQ(full->repository, "org/name");
  EXPECT_EQ(full->revision, "refs/pr/1");
  EXPECT_EQ(full->file, "sub/x.gguf");
  EXPECT_EQ(full->text(), "org/name@refs/pr/1:sub/x.gguf");
  for (const char* bad : {"",
                          "name",
                          "/name",
                          "org/",
                          "a/b/c",
                          "../x",
                          "./x",
                          "x/..",
                          "~/x",
                          "/a/b",
                          "org/na me",
                          "org/n--m",
                          "org/na\nme",
                          "org/name@",
                          "org/name:",
                          "org/name@..",
                          "org/name@a//b",
                          "org/name:../x",
                          "org/name:/etc/passwd",
                          "org/name:a\\b"}) {
    EXPECT_FALSE(parse_hub_name(bad)) << bad;
  }
}

TEST(HubName, PathsStayInside) {
  for (const char* good : {"a", "a/b", "a..b", ".gitattributes", "a b", "\xc3\xa4"}) {
    EXPECT_TRUE(is_plain_relative_path(good)) << good;
  }
  for (const std::string& bad :
       {std::string(""), std::string("/a"), std::string("a/"), std::string("a//b"), std::string(".."),
        std::string("a/../b"), std::string("./a"), std::string("a/."), std::string("a\\b"), std::string("a\0b", 3),
        std::string("a\nb"), std::string(256, 'x'), std::string(700, 'x') + "/" + std::string(700, 'y')}) {
    EXPECT_FALSE(is_plain_relative_path(bad)) << bad;
  }
}

class HubCacheTest : public testing::ScratchTest {
 protected:
  static void clear() {
    for (const char* name : {"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"}) unsetenv(name);
  }
  void SetUp() override {
    clear();
    ScratchTest::SetUp();
  }
  void TearDown() override {
    clear();
    ScratchTest::TearDown();
  }
};

TEST_F(HubCacheTest, ThePlaceIsThatOfTheOtherClients) {
  const std::string home = home_folder();
  ASSERT_TRUE(home_folder_of("root").starts_with('/'));
  EXPECT_EQ(hub_cache(), home + "/.cache/huggingface/hub");
  setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(hub_cache(), "/x/huggingface/hub");
  setenv("HF_HOME", "/h", 1);
  EXPECT_EQ(hub_cache(), "/h/hub");
  EXPECT_EQ(hub_home(), "/h");
  setenv("HF_HUB_CACHE", "/c", 1);
  EXPECT_EQ(hub_cache(), "/c");
  for (const auto& [given, place] : std::initializer_list<std::pair<const char*, std::string>>{
           {"~", home},
           {"~/c", home + "/c"},
           {"~root", home_folder_of("root")},
           {"~root/c", home_folder_of("root") + "/c"},
           {"~nobody of that name/c", "~nobody of that name/c"},
           {"$HF_HOME/c", "/h/c"},
           {"${HF_HOME}c$HF_HOME", "/hc/h"},
           {"a~/$", "a~/$"},
           {"$NFP_NOT_SET/${NFP_NOT_SET}/${HF_HOME", "$NFP_NOT_SET/${NFP_NOT_SET}/${HF_HOME"}}) {
    setenv("HF_HUB_CACHE", given, 1);
    EXPECT_EQ(hub_cache(), place) << given;
  }
}

TEST_F(HubCacheTest, RevisionsAndFilesAreFound) {
  setenv("HF_HUB_CACHE", path("hub").c_str(), 1);
  const std::string folder = path("hub/models--org--name");
  std::filesystem::create_directories(folder + "/refs/refs/pr");
  std::filesystem::create_directories(folder + "/snapshots/abc/sub");
  ASSERT_TRUE(write_file(folder + "/refs/refs/pr/1", "abc").ok());
  ASSERT_TRUE(write_file(folder + "/snapshots/abc/sub/x.gguf", "x").ok());
  const auto find = [](const std::string& text) { return find_in_hub_cache(*parse_hub_name(text)); };
  EXPECT_EQ(find("org/name@refs/pr/1").value(), folder + "/snapshots/abc");
  EXPECT_EQ(find("org/name@abc").value(), folder + "/snapshots/abc");
  EXPECT_EQ(find("org/name@abc:sub/x.gguf").value(), folder + "/snapshots/abc/sub/x.gguf");
  for (const char* absent : {"org/name", "org/name@abc:y.gguf", "org/other", "org/name@abd"}) {
    const auto found = find(absent);
    ASSERT_FALSE(found.ok()) << absent;
    EXPECT_NE(found.error().message.find(std::string("nestedfp pull ") + absent), std::string::npos);
  }
  // What a ref says is not trusted either.
  ASSERT_TRUE(write_file(folder + "/refs/main", "../../..").ok());
  EXPECT_FALSE(find("org/name").ok());
}

}  // namespace
}  // namespace nfp
