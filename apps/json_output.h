// What --json prints.
#pragma once

#include <fmt/core.h>

namespace nfp {

// Bytes of paths and names that are not UTF-8 are replaced: nobody loses an answer for their sake. `Json`: of
// nlohmann's library.
template <class Json>
void print_indented(const Json& out, int indent = 2) {
  fmt::print("{}\n", out.dump(indent, ' ', false, Json::error_handler_t::replace));
}

}  // namespace nfp
