// Python's operators on template values. All fail (throw Failure) where Python raises.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nfp::jinja {

// --- Truth, equality, order (operators.cc)
bool truthy(Runtime& rt, const Value& v);
bool equals(Runtime& rt, const Value& a, const Value& b);
enum class Order { kLess, kLessEqual, kGreater, kGreaterEqual };
bool ordered(Runtime& rt, Order order, const Value& a, const Value& b);
inline bool less(Runtime& rt, const Value& a, const Value& b) { return ordered(rt, Order::kLess, a, b); }
bool contains(Runtime& rt, const Value& container, const Value& item);  // item in container
bool identical(const Value& a, const Value& b);                         // `is` of Python

// --- Arithmetic (arithmetic.cc)
Value add(Runtime& rt, const Value& a, const Value& b);
Value subtract(Runtime& rt, const Value& a, const Value& b);
Value multiply(Runtime& rt, const Value& a, const Value& b);
Value divide(Runtime& rt, const Value& a, const Value& b);
Value floor_divide(Runtime& rt, const Value& a, const Value& b);
Value modulo(Runtime& rt, const Value& a, const Value& b);  // also "%s" % x
Value power(Runtime& rt, const Value& a, const Value& b);
Value negate(Runtime& rt, const Value& a);
Value plus(Runtime& rt, const Value& a);
Value checked_int(Runtime& rt, Int i);                            // fails outside of kIntBound
Value int_of(Runtime& rt, double d);                              // int(d); fails for inf and nan
double real_of(Runtime& rt, const Value& number);                 // float(n) of any number
Int int_argument(Runtime& rt, const Value& v, const char* what);  // what range, slices and widths take

// --- Lookup (lookup.cc)
Value get_item(Runtime& rt, const Value& object, const Value& key);            // object[key] of jinja2's environment
Value get_attribute(Runtime& rt, const Value& object, std::string_view name);  // object.name
bool has_attribute(const Value& object, std::string_view name);
Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step);
Value path_item(Runtime& rt, const Value& object, std::string_view dotted);  // "a.b.0", as map(attribute=...) takes it

// --- Iteration (iteration.cc)
std::optional<Int> try_length(Runtime& rt, const Value& v);  // nullopt: the type has no len()
Int length(Runtime& rt, const Value& v);
bool is_iterable(const Value& v);
Iterator* iterate(Runtime& rt, const Value& v);
std::vector<Value> items_of(Runtime& rt, const Value& v);  // list(v)
Value reversed(Runtime& rt, const Value& v);               // Python's reversed(v); not of a string or generator

// --- Text (text_of.cc)
std::string to_text(Runtime& rt, const Value& v);  // str(v)
std::string repr(Runtime& rt, const Value& v);
void append_text(Runtime& rt, std::string& out, const Value& v);
std::string repr_real(double d);
std::string repr_int(Int i);
[[noreturn]] void fail_undefined(Runtime& rt, const Value& undefined);

}  // namespace nfp::jinja
