// Substring search in time linear in the text, whatever the needle, on the account of a Runtime.
#pragma once

#include <cstddef>
#include <string_view>

#include "text/jinja/runtime.h"

namespace nfp::jinja {

// First occurrence at or after byte `from`; npos when there is none. An empty needle is found at `from`.
size_t find_text(Runtime& rt, std::string_view text, std::string_view needle, size_t from);
// Last occurrence that ends at or before byte `end`.
size_t find_text_backward(Runtime& rt, std::string_view text, std::string_view needle, size_t end);

}  // namespace nfp::jinja
