// The filters on single values, and the search through all of them.
#include "text/jinja/filters.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "text/jinja/format_text.h"
#include "text/jinja/json_text.h"
#include "text/jinja/number_text.h"
#include "text/jinja/operators.h"

namespace nfp::jinja {
namespace {

Value absolute(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "abs", args, 0, 0);
  if (v.is_integral()) return Value::integer(v.as_int() < 0 ? -v.as_int() : v.as_int());
  if (v.is(Kind::kFloat)) return Value::real(std::fabs(v.as_real()));
  if (v.undefined()) fail_undefined(rt, v);
  rt.fail("bad operand type for abs(): '{}'", type_name(v));
}

Value attr(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "attr", args, {"name"}, 1);
  if (v.undefined()) fail_undefined(rt, v);
  if (!bound[0].is(Kind::kString)) rt.fail("attribute name must be string, not '{}'", type_name(bound[0]));
  if (has_attribute(v, bound[0].text())) return get_attribute(rt, v, bound[0].text());
  return rt.undefined(fmt::format("'{} object' has no attribute '{}'", type_name(v), bound[0].text().substr(0, 100)));
}

Value default_value(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "default", args, {"default_value", "boolean"});
  if (!v.undefined() && !(truthy(rt, bound[1]) && !truthy(rt, v))) return v;
  return bound[0].missing() ? rt.string("") : bound[0];
}

Value to_int(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "int", args, {"default", "base"});
  const Value otherwise = bound[0].missing() ? Value::integer(0) : bound[0];
  const Int base = bound[1].missing() ? 10 : int_argument(rt, bound[1], "base");
  if (v.undefined()) fail_undefined(rt, v);
  if (v.is_integral()) return Value::integer(v.as_int());
  if (v.is(Kind::kFloat)) return std::isnan(v.as_real()) ? otherwise : int_of(rt, v.as_real());
  if (!v.is(Kind::kString)) return otherwise;
  if (base >= 0 && base <= 36) {
    if (const auto i = parse_int(v.text(), static_cast<int>(base))) return Value::integer(*i);
  }
  const auto d = parse_real(v.text());
  return d && std::isfinite(*d) ? int_of(rt, *d) : otherwise;
}

Value to_float(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "float", args, {"default"});
  if (v.undefined()) fail_undefined(rt, v);
  if (v.is_number()) return Value::real(real_of(rt, v));
  if (v.is(Kind::kString)) {
    if (const auto d = parse_real(v.text())) return Value::real(*d);
  }
  return bound[0].missing() ? Value::real(0) : bound[0];
}

Int power_of_ten(Int exponent) {
  Int result = 1;
  for (; exponent > 0; --exponent) result *= 10;
  return result;
}

Value round_int(Int value, Int digits) {
  if (digits >= 0) return Value::integer(value);
  if (digits < -35) return Value::integer(0);
  const Int unit = power_of_ten(-digits);
  const Int magnitude = value < 0 ? -value : value;
  Int rounded = magnitude / unit * unit;
  const Int rest = magnitude - rounded;
  if (rest * 2 > unit || (rest * 2 == unit && magnitude / unit % 2 == 1)) rounded += unit;
  return Value::integer(value < 0 ? -rounded : rounded);
}

double round_real(double d, Int digits) {
  if (!std::isfinite(d) || digits > 323) return d;
  if (digits < -308) return d * 0;
  if (digits >= 0) {
    // The C library rounds the exact binary value half to even, as Python does.
    char buffer[700];
    std::snprintf(buffer, sizeof(buffer), "%.*f", static_cast<int>(digits), d);
    return std::strtod(buffer, nullptr);
  }
  const double unit = std::pow(10.0, static_cast<double>(-digits));
  return std::nearbyint(d / unit) * unit;
}

Value round_number(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "round", args, {"precision", "method"});
  const Int digits = bound[0].missing() ? 0 : int_argument(rt, bound[0], "precision");
  const std::string method = bound[1].missing() ? "common" : to_text(rt, bound[1]);
  if (method != "common" && method != "ceil" && method != "floor") rt.fail("method must be common, ceil or floor");
  if (!v.is_number()) {
    if (v.undefined()) fail_undefined(rt, v);
    rt.fail("type {} doesn't define __round__ method", type_name(v));
  }
  if (method == "common") {
    if (v.is_integral()) return round_int(v.as_int(), digits);
    return Value::real(round_real(v.as_real(), digits));
  }
  const Value scale = power(rt, Value::integer(10), Value::integer(digits));
  const double scaled = real_of(rt, multiply(rt, v, scale));
  const Value whole = int_of(rt, method == "ceil" ? std::ceil(scaled) : std::floor(scaled));
  return divide(rt, whole, scale);
}

Value tojson(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = truthy(rt, bound[0]);
  style.sort_keys = truthy(rt, bound[3]);
  if (!bound[1].none_or_missing()) {
    style.pretty = true;
    if (bound[1].is(Kind::kString)) {
      style.indent = bound[1].text();
    } else {
      const Int spaces = std::max<Int>(int_argument(rt, bound[1], "indent"), 0);
      rt.charge(static_cast<uint64_t>(std::min<Int>(spaces, INT64_MAX)));
      style.indent.assign(static_cast<size_t>(spaces), ' ');
    }
    style.item_separator = ",";
  }
  if (!bound[2].none_or_missing()) {
    const std::vector<Value> separators = items_of(rt, bound[2]);
    if (separators.size() != 2 || !separators[0].is(Kind::kString) || !separators[1].is(Kind::kString)) {
      rt.fail("tojson: separators must be two strings");
    }
    style.item_separator = separators[0].text();
    style.key_separator = separators[1].text();
  }
  return rt.string(to_json(rt, v, style));
}

Value file_size(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "filesizeformat", args, {"binary"});
  const bool binary = truthy(rt, bound[0]);
  if (v.undefined()) fail_undefined(rt, v);
  std::optional<double> bytes;
  if (v.is_number()) bytes = real_of(rt, v);
  if (v.is(Kind::kString)) bytes = parse_real(v.text());
  if (!bytes) rt.fail("could not convert to float: '{}'", type_name(v));
  const double base = binary ? 1024 : 1000;
  if (*bytes == 1) return rt.string("1 Byte");
  if (*bytes < base) return rt.string(fmt::format("{} Bytes", repr_int(int_of(rt, *bytes).as_int())));
  double unit = base;
  for (const char prefix : std::string_view("kMGTPEZY")) {
    unit *= base;
    if (*bytes < unit || prefix == 'Y') {
      const std::string name = binary ? fmt::format("{}iB", prefix == 'k' ? 'K' : prefix) : fmt::format("{}B", prefix);
      return rt.string(format_real(rt, base * *bytes / unit, 'f', 1, false) + " " + name);
    }
  }
  return v;
}

Value string(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "string", args, 0, 0);
  return v.is(Kind::kString) ? v : rt.string(to_text(rt, v));
}

struct Entry {
  std::string_view name;
  FilterFunction function;
};
constexpr Entry kFilters[] = {{"abs", absolute},
                              {"attr", attr},
                              {"d", default_value},
                              {"default", default_value},
                              {"filesizeformat", file_size},
                              {"float", to_float},
                              {"int", to_int},
                              {"round", round_number},
                              {"string", string},
                              {"tojson", tojson}};

}  // namespace

FilterFunction find_filter(std::string_view name) {
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.function;
  }
  if (const FilterFunction f = find_text_filter(name)) return f;
  if (const FilterFunction f = find_order_filter(name)) return f;
  return find_sequence_filter(name);
}

}  // namespace nfp::jinja
