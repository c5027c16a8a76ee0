#include "engine/step_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/log.h"

namespace nfp {
namespace {

constexpr std::string_view kHead =
    "start_s,precision,fp8_share,change,tokens,prefill_tokens,sequences,waiting,prefill_pairs,prefill_keys,decode_keys,"
    "predicted_ms,table_ms,ms,drafted,accepted\n";

// The engine's thread waits no longer for whoever reads a pipe.
constexpr int kPatienceMs = 1000;

// At once and whole, so that whoever follows the file sees whole lines. Of what had no room nothing stays.
bool write_line(int fd, std::string_view line) {
  size_t put = 0;
  while (put < line.size()) {
    pollfd room{fd, POLLOUT, 0};
    if (const int ready = ::poll(&room, 1, kPatienceMs); ready <= 0) {
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0) errno = ETIMEDOUT;
      break;
    }
    const ssize_t more = ::write(fd, line.data() + put, line.size() - put);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) break;
    put += static_cast<size_t>(more);
  }
  if (put == line.size()) return true;
  const int code = errno;
  struct stat file = {};
  if (put > 0 && ::fstat(fd, &file) == 0 && S_ISREG(file.st_mode)) {
    [[maybe_unused]] const int kept = ::ftruncate(fd, file.st_size - static_cast<off_t>(put));
  }
  errno = code;
  return false;
}

}  // namespace

Result<std::unique_ptr<StepLog>> StepLog::create(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return error(ErrorCode::kUsage, "--step-log {}: {}", path, std::strerror(errno));
  std::unique_ptr<StepLog> log(new StepLog(path, fd));
  struct stat file = {};
  log->keeps_ = ::fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_size > 0;
  if (!log->keeps_ && !write_line(fd, kHead)) {
    return error(ErrorCode::kUsage, "--step-log {}: {}", path, std::strerror(errno));
  }
  return log;
}

StepLog::~StepLog() {
  if (fd_ >= 0) ::close(fd_);
}

void StepLog::add(const StepRecord& step) {
  if (fd_ < 0) return;
  const double start_s = std::chrono::duration<double>(step.start.time_since_epoch()).count();
  if (first_s_ < 0) first_s_ = start_s;
  const StepWork& work = step.work;
  const std::string line = fmt::format(
      "{:.4f},{},{:.3f},{},{},{},{},{},{:.0f},{:.0f},{:.0f},{:.3f},{:.3f},{:.3f},{},{}\n", start_s - first_s_,
      name_of(step.precision), step.fp8_share, kLevelChangeNames[static_cast<size_t>(step.change)], step.tokens,
      step.prefill_tokens, step.sequences, step.waiting, work.prefill_pairs, work.prefill_keys, work.decode_keys,
      1e3 * step.predicted_s, 1e3 * step.table_s, 1e3 * step.seconds, step.drafted, step.accepted);
  const bool begins = std::exchange(keeps_, false);
  if ((!begins || (::ftruncate(fd_, 0) == 0 && write_line(fd_, kHead))) && write_line(fd_, line)) return;
  log::warn("--step-log {}: {}; no more steps are written to it", path_, std::strerror(errno));
  ::close(std::exchange(fd_, -1));
}

}  // namespace nfp
