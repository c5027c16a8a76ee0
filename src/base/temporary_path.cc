#include "base/temporary_path.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <mutex>
#include <random>
#include <set>
#include <system_error>
#include <utility>

namespace nfp {
namespace {

struct Registry {
  std::mutex mutex;
  std::multiset<std::string> names;
};

// Never destroyed: objects of static storage may still hold a path at exit.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
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

std::string temporary_suffix() {
  std::random_device source;
  return fmt::format(".tmp-{}-{:08x}{:08x}", ::getpid(), source(), source());
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
