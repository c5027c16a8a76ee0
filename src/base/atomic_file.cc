#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

namespace nfp {

namespace fs = std::filesystem;

namespace {

Error write_error(const std::string& path, int code) {
  return error(ErrorCode::kIo, "{}: cannot be written: {}", path, std::strerror(code));
}

// Whether the path is, or leads to, one of a process's open files: /dev/stdout, /dev/fd/63. Even where that is a
// regular file, the name that it has elsewhere is not ours to give to another.
bool is_open_file(fs::path path) {
  std::error_code code;
  for (int links = 0; links < 40; ++links) {
    const fs::path folder = fs::canonical(path.has_parent_path() ? path.parent_path() : ".", code);
    if (code) return false;
    if (folder.native().starts_with("/proc/")) return true;
    const fs::path next = fs::read_symlink(path, code);
    if (code) return false;
    path = folder / next;
  }
  return false;
}

}  // namespace

bool output_is_replaced(const std::string& path) {
  std::error_code code;
  const fs::file_type type = fs::status(path, code).type();
  return (type == fs::file_type::regular || type == fs::file_type::not_found) && !is_open_file(path);
}

bool is_mount_point(const std::string& path) {
  struct statx found = {};
  return ::statx(AT_FDCWD, path.c_str(), 0, 0, &found) == 0 && (found.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

Result<AtomicFile> AtomicFile::create_output(const std::string& path) {
  std::error_code code;
  if (output_is_replaced(path)) {
    const fs::path target = fs::is_symlink(path, code) ? fs::canonical(path, code) : fs::path(path);
    if (is_mount_point(path)) {
      return error(ErrorCode::kIo, "{}: is a mount point, which cannot be replaced; name a file in a directory", path);
    }
    const std::string replaced = code ? path : target.string();  // a link that leads nowhere is replaced itself
    warn_of_leftovers(replaced);
    struct stat before = {};
    const bool exists = ::stat(replaced.c_str(), &before) == 0;
    NFP_ASSIGN_OR_RETURN(AtomicFile file, exists ? create(replaced, 0600) : create(replaced));
    // As a shell that writes over a file, which leaves who may read it.
    if (exists) ::fchmod(file.fd_, before.st_mode & 0777);
    return file;
  }
  AtomicFile file;
  file.path_ = path;
  file.fd_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file.fd_ < 0) return write_error(path, errno);
  return file;
}

Result<AtomicFile> AtomicFile::create(const std::string& path, mode_t mode) {
  AtomicFile file;
  file.path_ = path;
  // A name that nobody can have prepared a file or a link under (O_EXCL takes neither).
  for (int tries = 0; tries < 16 && file.fd_ < 0; ++tries) {
    int code = 0;
    file.temporary_ = TemporaryPath(temporary_beside(path), [&](const std::string& name) {
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
  if (temporary_.name().empty()) return close() ? ok_status() : write_error(path_, errno);
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
