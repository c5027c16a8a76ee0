#include "base/temporary_path.h"

#include <fmt/format.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <random>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/log.h"

namespace nfp {
namespace {

struct Registry {
  std::mutex mutex;
  std::multiset<std::string> names;
  std::set<std::string> told;  // leftovers
};

// Never destroyed: objects of static storage may still hold a path at exit.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

constexpr std::string_view kMark = ".tmp-";

// Whether what follows the mark in a temporary's name begins with the number of a process that is no more.
bool is_of_the_dead(std::string_view suffix) {
  pid_t process = 0;
  const auto [end, code] = std::from_chars(suffix.data(), suffix.data() + suffix.size(), process);
  if (code != std::errc() || process <= 0 || end == suffix.data() + suffix.size() || *end != '-') return false;
  return ::kill(process, 0) != 0 && errno == ESRCH;
}

uint64_t bytes_in(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code code;
  if (!fs::is_directory(fs::symlink_status(path, code))) {
    const auto bytes = fs::file_size(path, code);
    return code ? 0 : bytes;
  }
  uint64_t bytes = 0;
  for (fs::directory_iterator at(path, code), end; !code && at != end; at.increment(code))
    bytes += bytes_in(at->path());
  return bytes;
}

// Bytes at the end of a path that its temporaries have no room for.
size_t excess(std::string_view path) {
  constexpr std::string_view kMost = ".tmp-4194304-0123456789abcdef-stopped";
  const std::string_view name = path.substr(path.rfind('/') + 1);
  size_t kept = std::min(name.size(), NAME_MAX - kMost.size());
  // Whole characters: some file systems take nothing but UTF-8.
  while (kept > 0 && kept < name.size() && (static_cast<unsigned char>(name[kept]) & 0xc0) == 0x80) --kept;
  return name.size() - kept;
}

void remove(const std::string& name) {
  std::error_code ignored;
  std::filesystem::remove_all(name, ignored);
}

}  // namespace

TemporaryPath::TemporaryPath(std::string path) : name_(std::move(path)) {
  const std::lock_guard lock(registry().mutex);
  registry().names.insert(name_);
}

TemporaryPath::TemporaryPath(std::string path, const std::function<bool(const std::string&)>& make) {
  const std::lock_guard lock(registry().mutex);
  if (!make(path)) return;
  name_ = std::move(path);
  registry().names.insert(name_);
}

TemporaryPath::~TemporaryPath() {
  if (name_.empty()) return;
  remove(name_);
  release();
}

TemporaryPath::TemporaryPath(TemporaryPath&& other) noexcept : name_(std::exchange(other.name_, {})) {}

TemporaryPath& TemporaryPath::operator=(TemporaryPath&& other) noexcept {
  std::swap(name_, other.name_);
  return *this;
}

void TemporaryPath::release() {
  const std::lock_guard lock(registry().mutex);
  if (const auto at = registry().names.find(name_); at != registry().names.end()) registry().names.erase(at);
  name_.clear();
}

std::string temporary_beside(const std::string& path) {
  std::random_device source;
  return fmt::format("{}{}{}-{:08x}{:08x}", path.substr(0, path.size() - excess(path)), kMark, ::getpid(), source(),
                     source());
}

void warn_of_leftovers(const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path place(path);
  const std::string whole = place.filename().string();
  const std::string begin = whole.substr(0, whole.size() - excess(whole)) + std::string(kMark);
  std::error_code code;
  for (fs::directory_iterator at(place.has_parent_path() ? place.parent_path() : ".", code), end; !code && at != end;
       at.increment(code)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(begin) || !is_of_the_dead(std::string_view(name).substr(begin.size()))) continue;
    {
      const std::lock_guard lock(registry().mutex);
      if (!registry().told.insert(at->path().string()).second) continue;
    }
    log::warn("{}: {:.1f} MB that a process left which was killed while it wrote; remove it where nothing needs it",
              at->path().string(), static_cast<double>(bytes_in(at->path())) / 1e6);
  }
}

void remove_all_temporaries() {
  registry().mutex.lock();
  for (const std::string& name : registry().names) {
    // Others still write: a file that is made in a directory while it is emptied keeps it. Under another name nothing
    // more comes in than what was being made just then.
    const std::string aside = name + "-stopped";
    std::error_code ignored;
    std::filesystem::rename(name, aside, ignored);
    for (int tries = 0; tries < 100; ++tries) {
      remove(aside);
      if (!std::filesystem::exists(std::filesystem::symlink_status(aside, ignored))) break;
    }
    remove(name);  // where it could not be renamed
  }
}

}  // namespace nfp
