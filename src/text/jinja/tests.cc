// jinja2's tests: what stands behind `is`.
#include "text/jinja/filters.h"
#include "text/jinja/operators.h"
#include "text/jinja/strings.h"

namespace nfp::jinja {
namespace {

void no_arguments(Runtime& rt, const Args& args) { expect_positional(rt, "test", args, 0, 0); }
const Value& one_argument(Runtime& rt, const Args& args) {
  if (args.positional.size() + args.named.size() != 1) rt.fail("the test takes one argument");
  return args.positional.empty() ? args.named[0].second : args.positional[0];
}

template <Kind kind>
bool is_kind(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return v.is(kind);
}

template <bool wanted>
bool is_bool(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return v.is(Kind::kBool) && v.as_bool() == wanted;
}

bool is_defined(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return !v.undefined();
}

bool is_number(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return v.is_number();
}

bool iterable(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return is_iterable(v);
}

bool sequence(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return v.is(Kind::kString) || v.is_list_like() || v.is(Kind::kDict) || v.is(Kind::kRange) || v.undefined();
}

bool callable(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  // Undefined has a __call__, which fails.
  return v.is(Kind::kFunction) || v.is(Kind::kMethod) || v.is(Kind::kMacro) || v.is(Kind::kLoop) ||
         v.is(Kind::kJoiner) || v.undefined();
}

bool remainder_is(Runtime& rt, const Value& v, Int divisor, Int remainder) {
  return equals(rt, modulo(rt, v, Value::integer(divisor)), Value::integer(remainder));
}
bool odd(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return remainder_is(rt, v, 2, 1);
}
bool even(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return remainder_is(rt, v, 2, 0);
}
bool divisible_by(Runtime& rt, const Value& v, const Args& args) {
  return equals(rt, modulo(rt, v, one_argument(rt, args)), Value::integer(0));
}

bool lower(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return is_lower_text(to_text(rt, v));
}
bool upper(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return is_upper_text(to_text(rt, v));
}

bool escaped(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  return v.is(Kind::kString) && v.as_str().safe;
}

bool in(Runtime& rt, const Value& v, const Args& args) { return contains(rt, one_argument(rt, args), v); }
bool same_as(Runtime& rt, const Value& v, const Args& args) { return identical(v, one_argument(rt, args)); }
bool equal(Runtime& rt, const Value& v, const Args& args) { return equals(rt, v, one_argument(rt, args)); }
bool not_equal(Runtime& rt, const Value& v, const Args& args) { return !equals(rt, v, one_argument(rt, args)); }

template <Order order>
bool ordered_as(Runtime& rt, const Value& v, const Args& args) {
  return ordered(rt, order, v, one_argument(rt, args));
}

bool is_filter(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  if (!is_hashable(v)) rt.fail("unhashable type: '{}'", type_name(v));
  return v.is(Kind::kString) && find_filter(v.text()) != nullptr;
}
bool is_test(Runtime& rt, const Value& v, const Args& args) {
  no_arguments(rt, args);
  if (!is_hashable(v)) rt.fail("unhashable type: '{}'", type_name(v));
  return v.is(Kind::kString) && find_test(v.text()) != nullptr;
}

struct Entry {
  std::string_view name;
  TestFunction function;
};
constexpr Entry kTests[] = {
    {"!=", not_equal},
    {"<", ordered_as<Order::kLess>},
    {"<=", ordered_as<Order::kLessEqual>},
    {"==", equal},
    {">", ordered_as<Order::kGreater>},
    {">=", ordered_as<Order::kGreaterEqual>},
    {"boolean", is_kind<Kind::kBool>},
    {"callable", callable},
    {"defined", is_defined},
    {"divisibleby", divisible_by},
    {"eq", equal},
    {"equalto", equal},
    {"escaped", escaped},
    {"even", even},
    {"false", is_bool<false>},
    {"filter", is_filter},
    {"float", is_kind<Kind::kFloat>},
    {"ge", ordered_as<Order::kGreaterEqual>},
    {"greaterthan", ordered_as<Order::kGreater>},
    {"gt", ordered_as<Order::kGreater>},
    {"in", in},
    {"integer", is_kind<Kind::kInt>},
    {"iterable", iterable},
    {"le", ordered_as<Order::kLessEqual>},
    {"lessthan", ordered_as<Order::kLess>},
    {"lower", lower},
    {"lt", ordered_as<Order::kLess>},
    {"mapping", is_kind<Kind::kDict>},
    {"ne", not_equal},
    {"none", is_kind<Kind::kNone>},
    {"number", is_number},
    {"odd", odd},
    {"sameas", same_as},
    {"sequence", sequence},
    {"string", is_kind<Kind::kString>},
    {"test", is_test},
    {"true", is_bool<true>},
    {"undefined", is_kind<Kind::kUndefined>},
    {"upper", upper},
};

}  // namespace

TestFunction find_test(std::string_view name) {
  for (const Entry& entry : kTests) {
    if (entry.name == name) return entry.function;
  }
  return nullptr;
}

}  // namespace nfp::jinja
