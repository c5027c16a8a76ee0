// JSON in and out: a parser that refuses what could hurt (deep nesting, invalid UTF-8, huge numbers of values or keys),
// and writing strings without building a tree.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>

#include "base/json_depth.h"
#include "base/result.h"

namespace nfp::server {

using Json = nlohmann::ordered_json;

struct JsonLimits {
  int max_depth = 64;
  size_t max_keys = 4096;        // of one object
  size_t max_values = 1u << 20;  // of the whole
};

// In time linear in the text. Errors: kInvalidInput (not JSON, not UTF-8, beyond a limit), kCancelled (`stop`); the
// message continues "the body is ...". `bytes`: about what the tree takes in memory.
Result<Json> parse_json(std::string_view text, const JsonLimits& limits = {}, const std::stop_token& stop = {},
                        size_t* bytes = nullptr);

// Of a text that was cut off the values that are whole: of {"a":[1,"b {"a":[1]}. Null where there is none, or where
// something else is wrong.
Json parse_cut_json(std::string_view text);

// Appends `text` as the inside of a JSON string. Bytes that are not UTF-8 become U+FFFD.
void append_escaped(std::string& out, std::string_view text);
// The same with quotes.
void append_string(std::string& out, std::string_view text);

// Compact JSON; bytes that are not UTF-8 become U+FFFD.
std::string dump(const Json& value);

// Finite numbers in the shortest form that reads back as the same float; others as null, which JSON lacks.
void append_number(std::string& out, double value);

}  // namespace nfp::server
