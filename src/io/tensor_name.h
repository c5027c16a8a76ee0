// What a tensor of a file may be called.
#pragma once

#include <algorithm>
#include <string_view>

namespace nfp {

// Names go into headers, JSON and error messages as they are: printable ASCII without spaces, and not long.
inline bool is_tensor_name(std::string_view name) {
  return !name.empty() && name.size() <= 200 &&
         std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 0x7f; });
}

}  // namespace nfp
