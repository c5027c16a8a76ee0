// What templates can use by name: jinja2's filters (with transformers' tojson) and tests, Python's methods that
// jinja2's immutable sandbox allows, and global functions. Each finder returns nullptr where chat templates have no
// such thing.
#pragma once

#include <string_view>

#include "text/jinja/runtime.h"

namespace nfp::jinja {

struct Test {
  std::string_view name;
  bool (*holds)(Runtime& rt, const Value& value, const Value& argument);
  bool has_argument = false;
};

const Callable* find_filter(std::string_view name);
const Test* find_test(std::string_view name);
// One whose `call` is null exists in Python, but is not supported.
const Callable* find_method(Kind kind, std::string_view name);
const Callable* find_function(std::string_view name);
// Whether a type has a method that the sandbox refuses.
bool changes_its_object(Kind kind, std::string_view name);

}  // namespace nfp::jinja
