// A file mapped for reading. The bytes stay valid as long as the object, and as the file keeps its length: see
// mapping_guard.h.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp {

class MappedFile {
 public:
  MappedFile() = default;
  // Fails with kNotFound or kIo, naming the path. An empty file maps to an empty span.
  static Result<MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

  // Tells the kernel that these bytes (a part of bytes()) will not be read again, so that reading a model once
  // leaves no second copy of it resident.
  void release(std::span<const std::byte> part) const;

 private:
  void unmap();

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Windows's editors begin a file with one.
inline std::string_view without_byte_order_mark(std::string_view file) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  return file.starts_with(kMark) ? file.substr(kMark.size()) : file;
}

// Reads a whole small file (config, template), without a byte order mark. Fails when it is larger than `limit` bytes.
Result<std::string> read_text_file(const std::string& path, size_t limit = size_t{256} << 20);
// The rest of what is open already, by the name that errors give it.
Result<std::string> read_text(int fd, const std::string& name, size_t limit = size_t{256} << 20);

}  // namespace nfp
