// Logging to stderr, one line an event. Programs set the level once; libraries only log.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace nfp::log {

enum class Level { kDebug, kInfo, kWarn, kError, kOff };

// Names in models and servers' answers are others' words: what a terminal would obey rather than show, and ends of
// lines (C0, DEL, C1 in UTF-8), becomes \xNN.
std::string without_controls(std::string_view text);

void set_level(Level level);
void write(Level level, std::string_view message);  // without controls
// The text as it is: what a program tells people beside its output. Where standard error cannot be written (closed, a
// full disk) there is nobody to tell, and the work goes on.
void say_text(std::string_view text);
// From now on nobody waits for whoever reads standard error, but for a moment: what a full pipe or a stopped terminal
// does not take is dropped, and the next line that it takes is one that counts what is missing. For a server; a program
// that works for whoever reads it (`... 2>&1 | less`) is better held up.
void never_wait();

template <typename... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  say_text(fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kWarn, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace nfp::log
