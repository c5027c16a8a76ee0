// config.json and the other JSON files of a model, as Python's json module reads and writes them: with NaN, Infinity
// and -Infinity.
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp {

// A small file of a model. Not from a pipe or a device, which may never end.
Result<std::string> read_model_text(const std::string& path, size_t limit = size_t{256} << 20);

// An object; `name` is the file, for messages. Errors: nested too deeply, no JSON (with the place), no object.
// `Json`: nlohmann::json, or with order.
template <class Json>
Result<Json> parse_model_json(std::string_view text, const std::string& name);
extern template Result<nlohmann::json> parse_model_json(std::string_view, const std::string&);
extern template Result<nlohmann::ordered_json> parse_model_json(std::string_view, const std::string&);

// Indented by two, without a newline at its end.
std::string dump_model_json(nlohmann::ordered_json json);

}  // namespace nfp
