#include "base/log.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <string>

namespace nfp::log {
namespace {

std::atomic<Level> least_level{Level::kWarn};

constexpr std::string_view kNames[] = {"debug", "info", "warning", "error"};
constexpr std::string_view kColors[] = {"\x1b[36m", "\x1b[32m", "\x1b[33m\x1b[1m", "\x1b[31m\x1b[1m"};

// RFC 3339, in local time.
std::string timestamp() {
  std::timespec now{};
  std::tm parts{};
  clock_gettime(CLOCK_REALTIME, &now);
  localtime_r(&now.tv_sec, &parts);
  char time[32];
  const size_t size = std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &parts);
  const long minutes = std::abs(parts.tm_gmtoff) / 60;
  return fmt::format("{}.{:03}{}{:02}:{:02}", std::string_view(time, size), now.tv_nsec / 1'000'000,
                     parts.tm_gmtoff < 0 ? '-' : '+', minutes / 60, minutes % 60);
}

std::string make_line(Level level, std::string_view message) {
  static const bool colored = isatty(STDERR_FILENO) != 0;
  const auto index = static_cast<size_t>(level);
  return fmt::format("{} {}{}{} {}\n", timestamp(), colored ? kColors[index] : "", kNames[index],
                     colored ? "\x1b[m" : "", without_controls(message));
}

// Standard error for a program that must not wait for whoever reads it.
class Unwaiting {
 public:
  Unwaiting() {
    // A description of our own, where there is one to be had: that of standard error is the shell's, too, and not ours
    // to make non-blocking. Not of a file, in which it would write at a place of its own.
    struct stat kind = {};
    if (::fstat(STDERR_FILENO, &kind) != 0) return;
    socket_ = S_ISSOCK(kind.st_mode);  // systemd's journal
    int own = -1;
    if (S_ISFIFO(kind.st_mode) || ::isatty(STDERR_FILENO) != 0) {
      own = ::open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    }
    if (own >= 0) to_ = own;
    blocks_ = own < 0 && !socket_;
  }

  void say(std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (lost_ == 0 || put(make_line(Level::kWarn, fmt::format("{} lines of this log were not taken", lost_)))) {
      lost_ = 0;
      if (put(text)) return;
    }
    lost_ += static_cast<uint64_t>(std::count(text.begin(), text.end(), '\n'));
  }

 private:
  using Clock = std::chrono::steady_clock;
  // A reader that is only slow is waited for; one that did not come in that time is not waited for again.
  static constexpr std::chrono::milliseconds kPatience{100};

  bool put(std::string_view text) {
    if (cut_ && put_piece("\n") != 1) return false;
    cut_ = false;
    while (!text.empty()) {
      const ssize_t taken = put_piece(text.substr(0, PIPE_BUF));  // for so many there is room where there is any
      if (taken < 0) return false;
      cut_ = taken < std::ssize(text);
      text.remove_prefix(static_cast<size_t>(taken));
    }
    return true;
  }

  ssize_t put_piece(std::string_view piece) {
    const auto end = Clock::now() + (kPatience * (lost_ == 0 ? 1 : 0));
    while (true) {
      const ssize_t taken = blocks_ && !wait_for_room(0) ? -1 : write_now(piece);
      if (taken >= 0) return taken;
      if (errno != EINTR && errno != EAGAIN) return -1;
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
      if (left <= 0) return -1;
      wait_for_room(static_cast<int>(left));
    }
  }

  // Else errno is EAGAIN, or what poll() says.
  bool wait_for_room(int milliseconds) const {
    pollfd room{to_, POLLOUT, 0};
    errno = EAGAIN;
    return ::poll(&room, 1, milliseconds) > 0;
  }

  ssize_t write_now(std::string_view piece) const {
    if (socket_) return ::send(to_, piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return ::write(to_, piece.data(), piece.size());
  }

  std::mutex mutex_;
  int to_ = STDERR_FILENO;
  bool socket_ = false;
  bool blocks_ = true;  // where it is written to without room
  bool cut_ = false;    // the last line's end was not taken
  uint64_t lost_ = 0;
};

std::atomic<Unwaiting*> unwaiting{nullptr};  // never destroyed: threads may log to the very end

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
  say_text(make_line(level, message));  // in one call, so that lines of several threads do not mix
}

void say_text(std::string_view text) {
  if (Unwaiting* const out = unwaiting.load()) return out->say(text);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

void never_wait() {
  static auto* const out = new Unwaiting;
  unwaiting = out;
}

}  // namespace nfp::log
