// A JSON object from outside, its nesting bounded. Included by .cc files only: JSON stays out of public headers.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp {

inline Result<nlohmann::ordered_json> parse_json_object(std::string_view text, const std::string& name) {
  using Json = nlohmann::ordered_json;
  int depth = 0;
  const auto bounded = [&](int, Json::parse_event_t event, Json&) {
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) ++depth;
    if (event == Json::parse_event_t::object_end || event == Json::parse_event_t::array_end) --depth;
    return depth < 64;
  };
  Json json = Json::parse(text, bounded, /*allow_exceptions=*/false);
  if (json.is_discarded()) return error(ErrorCode::kInvalidInput, "{}: is not valid JSON", name);
  if (!json.is_object()) return error(ErrorCode::kInvalidInput, "{}: must be a JSON object", name);
  return json;
}

// Text that is not UTF-8 is replaced, never thrown about.
inline std::string to_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace nfp
