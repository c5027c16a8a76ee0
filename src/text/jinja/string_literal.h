// String literals of templates.
#pragma once

#include <string>
#include <string_view>

namespace nfp::jinja {

// Resolves the escapes between two quotes, as Python's unicode-escape codec does. Returns false with a message for a
// truncated or impossible escape.
bool unescape(std::string_view literal, std::string* out, std::string* error);

}  // namespace nfp::jinja
