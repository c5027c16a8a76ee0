#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/fd.h"
#include "base/mapping_guard.h"

namespace nfp {
namespace {

Error open_error(const std::string& path, int code) {
  if (code == ENOENT || code == ENOTDIR) return error(ErrorCode::kNotFound, "{}: no such file", path);
  return error(ErrorCode::kIo, "{}: cannot be opened: {}", path, std::strerror(code));
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // waits for no pipe's writer
  if (!fd) return open_error(path, errno);
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) return open_error(path, errno);
  if (!S_ISREG(status.st_mode)) return error(ErrorCode::kInvalidInput, "{}: not a regular file", path);
  MappedFile file;
  file.path_ = path;
  file.size_ = static_cast<size_t>(status.st_size);
  if (file.size_ == 0) return file;
  void* data = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) {
    const int code = errno;
    file.size_ = 0;
    return error(ErrorCode::kIo, "{}: cannot be mapped: {}", path, std::strerror(code));
  }
  file.data_ = static_cast<const std::byte*>(data);
  guard_mapping(file.data_, file.size_, path);
  return file;
}

void MappedFile::unmap() {
  if (data_ == nullptr) return;
  unguard_mapping(data_);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::~MappedFile() { unmap(); }

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    path_ = std::move(other.path_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

void MappedFile::release(std::span<const std::byte> part) const {
  if (data_ == nullptr || part.empty()) return;
  // Whole pages inside the part only: a neighbour's first or last page may still be needed.
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(part.data()) + page - 1) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(part.data() + part.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

Result<std::string> read_text_file(const std::string& path, size_t limit) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return open_error(path, errno);
  return read_text(fd.get(), path, limit);
}

Result<std::string> read_text(int fd, const std::string& name, size_t limit) {
  std::string text;
  char buffer[1 << 16];
  while (true) {
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error(ErrorCode::kIo, "{}: cannot be read: {}", name, std::strerror(errno));
    if (got == 0) return text.erase(0, text.size() - without_byte_order_mark(text).size());
    if (text.size() + static_cast<size_t>(got) > limit) {
      return error(ErrorCode::kInvalidInput, "{}: larger than the {} bytes allowed here", name, limit);
    }
    text.append(buffer, static_cast<size_t>(got));
  }
}

}  // namespace nfp
