// Files of this folder that the build puts into the program (see CMakeLists.txt).
#pragma once

#include <string_view>

namespace nfp::server {

extern const std::string_view kPageHtml;     // page/index.html
extern const std::string_view kOpenApiJson;  // openapi.json

}  // namespace nfp::server
