#include "base/log.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>

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
  const std::string time = R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} )";
  EXPECT_TRUE(std::regex_match(logged(log::Level::kInfo),
                               std::regex(time + "info i 1\n" + time + "warning w\n" + time + "error e\n")));
  EXPECT_TRUE(std::regex_match(logged(log::Level::kError), std::regex(time + "error e\n")));
  EXPECT_EQ(logged(log::Level::kOff), "");
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
