// Types of JSON values, as bits.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "server/api/json_text.h"

namespace nfp::server {

enum : uint32_t {
  kNullType = 1u << 0,
  kBooleanType = 1u << 1,
  kIntegerType = 1u << 2,
  kNumberType = 1u << 3,
  kStringType = 1u << 4,
  kArrayType = 1u << 5,
  kObjectType = 1u << 6,
};

// The types that a value has: an integer is a number as well.
inline uint32_t type_of(const Json& value) {
  if (value.is_null()) return kNullType;
  if (value.is_boolean()) return kBooleanType;
  if (value.is_number_integer()) return kIntegerType | kNumberType;
  if (value.is_number()) return kNumberType;
  if (value.is_string()) return kStringType;
  return value.is_array() ? kArrayType : kObjectType;
}

// The one of this name in a JSON Schema's "type"; 0 = there is none.
inline uint32_t type_named(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, uint32_t>, 7> kNames = {{{"null", kNullType},
                                                                            {"boolean", kBooleanType},
                                                                            {"integer", kIntegerType},
                                                                            {"number", kNumberType},
                                                                            {"string", kStringType},
                                                                            {"array", kArrayType},
                                                                            {"object", kObjectType}}};
  for (const auto& [text, type] : kNames) {
    if (text == name) return type;
  }
  return 0;
}

}  // namespace nfp::server
