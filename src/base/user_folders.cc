#include "base/user_folders.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

namespace nfp {

namespace {

// `find` gets an entry and its space as getpwuid_r() has them, behind who is meant.
template <typename Find>
std::string folder_of(const Find& find) {
  passwd entry = {};
  passwd* found = nullptr;
  std::vector<char> text(1 << 16);
  return find(&entry, text.data(), text.size(), &found) == 0 && found != nullptr ? found->pw_dir : "";
}

}  // namespace

std::string home_folder() {
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') return home;
  return folder_of([](auto... space) { return ::getpwuid_r(::getuid(), space...); });
}

std::string home_folder_of(const std::string& user) {
  return folder_of([&](auto... space) { return ::getpwnam_r(user.c_str(), space...); });
}

std::string user_cache_folder() {
  if (const char* folder = std::getenv("XDG_CACHE_HOME"); folder != nullptr && *folder != '\0') {
    return std::string(folder) + "/nestedfp";
  }
  const std::string home = home_folder();
  return home.empty() ? "" : home + "/.cache/nestedfp";
}

}  // namespace nfp
