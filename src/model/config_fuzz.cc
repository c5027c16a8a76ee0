#include <cstddef>
#include <cstdint>
#include <string_view>

#include "model/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  auto config = nfp::parse_config(text, "config.json");
  if (config.ok()) (void)nfp::apply_generation_config(text, "generation_config.json", *config);
  return 0;
}
