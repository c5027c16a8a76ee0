// JSON in and out: a parser that refuses what could hurt (deep nesting, invalid UTF-8, huge numbers of values), and
// writing strings without building a tree.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp::server {

using Json = nlohmann::ordered_json;

inline constexpr int kMaxJsonDepth = 64;

// Error kInvalidInput: not JSON, not UTF-8, or nested deeper than `max_depth`.
Result<Json> parse_json(std::string_view text, int max_depth = kMaxJsonDepth);

// Levels of [ and { outside of strings; at most `limit` + 1 is reported.
int json_depth(std::string_view text, int limit);

// Appends `text` as the inside of a JSON string. Bytes that are not UTF-8 become U+FFFD.
void append_escaped(std::string& out, std::string_view text);
// The same with quotes.
void append_string(std::string& out, std::string_view text);

// Compact JSON; bytes that are not UTF-8 become U+FFFD.
std::string dump(const Json& value);

// Finite numbers in the shortest form that reads back as the same float; others as null, which JSON lacks.
void append_number(std::string& out, double value);

}  // namespace nfp::server
