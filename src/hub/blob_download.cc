#include "hub/blob_download.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/log.h"
#include "hub/checksum.h"

namespace nfp {
namespace {

constexpr size_t kReadChunk = size_t{1} << 20;

bool stopped(const std::atomic<bool>* stop) { return stop != nullptr && stop->load(); }

Error stopped_error() { return error(ErrorCode::kCancelled, "stopped"); }

// Of "bytes 5-9/10"; nothing where it says something else.
bool range_begins_at(const std::string& content_range, uint64_t offset) {
  constexpr std::string_view kBytes = "bytes ";
  if (!content_range.starts_with(kBytes)) return false;
  uint64_t first = 0;
  const char* begin = content_range.data() + kBytes.size();
  const auto [end, code] = std::from_chars(begin, content_range.data() + content_range.size(), first);
  return code == std::errc() && *end == '-' && first == offset;
}

class Download {
 public:
  Download(HttpClient& client, const BlobDownload& what, int fd)
      : client_(client), what_(what), path_(incomplete_path()), fd_(fd), checksum_(what.file.etag, what.file.size) {}

  std::string incomplete_path() const { return what_.blobs + "/" + what_.file.etag + ".incomplete"; }

  Status run() {
    NFP_RETURN_IF_ERROR(read_what_is_there());
    bool again = false;
    while (true) {
      NFP_RETURN_IF_ERROR(transfer());
      const std::string got = checksum_.hex();
      if (got == what_.file.etag) break;
      NFP_RETURN_IF_ERROR(start_over());
      // What was resumed may have been damaged before; what came in one go was sent so.
      if (again || !resumed_) {
        return error(ErrorCode::kInvalidInput, "{}: {}: arrived with {} {}, expected {}; it was thrown away. Try again",
                     what_.name.text(), what_.file.path, checksum_.kind(), got, what_.file.etag);
      }
      again = true;
      resumed_ = false;
    }
    if (::fsync(fd_) != 0 || std::rename(path_.c_str(), (what_.blobs + "/" + what_.file.etag).c_str()) != 0) {
      return write_error();
    }
    return ok_status();
  }

 private:
  Error write_error() const {
    const int code = errno;
    return error(ErrorCode::kIo, "{}: cannot be written: {}{}", path_, std::strerror(code),
                 code == ENOSPC || code == EDQUOT ? "; make room and run it again: what is there is kept" : "");
  }

  Status read_what_is_there() {
    struct stat state = {};
    if (::fstat(fd_, &state) != 0) return write_error();
    if (static_cast<uint64_t>(state.st_size) > what_.file.size) return start_over();
    std::vector<std::byte> chunk(kReadChunk);
    while (true) {
      if (stopped(what_.stop)) return stopped_error();
      const ssize_t got = ::read(fd_, chunk.data(), chunk.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return write_error();
      if (got == 0) break;
      checksum_.add({chunk.data(), static_cast<size_t>(got)});
      have_ += static_cast<uint64_t>(got);
    }
    resumed_ = have_ > 0;
    return ok_status();
  }

  Status start_over() {
    if (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) != 0) return write_error();
    if (what_.progress) what_.progress(-static_cast<int64_t>(have_));
    have_ = 0;
    checksum_.reset();
    return ok_status();
  }

  Status append(std::span<const std::byte> part) {
    if (part.size() > what_.file.size - have_) {
      return error(ErrorCode::kInvalidInput, "{}: {}: more bytes arrive than the {} that the hub lists",
                   what_.name.text(), what_.file.path, what_.file.size);
    }
    checksum_.add(part);
    while (!part.empty()) {
      const ssize_t put = ::write(fd_, part.data(), part.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return write_error();
      have_ += static_cast<uint64_t>(put);
      part = part.subspan(static_cast<size_t>(put));
      if (what_.progress) what_.progress(put);
    }
    return ok_status();
  }

  // Until all bytes are there.
  Status transfer() {
    auto delay = what_.retry_delay;
    int fruitless = 0;
    uint64_t most = have_;  // of have_ so far: a start over brings the same bytes again
    while (have_ < what_.file.size) {
      auto reply = attempt();
      auto pause = delay;
      Error problem;
      if (reply.ok()) {
        if (have_ == what_.file.size) break;
        if (reply->status == 416 && have_ > 0) {
          problem = error(ErrorCode::kIo, "{}: {}: the server has no more than {} of the {} bytes that the hub lists",
                          what_.name.text(), what_.file.path, have_, what_.file.size);
          NFP_RETURN_IF_ERROR(start_over());
        } else if (reply->status / 100 == 2) {
          problem = error(ErrorCode::kIo, "{}: {}: ended after {} of {} bytes", what_.name.text(), what_.file.path,
                          have_, what_.file.size);
        } else {
          problem = refusal(*reply, *what_.access, what_.name, what_.file.path);
          if (!is_passing(*reply)) return problem;
        }
        pause = std::max(pause, asked_delay(*reply));
      } else if (reply.error().code == ErrorCode::kIo && !sink_failed_) {
        problem = std::move(reply).error();
      } else {
        return std::move(reply).error();
      }
      if (have_ > most) {
        most = have_;
        fruitless = 0;
        delay = what_.retry_delay;
      } else if (++fruitless == kMaxTries) {
        return error(problem.code, "{} (tried {} times; run it again to go on)", problem.message, kMaxTries);
      } else {
        delay *= 2;
      }
      NFP_RETURN_IF_ERROR(wait_to_retry(problem, pause, what_.stop));
    }
    return ok_status();
  }

  Result<HttpReply> attempt() {
    HttpRequest request;
    request.url = file_url(*what_.access, what_.name.repository, what_.commit, what_.file.path);
    request.token = what_.access->token;
    request.offset = have_;
    sink_failed_ = false;
    bool first = true;
    return client_.fetch(
        request,
        [&](const HttpReply& reply, std::span<const std::byte> part) {
          Status status;
          if (std::exchange(first, false) && have_ > 0) {
            // A server that does not know ranges sends everything, and one that errs another part.
            const bool follows = reply.status == 206 && range_begins_at(reply.header("content-range"), have_);
            if (!follows && reply.status == 206) {
              status = error(ErrorCode::kInvalidInput, "{}: {}: the server sends another part than was asked for ({})",
                             what_.name.text(), what_.file.path, reply.header("content-range"));
            } else if (!follows) {
              status = start_over();
            }
          }
          if (status.ok()) status = append(part);
          sink_failed_ = !status.ok();
          return status;
        },
        what_.stop);
  }

  HttpClient& client_;
  const BlobDownload& what_;
  const std::string path_;
  const int fd_;
  Checksum checksum_;
  uint64_t have_ = 0;  // bytes in the file, all of them in the checksum
  bool resumed_ = false;
  bool sink_failed_ = false;
};

bool is_complete(const std::string& path, uint64_t size) {
  struct stat state = {};
  return ::stat(path.c_str(), &state) == 0 && S_ISREG(state.st_mode) && static_cast<uint64_t>(state.st_size) == size;
}

}  // namespace

uint64_t bytes_there(const std::string& blobs, const HubFile& file) {
  const std::string path = blobs + "/" + file.etag;
  if (is_complete(path, file.size)) return file.size;
  struct stat state = {};
  if (::stat((path + ".incomplete").c_str(), &state) != 0) return 0;
  const auto size = static_cast<uint64_t>(state.st_size);
  return size <= file.size ? size : 0;
}

Status download_blob(HttpClient& client, const BlobDownload& download) {
  const std::string path = download.blobs + "/" + download.file.etag;
  if (is_complete(path, download.file.size)) return ok_status();
  const Fd lock(::open(download.lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock) {
    return error(ErrorCode::kIo, "{}: cannot be made: {}", download.lock, std::strerror(errno));
  }
  constexpr int kTriesInSilence = 10;                                          // about a second
  for (int tries = 1; ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0; ++tries) {  // somebody else downloads it
    if (errno != EWOULDBLOCK && errno != EINTR) break;                         // a file system without locks
    NFP_RETURN_IF_ERROR(wait(std::chrono::milliseconds(100), download.stop));
    if (tries == kTriesInSilence) {
      log::warn("{}: {}: another process downloads it, and has locked {}; waiting for that to end",
                download.name.text(), download.file.path, download.lock);
    }
  }
  if (is_complete(path, download.file.size)) {
    if (download.progress) download.progress(static_cast<int64_t>(download.file.size));
    return ok_status();
  }
  const std::string incomplete = path + ".incomplete";
  const Fd file(::open(incomplete.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file) return error(ErrorCode::kIo, "{}: cannot be written: {}", incomplete, std::strerror(errno));
  return Download(client, download, file.get()).run();
}

}  // namespace nfp
