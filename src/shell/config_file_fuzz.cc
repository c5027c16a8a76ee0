#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shell/config_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)nfp::shell::parse_config_file({reinterpret_cast<const char*>(data), size}, "fuzz", "serve");
  return 0;
}
