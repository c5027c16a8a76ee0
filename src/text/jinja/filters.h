// What templates can use by name: jinja2's filters (with transformers' tojson) and tests, Python's methods that
// jinja2's immutable sandbox allows, and global functions. Each finder returns nullptr where chat templates have no
// such thing.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "text/jinja/runtime.h"

namespace nfp::jinja {

struct Test {
  std::string_view name;
  bool (*holds)(Runtime& rt, const Value& value, const Value& argument);
  bool has_argument = false;
};
bool holds(Runtime& rt, const Test& test, const Value& value, const Args& args);

// The entry of a table that has this name; nullptr when there is none.
template <typename T, size_t N>
const T* find_name(const T (&table)[N], std::string_view name) {
  const T* it = std::find_if(table, table + N, [&](const T& entry) { return entry.name == name; });
  return it == table + N ? nullptr : it;
}

const Callable* find_filter(std::string_view name);
const Test* find_test(std::string_view name);
const Callable* find_method(Kind kind, std::string_view name);
const Callable* find_function(std::string_view name);

// What an error says of a method that Python has, but the sandbox or chat templates have not, and of such a function;
// empty for other names.
std::string why_no_method(const Value& object, std::string_view name);
std::string why_no_function(std::string_view name);

}  // namespace nfp::jinja
