#include "io/output_directory.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

namespace nfp {

namespace fs = std::filesystem;

namespace {

Error cannot(const std::string& path, const char* what, const std::error_code& code) {
  return error(ErrorCode::kIo, "{}: cannot be {}: {}", path, what, code.message());
}

bool is_inside(const fs::path& inner, const fs::path& outer) {
  std::error_code code;
  const fs::path relative = fs::weakly_canonical(inner, code).lexically_relative(fs::weakly_canonical(outer, code));
  return !relative.empty() && *relative.begin() != "..";
}

Status check_place(const std::string& path, bool force, const std::string& source) {
  std::error_code code;
  if (!fs::exists(fs::symlink_status(path, code))) return ok_status();
  if (!force) return error(ErrorCode::kUsage, "{}: exists already; --force replaces it", path);
  if (is_inside(source, path)) {
    return error(ErrorCode::kUsage, "{}: holds the source {}; choose another place", path, source);
  }
  if (!fs::is_directory(path, code))
    return error(ErrorCode::kUsage, "{}: is not a directory; choose another place", path);
  if (!fs::is_empty(path, code) && !fs::exists(fs::path(path) / "config.json", code)) {
    return error(ErrorCode::kUsage, "{}: is not a model's directory, so it is not replaced; choose another place",
                 path);
  }
  return ok_status();
}

void sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  (void)::fsync(fd);
  ::close(fd);
}

}  // namespace

Result<OutputDirectory> OutputDirectory::create(const std::string& path, bool force, const std::string& source,
                                                uint64_t needed) {
  std::string place = path;
  while (place.size() > 1 && place.back() == '/') place.pop_back();
  if (place.empty()) return error(ErrorCode::kUsage, "the output directory has no name");
  NFP_RETURN_IF_ERROR(check_place(place, force, source));
  std::error_code code;
  fs::path parent = fs::path(place).parent_path();
  if (parent.empty()) parent = ".";
  if (!fs::is_directory(parent, code)) {
    return error(ErrorCode::kNotFound, "{}: no such directory; create it first", parent.string());
  }
  if (const auto space = fs::space(parent, code); !code && space.available < needed) {
    return error(ErrorCode::kIo, "{}: needs {:.2f} GB, but only {:.2f} GB are free on that disk", place,
                 static_cast<double>(needed) / 1e9, static_cast<double>(space.available) / 1e9);
  }
  std::string temporary = fmt::format("{}.tmp-{}", place, ::getpid());
  fs::remove_all(temporary, code);
  if (!fs::create_directory(temporary, code)) return cannot(place, "created", code);
  return OutputDirectory(std::move(place), std::move(temporary));
}

OutputDirectory::OutputDirectory(OutputDirectory&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})) {}

OutputDirectory::~OutputDirectory() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

Status OutputDirectory::make_folder(const std::string& name) const {
  std::error_code code;
  fs::create_directories(file(name), code);
  return code ? Status(cannot(path_ + "/" + name, "created", code)) : ok_status();
}

Status OutputDirectory::commit() {
  sync_folder(temporary_);
  std::error_code code;
  const std::string old = fmt::format("{}.old-{}", path_, ::getpid());
  const bool replaces = fs::exists(path_, code);
  if (replaces) {
    fs::rename(path_, old, code);
    if (code) return cannot(path_, "replaced", code);
  }
  fs::rename(temporary_, path_, code);
  if (code) {
    const std::error_code failure = code;
    if (replaces) fs::rename(old, path_, code);
    return cannot(path_, "written", failure);
  }
  temporary_.clear();
  if (replaces) fs::remove_all(old, code);
  return ok_status();
}

Error OutputDirectory::at_place(Error error) const {
  for (size_t at = error.message.find(temporary_); !temporary_.empty() && at != std::string::npos;
       at = error.message.find(temporary_, at + path_.size())) {
    error.message.replace(at, temporary_.size(), path_);
  }
  return error;
}

}  // namespace nfp
