#include "text/jinja/search.h"

#include <cstring>

namespace nfp::jinja {

size_t find_text(Runtime& rt, std::string_view text, std::string_view needle, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  if (needle.empty()) return from;
  // memmem is linear (two-way string matching); std::string_view::find is not.
  const void* hit = memmem(text.data() + from, text.size() - from, needle.data(), needle.size());
  const size_t at =
      hit == nullptr ? std::string_view::npos : static_cast<size_t>(static_cast<const char*>(hit) - text.data());
  rt.step();
  rt.work(needle.size() + (hit == nullptr ? text.size() : at) - from);
  return at;
}

size_t find_text_backward(Runtime& rt, std::string_view text, std::string_view needle, size_t end) {
  if (needle.size() > end) return std::string_view::npos;
  if (needle.empty()) return end;
  for (size_t at = end - needle.size() + 1; at-- > 0;) {
    if (text[at] == needle[0]) {
      // What memcmp may read is paid for, so that a hostile pair of strings ends at the limit.
      rt.work(needle.size());
      if (std::memcmp(text.data() + at, needle.data(), needle.size()) == 0) return at;
    }
  }
  rt.work(end);
  return std::string_view::npos;
}

}  // namespace nfp::jinja
