#include "base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace nfp {
namespace {

Error write_error(const std::string& path, int code) {
  return error(ErrorCode::kIo, "{}: cannot be written: {}", path, std::strerror(code));
}

}  // namespace

Result<AtomicFile> AtomicFile::create(const std::string& path, mode_t mode) {
  AtomicFile file;
  file.path_ = path;
  // A name that nobody can have prepared a file or a link under (O_EXCL takes neither).
  for (int tries = 0; tries < 16 && file.fd_ < 0; ++tries) {
    int code = 0;
    file.temporary_ = TemporaryPath(path + temporary_suffix(), [&](const std::string& name) {
      file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      code = errno;
      return file.fd_ >= 0;
    });
    if (file.fd_ < 0 && code != EEXIST) return write_error(path, code);
  }
  if (file.fd_ < 0) return write_error(path, EEXIST);
  return file;
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::move(other.temporary_)), fd_(std::exchange(other.fd_, -1)) {}

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  std::swap(path_, other.path_);
  temporary_ = std::move(other.temporary_);
  std::swap(fd_, other.fd_);
  return *this;
}

bool AtomicFile::close() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

Status AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return write_error(path_, errno);
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return ok_status();
}

Status AtomicFile::commit() {
  if (::fsync(fd_) != 0) return write_error(path_, errno);
  if (!close()) return write_error(path_, errno);
  if (std::rename(temporary_.name().c_str(), path_.c_str()) != 0) return write_error(path_, errno);
  temporary_.release();
  return ok_status();
}

Status write_file(const std::string& path, std::string_view text, mode_t mode) {
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path, mode));
  NFP_RETURN_IF_ERROR(file.write(text));
  return file.commit();
}

}  // namespace nfp
