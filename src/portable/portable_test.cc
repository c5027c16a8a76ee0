// This program is linked as the program and the C libraries are: what it calls are the replacements.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "portable/cond_wait.h"

extern "C" std::size_t strlcpy(char* out, const char* text, std::size_t size) noexcept;

namespace nfp {
namespace {

const std::string made_before_main = std::string("made before ") + "main";

TEST(Portable, ConstructorsRun) { EXPECT_EQ(made_before_main, "made before main"); }

void thrower(int depth) {
  if (depth == 0) throw std::runtime_error("thrown");
  const std::string on_the_way(100, 'x');
  thrower(depth - 1);
}

TEST(Portable, ExceptionsAreCaughtInEveryThread) {
  std::atomic<int> caught = 0;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        try {
          thrower(i % 10);
        } catch (const std::runtime_error& error) {
          if (std::string(error.what()) == "thrown") ++caught;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(caught, 4000);
}

TEST(Portable, ExceptionsPassThroughLibraries) {
  // qsort() is in libc, which has unwind tables of its own.
  const auto compare = [](const void*, const void*) -> int { throw std::invalid_argument("from a callback"); };
  int numbers[] = {2, 1};
  EXPECT_THROW(std::qsort(numbers, 2, sizeof(int), compare), std::invalid_argument);
}

TEST(Portable, FilesAreFound) {
  const std::string folder = testing::TempDir() + "nfp_portable_" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  std::FILE* file = std::fopen((folder + "/file").c_str(), "w+");
  ASSERT_NE(file, nullptr);
  std::fputs("12345", file);
  std::fflush(file);
  std::filesystem::create_symlink("file", folder + "/link");
  struct stat by_path {};
  struct stat by_link {};
  struct stat by_file {};
  struct stat in_folder {};
  struct stat64 by_file64 {};
  EXPECT_EQ(stat((folder + "/link").c_str(), &by_path), 0);
  EXPECT_EQ(lstat((folder + "/link").c_str(), &by_link), 0);
  EXPECT_EQ(fstat(fileno(file), &by_file), 0);
  EXPECT_EQ(fstat64(fileno(file), &by_file64), 0);
  EXPECT_EQ(fstatat(AT_FDCWD, (folder + "/file").c_str(), &in_folder, 0), 0);
  EXPECT_EQ(by_path.st_size, 5);
  EXPECT_TRUE(S_ISREG(by_path.st_mode));
  EXPECT_TRUE(S_ISLNK(by_link.st_mode));
  EXPECT_EQ(by_file.st_ino, by_path.st_ino);
  EXPECT_EQ(in_folder.st_ino, by_path.st_ino);
  EXPECT_EQ(by_file64.st_ino, by_path.st_ino);
  EXPECT_EQ(by_file64.st_size, 5);
  EXPECT_EQ(std::filesystem::file_size(folder + "/link"), 5U);
  EXPECT_EQ(stat((folder + "/none").c_str(), &by_path), -1);
  EXPECT_EQ(errno, ENOENT);
  std::fclose(file);
  std::filesystem::remove_all(folder);
}

TEST(Portable, StringsAreCutToTheirRoom) {
  char out[4] = "zzz";
  EXPECT_EQ(strlcpy(out, "abcdef", sizeof(out)), 6U);
  EXPECT_STREQ(out, "abc");
  EXPECT_EQ(strlcpy(out, "x", sizeof(out)), 1U);
  EXPECT_STREQ(out, "x");
  EXPECT_EQ(strlcpy(out, "yy", 0), 2U);
  EXPECT_STREQ(out, "x");
}

TEST(Portable, RandomNumbersDiffer) {
  std::random_device device;
  std::set<unsigned> seen;
  for (int i = 0; i < 8; ++i) seen.insert(device());
  EXPECT_GT(seen.size(), 6U);
}

TEST(Portable, TimedWaitsEnd) {
  std::mutex mutex;
  std::condition_variable condition;
  std::unique_lock lock(mutex);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(condition.wait_for(lock, std::chrono::milliseconds(30)), std::cv_status::timeout);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
}

timespec in_milliseconds(clockid_t clock, long milliseconds) {
  timespec time{};
  clock_gettime(clock, &time);
  time.tv_sec += milliseconds / 1000;
  time.tv_nsec += milliseconds % 1000 * 1'000'000;
  if (time.tv_nsec >= 1'000'000'000) {
    time.tv_nsec -= 1'000'000'000;
    ++time.tv_sec;
  }
  return time;
}

TEST(Portable, WaitsByTheRealtimeClockEndAtTheSameTime) {
  pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&mutex);
  for (const long milliseconds : {-2300L, -300L, 0L, 20L, 150L}) {  // in the past, too
    for (const clockid_t clock : {CLOCK_MONOTONIC, CLOCK_REALTIME}) {
      const timespec until = in_milliseconds(CLOCK_MONOTONIC, milliseconds);
      const timespec deadline = clock == CLOCK_MONOTONIC ? until : in_milliseconds(CLOCK_REALTIME, milliseconds);
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_EQ(cond_wait_by_realtime(&cond, &mutex, clock, &deadline), ETIMEDOUT);
      EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(milliseconds - 1));
    }
  }
  std::thread([&] {
    pthread_mutex_lock(&mutex);
    pthread_cond_signal(&cond);
    pthread_mutex_unlock(&mutex);
  }).detach();
  const timespec until = in_milliseconds(CLOCK_MONOTONIC, 60'000);
  EXPECT_EQ(cond_wait_by_realtime(&cond, &mutex, CLOCK_MONOTONIC, &until), 0);
  pthread_mutex_unlock(&mutex);
}

}  // namespace
}  // namespace nfp
