// Python's two ways to format: "%s is %d" % values, and "{} is {:>5}".format(values).
#pragma once

#include <string>
#include <string_view>

#include "text/jinja/callables.h"
#include "text/jinja/runtime.h"

namespace nfp::jinja {

Value percent_format(Runtime& rt, const Value& format, const Value& values);
std::string brace_format(Runtime& rt, std::string_view format, const Args& args);
std::string brace_format_map(Runtime& rt, std::string_view format, const Value& mapping);

// What both need (format_number.cc). `type` is one of e E f F g G; the text has a '-' for negative numbers.
std::string format_real(Runtime& rt, double d, char type, Int precision, bool alternate);
// The digits of |i| in base 2, 8, 10 or 16.
std::string format_digits(Int i, int base, bool upper);
// repr with all but ASCII escaped.
std::string ascii_repr(Runtime& rt, const Value& v);

// format(value, spec)
std::string format_value(Runtime& rt, const Value& v, std::string_view spec);

}  // namespace nfp::jinja
