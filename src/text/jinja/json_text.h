// transformers' tojson filter: Python's json.dumps.
#pragma once

#include <string>

#include "text/jinja/runtime.h"

namespace nfp::jinja {

struct JsonStyle {
  bool ascii = false;   // escape all but ASCII
  bool pretty = false;  // one item a line, indented by `indent` per level
  bool sort_keys = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};

std::string to_json(Runtime& rt, const Value& v, const JsonStyle& style);

}  // namespace nfp::jinja
