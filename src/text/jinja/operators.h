// Python's operators on template values, attributes, items, slices and iteration. All fail (throw Failure) where Python
// raises.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nfp::jinja {

// --- Truth, equality, order
enum class Compare : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };
bool truthy(Runtime& rt, const Value& v);
bool equals(Runtime& rt, const Value& a, const Value& b);
bool identical(const Value& a, const Value& b);  // `is` of Python
bool compare(Runtime& rt, Compare op, const Value& a, const Value& b);
// `items` in the order of their `keys`; equal ones keep their order, also backwards. Equal keys are never asked which
// is less, so None and None sort. A template's values may be ordered inconsistently (NaN): the order is then any.
std::vector<Value> sorted(Runtime& rt, const std::vector<Value>& items, const std::vector<Value>& keys, bool reverse);

// --- Arithmetic
enum class Binary : uint8_t { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo };
Value arithmetic(Runtime& rt, Binary op, const Value& a, const Value& b);
Value negate(Runtime& rt, const Value& a);
Int int_argument(Runtime& rt, const Value& v, const char* what);  // what range, slices and widths take

// --- Attributes, items and slices, with the rules of jinja2's sandboxed environment: `a.b` looks for an attribute
// first and an item second, `a["b"]` the other way round, and what is not there is Undefined (lookup.cc)
Value get_item(Runtime& rt, const Value& object, const Value& key);            // object[key]
Value get_attribute(Runtime& rt, const Value& object, std::string_view name);  // object.name
Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step);
// What jinja2's make_attrgetter looks up: "a.b.0", an index, or (none) the item itself. An undefined step on the way
// becomes `otherwise` (unless that is missing or None), and the way goes on from there.
Value path_item(Runtime& rt, const Value& object, const Value& path, const Value& otherwise = {});

// --- Iteration (lookup.cc)
Int length(Runtime& rt, const Value& v);
bool is_iterable(const Value& v);
class Cursor {
 public:
  Cursor(Runtime& rt, const Value& v);  // fails where v is not iterable
  bool next(Value* item);               // false at the end

 private:
  Runtime& rt_;
  Value v_;
  size_t at_ = 0;  // an index, or a byte of a string
};
std::vector<Value> items_of(Runtime& rt, const Value& v);  // list(v)

}  // namespace nfp::jinja
