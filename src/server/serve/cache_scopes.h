// Whose cached prefixes a request may reuse.
#pragma once

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "engine/prefix_key.h"

namespace nfp::server {

class CacheScopes {
 public:
  // The root of all keys under which this client's prefixes are found: what one API key's requests computed is no
  // other's, as whether a prompt is cached tells that it has been sent.
  PrefixKey of(int api_key, std::string_view salt) const {
    std::vector<int32_t> parts = {api_key};
    parts.insert(parts.end(), salt.begin(), salt.end());
    return extend(secret_, parts);
  }

 private:
  static uint64_t random() {
    std::random_device source;  // the kernel's
    return uint64_t{source()} << 32 | source();
  }
  // In no answer and in no log: extend() can be computed backwards, so whoever knew where keys begin could make a
  // prompt whose key is that of another prompt, in any scope.
  const PrefixKey secret_ = {random(), random()};
};

}  // namespace nfp::server
