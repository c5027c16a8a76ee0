// What --json prints.
#pragma once

#include <fmt/core.h>

namespace nfp {

// Bytes of paths and names that are not UTF-8 are replaced: nobody loses an answer for their sake. `Json`: of
// nlohmann's library.
template <class Json>
void print_indented(const Json& out) {
  fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace nfp
