// How deep a JSON text is nested, before anything is made of it: readers of JSON build trees whose end, copying and
// writing recurse, so a text of a million '[' would take the stack.
#pragma once

#include <string>
#include <string_view>

#include "base/json_tree.h"

namespace nfp {

// Deeper than any file of a model is nested, and shallow enough for any stack.
inline constexpr int kMaxFileJsonDepth = 200;

// Levels of [ and { outside of strings; at most `limit` + 1 is reported.
int json_depth(std::string_view text, int limit);

inline bool json_too_deep(std::string_view text) { return json_depth(text, kMaxFileJsonDepth) > kMaxFileJsonDepth; }

// What a file's text says, a discarded value where it is not JSON or too deep. However many keys an object has, not
// slow. `Json`: nlohmann::json, or with order.
template <class Json>
Json parse_file_json(std::string_view text) {
  if (json_too_deep(text)) return Json(Json::value_t::discarded);
  // Objects with order are lists, which the library's reader searches for every key.
  if constexpr (requires(typename Json::object_t object) { object.emplace_back(std::string(), Json()); }) {
    JsonTree<Json> tree;
    return Json::sax_parse(text, &tree) ? tree.take() : Json(Json::value_t::discarded);
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace nfp
