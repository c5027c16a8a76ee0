#pragma once

#include <string_view>

namespace nfp::server {

inline constexpr std::string_view kVersion = NFP_VERSION;  // the project's, from CMake

}  // namespace nfp::server
