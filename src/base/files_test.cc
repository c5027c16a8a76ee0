#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/atomic_file.h"
#include "base/json_depth.h"
#include "base/mapped_file.h"
#include "base/mapping_guard.h"
#include "base/temporary_path.h"
#include "base/testing/scratch_test.h"
#include "base/user_folders.h"

namespace nfp {
namespace {

class Files : public testing::ScratchTest {};

TEST_F(Files, WrittenIsRead) {
  const std::string path = dir_ + "/a";
  ASSERT_TRUE(write_file(path, "hello").ok());
  auto mapped = MappedFile::open(path);
  ASSERT_TRUE(mapped.ok());
  EXPECT_EQ(mapped->bytes().size(), 5u);
  EXPECT_EQ(read_text_file(path).value(), "hello");
  EXPECT_FALSE(read_text_file(path, 4).ok());
}

TEST_F(Files, ATextMayBeginWithAByteOrderMark) {
  const std::string path = dir_ + "/a";
  for (const auto& [bytes, text] :
       {std::pair("\xEF\xBB\xBF{}", "{}"), {"\xEF\xBB\xBF", ""}, {"\xEF\xBB", "\xEF\xBB"}}) {
    ASSERT_TRUE(write_file(path, bytes).ok());
    EXPECT_EQ(read_text_file(path).value(), text);
  }
}

// Services of root have no HOME, and find what root has fetched all the same.
TEST_F(Files, WithoutHomeFoldersAreThoseOfTheUser) {
  const passwd* const user = ::getpwuid(::getuid());
  if (user == nullptr) GTEST_SKIP() << "the system does not know this user";
  const std::string known = user->pw_dir;
  const auto kept = [](const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  };
  const auto home = kept("HOME"), cache = kept("XDG_CACHE_HOME");
  unsetenv("XDG_CACHE_HOME");
  setenv("HOME", "/somewhere", 1);
  EXPECT_EQ(home_folder(), "/somewhere");
  EXPECT_EQ(user_cache_folder(), "/somewhere/.cache/nestedfp");
  setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(user_cache_folder(), "/x/nestedfp");
  for (const char* name : {"HOME", "XDG_CACHE_HOME"}) unsetenv(name);
  EXPECT_EQ(home_folder(), known);
  EXPECT_EQ(user_cache_folder(), known + "/.cache/nestedfp");
  setenv("HOME", "", 1);
  EXPECT_EQ(home_folder(), known);
  unsetenv("HOME");
  if (home) setenv("HOME", home->c_str(), 1);
  if (cache) setenv("XDG_CACHE_HOME", cache->c_str(), 1);
}

TEST_F(Files, APipeIsNotMappedNorWaitedFor) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const auto mapped = MappedFile::open(path("pipe"));
  ASSERT_FALSE(mapped.ok());
  EXPECT_NE(mapped.error().message.find("not a regular file"), std::string::npos) << mapped.error().message;
}

using FilesDeathTest = Files;

TEST_F(FilesDeathTest, AMappedFileThatGetsShorterEndsTheProgramWithALine) {
  const std::string path = dir_ + "/shrinking";
  ASSERT_TRUE(write_file(path, std::string(100'000, 'x')).ok());
  const auto read_beyond_the_end = [&] {
    install_mapping_guard();
    auto other = MappedFile::open(path);
    auto mapped = MappedFile::open(path);
    if (!mapped.ok() || !other.ok()) std::exit(2);
    other = MappedFile();  // frees its slot, which must not take the other's
    auto moved = std::move(*mapped);
    auto half = AtomicFile::create(dir_ + "/half");
    const TemporaryPath folder(dir_ + "/folder");
    std::filesystem::create_directory(folder.name());
    if (!half.ok() || !half->write("half").ok() || !write_file(folder.name() + "/part", "part").ok()) std::exit(5);
    std::filesystem::resize_file(path, 10);
    const volatile std::byte* last = &moved.bytes()[90'000];
    std::exit(*last == std::byte{0} ? 3 : 4);
  };
  EXPECT_EXIT(read_beyond_the_end(), ::testing::ExitedWithCode(1), "shrinking: got shorter");
  EXPECT_EQ(entries(), std::vector<std::string>{"shrinking"});
}

TEST_F(Files, UncommittedLeavesNothing) {
  {
    auto file = AtomicFile::create(dir_ + "/b");
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->write("half").ok());
    EXPECT_EQ(entries().size(), 1u);
  }
  EXPECT_TRUE(entries().empty());
}

TEST_F(Files, AnOutputFollowsLinksAndReplacesNoDeviceOrPipe) {
  const auto put = [&](const std::string& name, const std::string& text) {
    auto file = AtomicFile::create_output(name);
    ASSERT_TRUE(file.ok()) << file.error().message;
    ASSERT_TRUE(file->write(text).ok());
    ASSERT_TRUE(file->commit().ok());
  };
  ASSERT_TRUE(write_file(path("real"), "old").ok());
  std::filesystem::create_symlink("real", path("link"));
  put(path("link"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(read_text_file(path("real")).value(), "new");
  std::filesystem::permissions(path("real"), std::filesystem::perms(0640));
  put(path("real"), "newer");
  EXPECT_EQ(read_text_file(path("link")).value(), "newer");
  EXPECT_EQ(std::filesystem::status(path("real")).permissions(), std::filesystem::perms(0640));
  std::filesystem::create_symlink("nowhere", path("dangling"));
  put(path("dangling"), "x");

  std::filesystem::create_symlink("/dev/null", path("null"));
  put(path("null"), "gone");
  EXPECT_TRUE(std::filesystem::is_character_file(path("null")));

  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = ::open(path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  put(path("pipe"), "through");
  char got[16] = {};
  EXPECT_EQ(::read(reader, got, sizeof(got)), 7);
  ::close(reader);
  EXPECT_TRUE(std::filesystem::is_fifo(path("pipe")));

  const int open_file = ::open(path("redirected").c_str(), O_WRONLY | O_CREAT, 0600);
  put(fmt::format("/dev/fd/{}", open_file), "both");
  EXPECT_EQ(::write(open_file, "B", 1), 1);  // still the same file
  ::close(open_file);
  EXPECT_EQ(read_text_file(path("redirected")).value(), "Both");

  EXPECT_FALSE(AtomicFile::create_output(dir_).ok());
  EXPECT_FALSE(AtomicFile::create_output(path("no/such")).ok());
  EXPECT_EQ(entries(), (std::vector<std::string>{"dangling", "link", "null", "pipe", "real", "redirected"}));
}

TEST_F(Files, ErrorsNameThePath) {
  auto missing = MappedFile::open(dir_ + "/none");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_NE(missing.error().message.find(dir_ + "/none"), std::string::npos);
  EXPECT_FALSE(MappedFile::open(dir_).ok());
  EXPECT_FALSE(AtomicFile::create(dir_ + "/no/such/dir").ok());
}

TEST_F(Files, AFullDiskIsAnError) {
  // A limit on the size of files stands in for the disk's end.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto file = AtomicFile::create(dir_ + "/c");
  ASSERT_TRUE(file.ok());
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  Status status = file->write("x");
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find(dir_ + "/c: cannot be written"), std::string::npos);
}

TEST_F(Files, ANameMayBeAsLongAsTheFileSystemHasThem) {
  for (const std::string& name : {std::string(255, 'a'), std::string(219, 'a'), "a" + [] {
                                    std::string text;
                                    while (text.size() < 254) text += "\u00e4";
                                    return text;
                                  }()}) {
    const std::string path = dir_ + "/" + name;
    auto file = AtomicFile::create_output(path);
    ASSERT_TRUE(file.ok()) << file.error().message;
    ASSERT_TRUE(file->commit().ok());
    EXPECT_TRUE(read_text_file(path).ok());
    const std::string temporary = std::filesystem::path(temporary_beside(path)).filename();
    EXPECT_LE(temporary.size(), 255 - std::string("-stopped").size());
    const size_t kept = temporary.find(".tmp-");
    EXPECT_GT(kept, 200u);
    EXPECT_EQ(name.substr(0, kept), temporary.substr(0, kept));
    EXPECT_TRUE(kept == name.size() || (name[kept] & 0xc0) != 0x80);
  }
  EXPECT_TRUE(temporary_beside(dir_ + "/b").starts_with(dir_ + "/b.tmp-"));
}

TEST_F(Files, NobodyCanPrepareATemporarysName) {
  // A link under the name that another program could guess, to a file of ours.
  ASSERT_TRUE(write_file(dir_ + "/precious", "kept").ok());
  std::filesystem::create_symlink(dir_ + "/precious", dir_ + "/d.tmp-" + std::to_string(getpid()));
  ASSERT_TRUE(write_file(dir_ + "/d", "new").ok());
  EXPECT_EQ(std::filesystem::file_size(dir_ + "/precious"), 4u);
  EXPECT_NE(temporary_beside("a"), temporary_beside("a"));
}

TEST_F(Files, WhatAKilledProcessLeftIsToldOfOnceAndStays) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const std::string left = fmt::format("{}/a.tmp-{}-0123456789abcdef", dir_, child);
  std::filesystem::create_directory(left);
  ASSERT_TRUE(write_file(left + "/weights", std::string(2'500'000, 'x')).ok());
  // Of this process, which runs; of another output; no temporaries.
  for (const std::string& other :
       {temporary_beside("a"), fmt::format("b.tmp-{}-0123456789abcdef", child), fmt::format("a.tmp-{}", child),
        fmt::format("a.{}", child), std::string("a.tmp-x-0123456789abcdef")}) {
    ASSERT_TRUE(write_file(dir_ + "/" + other, "x").ok());
  }
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(AtomicFile::create_output(dir_ + "/a").ok());
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find(left + ": 2.5 MB"), std::string::npos) << told;
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  EXPECT_TRUE(std::filesystem::exists(left + "/weights"));
}

TEST_F(Files, APrivateFileIsReadByItsOwnerOnly) {
  ASSERT_TRUE(write_file(dir_ + "/e", "secret", 0600).ok());
  using Perms = std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(dir_ + "/e").permissions() & (Perms::group_all | Perms::others_all), Perms::none);
}

TEST(JsonDepth, CountsLevelsOutsideOfStrings) {
  EXPECT_EQ(json_depth("", 9), 0);
  EXPECT_EQ(json_depth(R"({"a":[1,{"b":"[[[\"[["}]})", 9), 3);
  EXPECT_EQ(json_depth(std::string(1'000'000, '['), 9), 10);
  EXPECT_TRUE(json_too_deep(std::string(201, '{')));
  EXPECT_FALSE(json_too_deep(std::string(200, '{')));
}

}  // namespace
}  // namespace nfp
