#include "io/staged_directory.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <utility>

namespace nfp {

namespace fs = std::filesystem;

Result<StagedDirectory> StagedDirectory::create(const std::string& path, bool force) {
  StagedDirectory staged;
  staged.path_ = path;
  while (staged.path_.size() > 1 && staged.path_.back() == '/') staged.path_.pop_back();
  std::error_code code;
  const bool exists = fs::exists(fs::symlink_status(staged.path_, code));
  if (exists && !force) {
    return error(ErrorCode::kIo, "{}: is there already; --force replaces it", staged.path_);
  }
  if (exists && !fs::is_directory(staged.path_, code)) {
    return error(ErrorCode::kIo, "{}: is not a directory, and will not be replaced by one", staged.path_);
  }
  std::string temporary = fmt::format("{}.tmp-{}", staged.path_, ::getpid());
  if (!fs::create_directory(temporary, code)) {
    return error(ErrorCode::kIo, "{}: cannot be created: {}", temporary,
                 code ? code.message() : std::string("it is there already"));
  }
  staged.temporary_ = std::move(temporary);
  return staged;
}

StagedDirectory::~StagedDirectory() {
  if (temporary_.empty()) return;
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

StagedDirectory::StagedDirectory(StagedDirectory&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})) {}

Status StagedDirectory::commit() {
  std::error_code code;
  std::string old;
  if (fs::exists(path_, code)) {
    old = fmt::format("{}.old-{}", path_, ::getpid());
    fs::rename(path_, old, code);
    if (code) return error(ErrorCode::kIo, "{}: cannot be replaced: {}", path_, code.message());
  }
  fs::rename(temporary_, path_, code);
  if (code) {
    const std::string reason = code.message();
    if (!old.empty()) fs::rename(old, path_, code);
    return error(ErrorCode::kIo, "{}: cannot be renamed to {}: {}", temporary_, path_, reason);
  }
  temporary_.clear();
  if (!old.empty()) fs::remove_all(old, code);
  return ok_status();
}

}  // namespace nfp
