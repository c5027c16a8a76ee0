#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <ctime>
#include <string>

namespace nfp::log {
namespace {

std::atomic<Level> least_level{Level::kWarn};

constexpr std::string_view kNames[] = {"debug", "info", "warning", "error"};
constexpr std::string_view kColors[] = {"\x1b[36m", "\x1b[32m", "\x1b[33m\x1b[1m", "\x1b[31m\x1b[1m"};

}  // namespace

std::string without_controls(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const unsigned char next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (byte < 0x20 || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      shown += fmt::format("\\x{:02x}", next);
      ++i;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

void set_level(Level level) { least_level = level; }

void write(Level level, std::string_view message) {
  if (level < least_level || level == Level::kOff) return;
  static const bool colored = isatty(STDERR_FILENO) != 0;
  const auto index = static_cast<size_t>(level);
  std::timespec now{};
  std::tm parts{};
  clock_gettime(CLOCK_REALTIME, &now);
  localtime_r(&now.tv_sec, &parts);
  char time[32];
  const size_t size = std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &parts);
  const std::string line =
      fmt::format("{}.{:03} {}{}{} {}\n", std::string_view(time, size), now.tv_nsec / 1'000'000,
                  colored ? kColors[index] : "", kNames[index], colored ? "\x1b[m" : "", without_controls(message));
  say_text(line);  // in one call, so that lines of several threads do not mix
}

void say_text(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

}  // namespace nfp::log
