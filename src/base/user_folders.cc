#include "base/user_folders.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

namespace nfp {

std::string home_folder() {
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') return home;
  passwd entry = {};
  passwd* found = nullptr;
  std::vector<char> text(1 << 16);
  if (::getpwuid_r(::getuid(), &entry, text.data(), text.size(), &found) != 0 || found == nullptr) return "";
  return found->pw_dir;
}

std::string user_cache_folder() {
  if (const char* folder = std::getenv("XDG_CACHE_HOME"); folder != nullptr && *folder != '\0') {
    return std::string(folder) + "/nestedfp";
  }
  const std::string home = home_folder();
  return home.empty() ? "" : home + "/.cache/nestedfp";
}

}  // namespace nfp
