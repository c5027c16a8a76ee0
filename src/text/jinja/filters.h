// What templates can use by name: jinja2's filters (with transformers' tojson) and tests, Python's methods that
// jinja2's immutable sandbox allows, and global functions. A finder that returns a pointer gives nullptr where chat
// templates have no such thing.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace nfp::jinja {

struct Args {
  const Value& operator[](size_t place) const {
    static const Value kNotGiven{};
    return place < positional.size() ? positional[place] : kNotGiven;
  }
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

// A filter or test of `subject`, a method of it, or a global function (which has none).
struct Callable {
  static constexpr size_t kAny = 255;  // takes its arguments as they come, also named ones

  std::string_view name;
  Value (*call)(Runtime& rt, const Value& subject, const Args& args);
  size_t least = 0, most = 0;                       // arguments
  std::array<std::string_view, 4> parameters = {};  // their names; none: Python takes them by place only
};
struct Function : Object {
  const Callable* callable = nullptr;
  Value self;
};
Value function(Runtime& rt, const Callable* callable, const Value& self = {});

// Puts the arguments into places, as a Python function with these parameters does, and calls.
Value invoke(Runtime& rt, const Callable& callable, const Value& subject, const Args& args);

// The entry of a table that has this name; nullptr when there is none.
template <typename T, size_t N>
const T* find_name(const T (&table)[N], std::string_view name) {
  const T* it = std::find_if(table, table + N, [&](const T& entry) { return entry.name == name; });
  return it == table + N ? nullptr : it;
}

const Callable& find_filter(Runtime& rt, std::string_view name);  // fails where there is none
const Callable& find_test(Runtime& rt, std::string_view name);    // likewise; gives a bool
const Callable* find_method(Kind kind, std::string_view name);
const Callable* find_function(std::string_view name);

// What an error says of a method that Python has, but the sandbox or chat templates have not, and of such a function;
// empty for other names.
std::string why_no_method(const Value& object, std::string_view name);
std::string why_no_function(std::string_view name);

}  // namespace nfp::jinja
