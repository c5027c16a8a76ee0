#include "hub/libcurl.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>

namespace nfp {
namespace {

// libcurl.so.4 has been its name since 2006 (7.16). Debian names builds with other TLS libraries differently; their
// functions are the same.
constexpr const char* kNames[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};

template <typename Function>
bool find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
  return out != nullptr;
}

Result<const Libcurl*> load_libcurl() {
  void* library = nullptr;
  for (const char* name : kNames) {
    if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    return error(ErrorCode::kUnsupported,
                 "downloading needs libcurl (libcurl.so.4), which this machine lacks; install it, on Debian and Ubuntu "
                 "with: apt-get install libcurl4");
  }
  static Libcurl curl;
  const bool all =
      find(library, "curl_global_init", curl.global_init) && find(library, "curl_easy_init", curl.easy_init) &&
      find(library, "curl_easy_setopt", curl.easy_setopt) && find(library, "curl_easy_perform", curl.easy_perform) &&
      find(library, "curl_easy_getinfo", curl.easy_getinfo) && find(library, "curl_easy_cleanup", curl.easy_cleanup) &&
      find(library, "curl_easy_reset", curl.easy_reset) && find(library, "curl_easy_strerror", curl.easy_strerror) &&
      find(library, "curl_slist_append", curl.slist_append) &&
      find(library, "curl_slist_free_all", curl.slist_free_all) && find(library, "curl_url", curl.url) &&
      find(library, "curl_url_set", curl.url_set) && find(library, "curl_url_get", curl.url_get) &&
      find(library, "curl_url_cleanup", curl.url_cleanup) && find(library, "curl_free", curl.free) &&
      find(library, "curl_version", curl.version);
  if (!all || curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
    return error(ErrorCode::kUnsupported, "this machine's libcurl is older than 7.62 or broken; install a newer one");
  }
  return &curl;
}

}  // namespace

Result<const Libcurl*> libcurl() {
  static std::once_flag once;
  static std::optional<Result<const Libcurl*>> loaded;
  std::call_once(once, [] { loaded.emplace(load_libcurl()); });
  return *loaded;
}

}  // namespace nfp
