#include "io/staged_directory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/atomic_file.h"
#include "base/byte_size.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

bool is_inside(const fs::path& inner, const fs::path& outer) {
  std::error_code code;
  const fs::path relative = fs::weakly_canonical(inner, code).lexically_relative(fs::weakly_canonical(outer, code));
  return !relative.empty() && *relative.begin() != "..";
}

// Its name leads into it from elsewhere, and is no name to rename.
bool names_itself(const fs::path& path) { return path.filename() == "." || path.filename() == ".."; }

// What --force must not destroy, and what cannot be renamed when all is written.
Status check_replaceable(const std::string& path, const std::string& source) {
  std::error_code code;
  if (is_mount_point(path)) {
    return error(ErrorCode::kIo, "{}: is a mount point, which cannot be replaced; name a directory in it", path);
  }
  if (fs::equivalent(path, fs::current_path(code), code)) {
    return error(ErrorCode::kIo,
                 "{}: is the current directory, which is not replaced under the shell that is in it; name another, or "
                 "one in it",
                 path);
  }
  if (is_inside(source, path)) {
    return error(ErrorCode::kIo, "{}: holds the source {}; choose another place", path, source);
  }
  if (!fs::is_directory(path, code)) {
    return error(ErrorCode::kIo, "{}: is not a directory, and will not be replaced by one", path);
  }
  if (!fs::is_empty(path, code) && !fs::exists(fs::path(path) / "config.json", code)) {
    return error(ErrorCode::kIo, "{}: is not a model's directory, and will not be replaced by one", path);
  }
  return ok_status();
}

}  // namespace

Result<StagedDirectory> StagedDirectory::create(const std::string& path, bool force, const std::string& source,
                                                uint64_t needed) {
  StagedDirectory staged;
  staged.path_ = path;
  staged.force_ = force;
  if (path.empty()) return error(ErrorCode::kUsage, "the directory to write has an empty name; give it one");
  while (staged.path_.size() > 1 && staged.path_.back() == '/') staged.path_.pop_back();
  std::error_code code;
  const bool exists = fs::exists(fs::symlink_status(staged.path_, code));
  if (exists && !force) {
    return error(ErrorCode::kIo, "{}: is there already; --force replaces it", staged.path_);
  }
  // A link stays: the directory that it leads to is replaced, on the disk that it was put on.
  if (fs::is_directory(staged.path_, code) && (fs::is_symlink(staged.path_, code) || names_itself(staged.path_))) {
    staged.path_ = fs::canonical(staged.path_, code).string();
  }
  if (exists) NFP_RETURN_IF_ERROR(check_replaceable(staged.path_, source));
  fs::path parent = fs::path(staged.path_).parent_path();
  if (parent.empty()) parent = ".";
  if (const auto space = fs::space(parent, code); !code && space.available < needed) {
    return error(ErrorCode::kIo, "{}: needs {}, but only {} are free on that disk", staged.path_, human_bytes(needed),
                 human_bytes(space.available));
  }
  warn_of_leftovers(staged.path_);
  staged.temporary_ = TemporaryPath(temporary_beside(staged.path_),
                                    [&](const std::string& name) { return fs::create_directory(name, code); });
  if (staged.temporary_.name().empty()) {
    return error(ErrorCode::kIo, "{}: cannot be created: {}", staged.path_,
                 code ? code.message() : std::string("it is there already"));
  }
  return staged;
}

Status StagedDirectory::commit() {
  const auto rename_with = [this](unsigned flags) {
    return ::renameat2(AT_FDCWD, path().c_str(), AT_FDCWD, path_.c_str(), flags) == 0;
  };
  std::error_code code;
  std::string old;
  // A file system that knows no flags is left with the plain rename below, which replaces no directory that holds
  // anything.
  if (!force_) {
    if (rename_with(RENAME_NOREPLACE)) {
      temporary_.release();
      return ok_status();
    }
    if (errno == EEXIST) {
      return error(ErrorCode::kIo, "{}: has been made while this was written; --force replaces it", path_);
    }
  } else if (rename_with(RENAME_EXCHANGE)) {
    temporary_ = {};  // what was there before goes as temporaries go
    return ok_status();
  } else if (errno != ENOENT) {
    old = fmt::format("{}.old-{}", path_, ::getpid());
    fs::rename(path_, old, code);
    if (code == std::errc::cross_device_link) {  // a directory of a container's image, which can only be removed
      old.clear();
      fs::remove_all(path_, code);
      if (!code) fs::rename(path(), path_, code);
      Error failed =
          error(ErrorCode::kIo, "{}: cannot be replaced: {}; what was written is {}", path_, code.message(), path());
      temporary_.release();  // in its place, or all that there is
      return code ? Status(std::move(failed)) : ok_status();
    }
    if (code) return error(ErrorCode::kIo, "{}: cannot be replaced: {}", path_, code.message());
  }
  fs::rename(path(), path_, code);
  if (code) {
    const std::string reason = code.message();
    if (!old.empty()) fs::rename(old, path_, code);
    return error(ErrorCode::kIo, "{}: cannot be renamed to {}: {}", path(), path_, reason);
  }
  temporary_.release();
  if (!old.empty()) fs::remove_all(old, code);
  return ok_status();
}

Error StagedDirectory::at_place(Error error) const {
  size_t at = path().empty() ? std::string::npos : error.message.find(path());
  for (; at != std::string::npos; at = error.message.find(path(), at + path_.size())) {
    error.message.replace(at, path().size(), path_);
  }
  return error;
}

}  // namespace nfp
