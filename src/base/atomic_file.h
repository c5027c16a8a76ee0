// Writes a file under a temporary name beside its place and renames it when it is complete, so that nobody ever sees
// a half-written one. An object that goes away without commit() removes the temporary.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "base/temporary_path.h"

namespace nfp {

class AtomicFile {
 public:
  // `mode`: who may read the file, less what the umask takes away.
  static Result<AtomicFile> create(const std::string& path, mode_t mode = 0644);
  // For a path that a person named: a link stays and leads to what is replaced, and what is no file (a device, a pipe,
  // this process's own output) is written as it comes, since a rename would put a file in its place. Error: a mount
  // point, which cannot be replaced.
  static Result<AtomicFile> create_output(const std::string& path);
  ~AtomicFile() { close(); }
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Errors name the path and the reason (a full disk: "No space left on device").
  Status write(std::span<const std::byte> bytes);
  Status write(std::string_view text) { return write(std::as_bytes(std::span(text))); }
  // Flushes to the disk and renames. Call once, last.
  Status commit();

 private:
  AtomicFile() = default;
  bool close();
  std::string path_;
  TemporaryPath temporary_;
  int fd_ = -1;
};

// Does create_output() put a new file in this path's place? False: it writes to what is there.
bool output_is_replaced(const std::string& path);

// Whether something is mounted there, so that its name cannot be given to another. False too where an older kernel does
// not say.
bool is_mount_point(const std::string& path);

// The whole file at once, as AtomicFile does: where it fails, what was there before is still there.
Status write_file(const std::string& path, std::string_view text, mode_t mode = 0644);

}  // namespace nfp
