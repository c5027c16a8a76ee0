#include "base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <regex>
#include <string>
#include <thread>
#include <vector>

namespace nfp {
namespace {

std::string logged(log::Level least) {
  log::set_level(least);
  ::testing::internal::CaptureStderr();
  log::debug("d");
  log::info("i {}", 1);
  log::warn("w");
  log::error("e");
  log::set_level(log::Level::kWarn);
  return ::testing::internal::GetCapturedStderr();
}

TEST(Log, WritesOneLineAnEventFromItsLevelOn) {
  const std::string time = R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d )";
  EXPECT_TRUE(std::regex_match(logged(log::Level::kInfo),
                               std::regex(time + "info i 1\n" + time + "warning w\n" + time + "error e\n")));
  EXPECT_TRUE(std::regex_match(logged(log::Level::kError), std::regex(time + "error e\n")));
  EXPECT_EQ(logged(log::Level::kOff), "");
}

TEST(Log, TimesCarryTheirZone) {
  for (const auto& [zone, offset] : {std::pair("UTC", "+00:00"), {"NST3:30", "-03:30"}, {"IST-5:30", "+05:30"}}) {
    ::setenv("TZ", zone, 1);
    ::tzset();
    const std::string line = logged(log::Level::kError);
    EXPECT_EQ(line.substr(23), std::string(offset) + " error e\n");
  }
  ::unsetenv("TZ");
  ::tzset();
}

std::string read_all(int fd) {
  std::string text;
  char piece[4096];
  for (ssize_t n = 0; (n = ::read(fd, piece, sizeof(piece))) > 0;) text.append(piece, static_cast<size_t>(n));
  return text;
}

// Exits with 0 where a pipe, or a socket (systemd's journal), that nobody reads holds up nobody, and its reader learns
// of what is missing.
void log_where_nobody_reads(bool socket) {
  int ends[2];
  if ((socket ? ::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) : ::pipe2(ends, O_CLOEXEC)) != 0) ::_exit(99);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  ::dup2(ends[1], STDERR_FILENO);
  log::never_wait();
  ::alarm(60);
  constexpr long kThreads = 4, kLines = 1000;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < kLines; ++i) log::error("{}", std::string(i % 100 == 0 ? 6000 : 100, 'x'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string taken = read_all(ends[0]);
  log::error("read again");
  const std::string after = read_all(ends[0]);
  log::error("and again");
  const std::string later = read_all(ends[0]);
  std::smatch found;
  const std::regex told(R"(\n?\S+ warning (\d+) lines of this log were not taken\n\S+ error read again\n)");
  if (!std::regex_match(after, found, told)) ::_exit(1);
  // A line whose beginning was taken is among the missing ones.
  const auto whole = std::count(taken.begin(), taken.end(), '\n');
  if (whole < 100 || whole + std::stol(found[1]) != kThreads * kLines) ::_exit(2);
  if (!std::regex_match(later, std::regex(R"(\S+ error and again\n)"))) ::_exit(3);
  ::_exit(0);
}

TEST(LogDeathTest, HoldsUpNobodyWhereItIsNotRead) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(log_where_nobody_reads(/*socket=*/false), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(log_where_nobody_reads(/*socket=*/true), ::testing::ExitedWithCode(0), "");
}

TEST(Log, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(log::without_controls("a\x1b[31m\n\x7f b\xc2\x9b\xc2\xa0\xc3\x9b"),
            "a\\x1b[31m\\x0a\\x7f b\\x9b\xc2\xa0\xc3\x9b");
  EXPECT_EQ(log::without_controls("\xc2"), "\xc2");
  ::testing::internal::CaptureStderr();
  log::warn("a name\nwith\x1b[2J");
  EXPECT_TRUE(::testing::internal::GetCapturedStderr().ends_with(" a name\\x0awith\\x1b[2J\n"));
}

}  // namespace
}  // namespace nfp
