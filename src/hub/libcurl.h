// libcurl, loaded when the first download asks for it: the system's own, whose TLS and certificates the distribution
// keeps current. A program linked with it would not start where it is absent, and all other verbs need no network.
#pragma once

#include <curl/curl.h>

#include "base/result.h"

namespace nfp {

struct Libcurl {
  decltype(&::curl_global_init) global_init = nullptr;
  decltype(&::curl_easy_init) easy_init = nullptr;
  decltype(&::curl_easy_setopt) easy_setopt = nullptr;
  decltype(&::curl_easy_perform) easy_perform = nullptr;
  decltype(&::curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&::curl_easy_cleanup) easy_cleanup = nullptr;
  decltype(&::curl_easy_reset) easy_reset = nullptr;
  decltype(&::curl_easy_strerror) easy_strerror = nullptr;
  decltype(&::curl_slist_append) slist_append = nullptr;
  decltype(&::curl_slist_free_all) slist_free_all = nullptr;
  decltype(&::curl_url) url = nullptr;
  decltype(&::curl_url_set) url_set = nullptr;
  decltype(&::curl_url_get) url_get = nullptr;
  decltype(&::curl_url_cleanup) url_cleanup = nullptr;
  decltype(&::curl_free) free = nullptr;
  decltype(&::curl_version) version = nullptr;
};

// Thread-safe. kUnsupported, with the package to install, where this machine has no libcurl.
Result<const Libcurl*> libcurl();

}  // namespace nfp
