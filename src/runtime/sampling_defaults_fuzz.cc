// A generation_config.json: what is read from it is what the engine takes.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/sampling_defaults.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto defaults = nfp::parse_sampling_defaults({reinterpret_cast<const char*>(data), size}, "generation_config");
  if (!defaults.ok()) return 0;
  nfp::SamplingParams params;
  defaults->apply(params);
  const int32_t token = 0;
  if (nfp::validate({&token, 1}, params, {INT32_MAX, INT32_MAX})) __builtin_trap();
  (void)defaults->text();
  return 0;
}
