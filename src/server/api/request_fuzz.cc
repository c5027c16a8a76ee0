// Any bytes as the body of a request: parsers answer with a request or an error, and never fail otherwise.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "server/api/generation_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nfp::server;  // NOLINT(google-build-using-namespace)
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::string escaped;
  append_string(escaped, text);
  if (!parse_json(escaped).ok()) __builtin_trap();
  const auto json = parse_json(text);
  if (!json.ok()) return 0;
  GenerationRequest completion, chat;
  const RequestLimits limits;
  if (auto failure = parse_completion(*json, limits, &completion)) (void)parse_json(error_json(*failure));
  if (auto failure = parse_chat(*json, limits, &chat)) {
    if (!parse_json(error_json(*failure)).ok()) __builtin_trap();
  }
  return 0;
}
