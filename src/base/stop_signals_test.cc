#include "base/stop_signals.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "base/atomic_file.h"
#include "base/log.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;

class StopSignals : public ::testing::Test {
 protected:
  void SetUp() override {
    std::signal(SIGHUP, SIG_DFL);  // also where the tests run under nohup
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    // The child of a death test runs this again: the name is the same in both, and no other test's, which may run
    // beside it.
    const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    dir_ = fs::path(::testing::TempDir()) / (std::string("nfp-stop-signals-") + test->name());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  void be_told_to_stop(std::optional<int> status) {
    const StopRemovesTemporaries stop(status);
    auto file = AtomicFile::create((dir_ / "half").string());
    const TemporaryPath folder((dir_ / "folder").string());
    fs::create_directory(folder.name());
    auto inside = AtomicFile::create(folder.name() + "/inside");
    if (!file.ok() || !inside.ok() || !file->write("half").ok()) _exit(99);
    ::kill(::getpid(), SIGTERM);
    ::sleep(60);
  }
  void outlive_hangups() {
    log::set_level(log::Level::kInfo);
    std::signal(SIGHUP, SIG_IGN);  // what nohup does
    {
      const StopRemovesTemporaries stop;
      ::kill(::getpid(), SIGHUP);
      ::usleep(50000);
    }
    block_stop_signals();
    ::kill(::getpid(), SIGHUP);
    std::thread([] {
      ::usleep(50000);
      ::kill(::getpid(), SIGTERM);
    }).detach();
    wait_for_stop_signal();
    _exit(0);
  }
  void be_told_to_stop_twice() {
    block_stop_signals();
    ::kill(::getpid(), SIGTERM);
    wait_for_stop_signal();
    ::kill(::getpid(), SIGINT);
    ::sleep(60);
  }
  void be_told_to_stop_twice_while_nobody_reads_the_log() {
    log::set_level(log::Level::kInfo);
    int ends[2];
    if (::pipe2(ends, O_NONBLOCK) != 0) _exit(99);
    while (::write(ends[1], "x", 1) == 1) {
    }
    ::fcntl(ends[1], F_SETFL, 0);
    ::dup2(ends[1], STDERR_FILENO);
    block_stop_signals();
    ::kill(::getpid(), SIGTERM);
    std::thread([] {
      ::usleep(50000);
      ::kill(::getpid(), SIGTERM);
    }).detach();
    ::alarm(60);
    wait_for_stop_signal();
    _exit(98);
  }
  void write_to_a_broken_pipe() {
    std::signal(SIGPIPE, SIG_DFL);
    const StopRemovesTemporaries outer;
    const StopRemovesTemporaries stop;
    auto file = AtomicFile::create((dir_ / "half").string());
    int ends[2];
    if (!file.ok() || ::pipe(ends) != 0) _exit(99);
    ::close(ends[0]);
    if (::write(ends[1], "x", 1) < 0) _exit(98);
    _exit(97);
  }
  void be_told_to_stop_while_files_are_made() {
    const StopRemovesTemporaries stop;
    const TemporaryPath folder((dir_ / "folder").string());
    fs::create_directory(folder.name());
    std::atomic<int> made{0};
    std::thread writer([&] {
      for (int i = 0;; ++i, ++made) std::ofstream(folder.name() + "/" + std::to_string(i)) << i;
    });
    while (made.load() < 100) std::this_thread::yield();
    ::kill(::getpid(), SIGTERM);
    ::sleep(60);
  }
  // The moment that another program sees, who waits for the name to appear and then sends the signal.
  void be_told_to_stop_as_it_is_made(bool folder) {
    const StopRemovesTemporaries stop;
    for (int i = 0;; ++i) {
      const TemporaryPath made((dir_ / std::to_string(i)).string(), [&](const std::string& name) {
        if (folder ? !fs::create_directory(name) : !std::ofstream(name).put('x')) _exit(99);
        if (i == 3) {
          ::kill(::getpid(), SIGTERM);
          ::usleep(20000);  // time enough to remove what is known, were it not for the lock
        }
        return true;
      });
      if (i == 3) ::sleep(60);
    }
  }
  fs::path dir_;
};

using StopSignalsDeathTest = StopSignals;

TEST_F(StopSignalsDeathTest, TheProcessEndsByTheSignalAndLeavesNothing) {
  EXPECT_EXIT(be_told_to_stop(std::nullopt), ::testing::KilledBySignal(SIGTERM), "");
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(StopSignalsDeathTest, AHangupThatIsIgnoredStaysSo) {
  EXPECT_EXIT(outlive_hangups(), ::testing::ExitedWithCode(0), "received SIGTERM");
}

TEST_F(StopSignalsDeathTest, TheSecondOneEndsAtOnce) {
  EXPECT_EXIT(be_told_to_stop_twice(), ::testing::ExitedWithCode(130), "");
}

TEST_F(StopSignalsDeathTest, TheSecondOneEndsAlsoWhereNobodyReadsTheLog) {
  EXPECT_EXIT(be_told_to_stop_twice_while_nobody_reads_the_log(), ::testing::ExitedWithCode(130), "");
}

TEST_F(StopSignalsDeathTest, NorDoesABrokenPipeLeaveAnything) {
  EXPECT_EXIT(write_to_a_broken_pipe(), ::testing::KilledBySignal(SIGPIPE), "");
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(StopSignalsDeathTest, OrWithTheStatusAskedFor) {
  EXPECT_EXIT(be_told_to_stop(7), ::testing::ExitedWithCode(7), "");
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(StopSignalsDeathTest, NothingIsLeftOfAFolderThatIsBeingFilled) {
  for (int i = 0; i < 5; ++i) {
    EXPECT_EXIT(be_told_to_stop_while_files_are_made(), ::testing::KilledBySignal(SIGTERM), "");
    EXPECT_TRUE(fs::is_empty(dir_));
  }
}

TEST_F(StopSignalsDeathTest, NothingIsLeftOfWhatIsBeingMade) {
  for (const bool folder : {false, true}) {
    EXPECT_EXIT(be_told_to_stop_as_it_is_made(folder), ::testing::KilledBySignal(SIGTERM), "");
    EXPECT_TRUE(fs::is_empty(dir_));
  }
}

TEST_F(StopSignals, WhatWasNotMadeHasNoName) {
  const TemporaryPath none((dir_ / "none").string(), [](const std::string&) { return false; });
  EXPECT_TRUE(none.name().empty());
}

TEST_F(StopSignals, AfterwardsSignalsAreAsBefore) {
  sigset_t before, during, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  {
    const StopRemovesTemporaries outer;
    const StopRemovesTemporaries inner(0);
    pthread_sigmask(SIG_SETMASK, nullptr, &during);
  }
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_EQ(sigismember(&during, number), 1);
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number));
  }
}

TEST_F(StopSignals, ATemporaryThatMovedOnIsLeftAlone) {
  const std::string name = (dir_ / "kept").string();
  {
    TemporaryPath path(name);
    TemporaryPath moved = std::move(path);
    fs::create_directory(name);
    moved.release();
  }
  EXPECT_TRUE(fs::exists(name));
  { const TemporaryPath path(name); }
  EXPECT_FALSE(fs::exists(name));
}

TEST_F(StopSignals, WhatIsDoneMeanwhileAboutBrokenPipesStays) {
  const auto before = std::signal(SIGPIPE, SIG_DFL);
  {
    const StopRemovesTemporaries stop;
    std::signal(SIGPIPE, SIG_IGN);
  }
  EXPECT_EQ(std::signal(SIGPIPE, before), SIG_IGN);
}

}  // namespace
}  // namespace nfp
