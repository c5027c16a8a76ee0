// Python's operators on values.
#include <algorithm>
#include <cmath>

#include "text/jinja/text.h"
#include "text/jinja/value.h"

namespace nfp::jinja {
namespace {

double real_of(const Value& number) {
  return number.is(Kind::kFloat) ? number.as_real() : static_cast<double>(number.as_int());
}

// Of an order's sign, or of two numbers and 0.
template <typename Number>
bool holds(Compare op, Number a, Number b) {
  return op == Compare::kLess ? a < b : op == Compare::kLessEqual ? a <= b : op == Compare::kGreater ? a > b : a >= b;
}

bool same(Runtime& rt, const Value& a, const Value& b) { return identical(a, b) || equals(rt, a, b); }

bool ordered(Runtime& rt, Compare op, const Value& a, const Value& b) {
  const auto nest = rt.nest();
  if (a.is_integral() && b.is_integral()) return holds(op, a.as_int(), b.as_int());
  if (a.is_number() && b.is_number()) return holds(op, real_of(a), real_of(b));
  if (a.undefined()) rt.fail_undefined(a);
  if (b.undefined()) rt.fail_undefined(b);
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    rt.work(std::min(a.text().size(), b.text().size()));
    return holds(op, a.text().compare(b.text()), 0);  // UTF-8 bytes sort as code points do
  }
  if (a.is_sequence() && a.kind() == b.kind()) {
    const auto& left = a.items();
    const auto& right = b.items();
    for (size_t i = 0; i < left.size() && i < right.size(); ++i) {
      rt.step();
      if (!same(rt, left[i], right[i])) return ordered(rt, op, left[i], right[i]);
    }
    return holds(op, left.size(), right.size());
  }
  rt.fail("'{}' not supported between instances of '{}' and '{}'", kCompareSymbols[static_cast<size_t>(op)],
          type_name(a), type_name(b));
}

bool contains(Runtime& rt, const Value& container, const Value& item) {
  if (container.is(Kind::kString)) {
    if (!item.is(Kind::kString)) rt.fail("'in <string>' requires string as left operand, not {}", type_name(item));
    return find_text(rt, container.text(), item.text(), 0) != std::string_view::npos;
  }
  if (container.is(Kind::kDict)) return rt.find(container.as_dict(), item) != nullptr;
  Cursor cursor(rt, container);
  for (Value candidate; cursor.next(&candidate);) {
    if (same(rt, candidate, item)) return true;
  }
  return false;
}

// a to the b >= 0; fails where it is too large.
Int power(Runtime& rt, Int a, Int b) {
  Int result = 1;
  const auto multiply = [&](Int& x, Int y) {
    if (__builtin_mul_overflow(x, y, &x) || x >= kIntBound || x <= -kIntBound) rt.fail("an integer is too large");
  };
  for (; b > 0; b >>= 1) {
    if ((b & 1) != 0) multiply(result, a);
    if (b > 1) multiply(a, a);
  }
  return result;
}

Value real_power(Runtime& rt, double a, double b) {
  if (a == 0 && b < 0) rt.fail("0.0 cannot be raised to a negative power");
  const double result = std::pow(a, b);
  if (std::isnan(result) && !std::isnan(a) && !std::isnan(b)) {
    rt.fail("complex numbers are not supported in chat templates");
  }
  if (std::isinf(result) && std::isfinite(a) && std::isfinite(b)) rt.fail("Numerical result out of range");
  return Value::real(result);
}

// Rounded down, and what is left then, which has the divisor's sign.
Value floor_division(Runtime& rt, Binary op, double a, double b) {
  if (b == 0) rt.fail("float floor division by zero");
  double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest == 0) {
    rest = std::copysign(0.0, b);
  } else if ((b < 0) != (rest < 0)) {
    rest += b;
    quotient -= 1;
  }
  if (op == Binary::kModulo) return Value::real(rest);
  if (quotient == 0) return Value::real(std::copysign(0.0, a / b));
  const double whole = std::floor(quotient);
  return Value::real(quotient - whole > 0.5 ? whole + 1 : whole);
}

Value integer_arithmetic(Runtime& rt, Binary op, Int a, Int b) {
  Int result = 0;
  bool overflow = false;
  switch (op) {
    case Binary::kAdd:
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case Binary::kSubtract:
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case Binary::kMultiply:
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    default: {  // rounds down, and the remainder has the divisor's sign
      if (b == 0) rt.fail("integer division or modulo by zero");
      const Int quotient = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
      result = op == Binary::kFloorDivide ? quotient : a - quotient * b;
    }
  }
  if (overflow || result >= kIntBound || result <= -kIntBound) rt.fail("an integer is too large");
  return Value::integer(result);
}

Value number_arithmetic(Runtime& rt, Binary op, const Value& a, const Value& b) {
  if (op == Binary::kPower && a.is_integral() && b.is_integral() && b.as_int() >= 0) {
    return Value::integer(power(rt, a.as_int(), b.as_int()));
  }
  if (op != Binary::kDivide && op != Binary::kPower && a.is_integral() && b.is_integral()) {
    return integer_arithmetic(rt, op, a.as_int(), b.as_int());
  }
  const double left = real_of(a), right = real_of(b);
  switch (op) {
    case Binary::kAdd:
      return Value::real(left + right);
    case Binary::kSubtract:
      return Value::real(left - right);
    case Binary::kMultiply:
      return Value::real(left * right);
    case Binary::kDivide:
      if (right == 0) rt.fail("division by zero");
      return Value::real(left / right);
    case Binary::kPower:
      return real_power(rt, left, right);
    default:
      return floor_division(rt, op, left, right);
  }
}

Value repeat(Runtime& rt, const Value& string, Int count) {
  const std::string_view text = string.text();
  rt.charge(text.size(), count);
  std::string out;
  for (Int i = 0; i < count && !text.empty(); ++i) out += text;
  return rt.string_of(string, std::move(out));
}

Value repeat_items(Runtime& rt, const Value& list, Int count) {
  const std::vector<Value>& items = list.items();
  count = items.empty() ? 0 : std::max<Int>(count, 0);
  rt.charge(items.size() * sizeof(Value), count);
  std::vector<Value> out;
  for (Int i = 0; i < count; ++i) out.insert(out.end(), items.begin(), items.end());
  return rt.list(std::move(out), list.kind());
}

Value concatenate(Runtime& rt, const Value& a, const Value& b) {
  if (a.is_safe() || b.is_safe()) {
    return rt.string(escaped(rt, a) + escaped(rt, b), /*safe=*/true);
  }
  if (a.is(Kind::kString)) {
    std::string out;
    out.reserve(a.text().size() + b.text().size());
    out += a.text();
    out += b.text();
    return rt.string(std::move(out));
  }
  rt.charge(sizeof(Value), static_cast<Int>(a.items().size()) + static_cast<Int>(b.items().size()));
  std::vector<Value> items = a.items();
  items.insert(items.end(), b.items().begin(), b.items().end());
  return rt.list(std::move(items), a.kind());
}

}  // namespace

bool truthy(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return v.as_int() != 0;
    case Kind::kFloat:
      return v.as_real() != 0;
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
    case Kind::kDict:
      return length(rt, v) != 0;
    default:
      return true;
  }
}

bool identical(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.is(Kind::kInt))
    return a.as_int() == b.as_int() && a.as_int() >= -5 && a.as_int() <= 256;  // CPython keeps these
  return a.is(Kind::kNone) || (a.is(Kind::kBool) && a.as_int() == b.as_int()) ||
         (!a.is_number() && a.pointer() == b.pointer());
}

bool equals(Runtime& rt, const Value& a, const Value& b) {
  const auto nest = rt.nest();
  if (a.is_integral() && b.is_integral()) return a.as_int() == b.as_int();
  if (a.is_number() && b.is_number()) return real_of(a) == real_of(b);
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      rt.work(std::min(a.text().size(), b.text().size()));
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple: {
      const auto& left = a.items();
      const auto& right = b.items();
      if (left.size() != right.size()) return false;
      for (size_t i = 0; i < left.size(); ++i) {
        rt.step();
        if (!same(rt, left[i], right[i])) return false;
      }
      return true;
    }
    case Kind::kDict: {
      const Dict& right = b.as_dict();
      if (a.as_dict().entries.size() != right.entries.size()) return false;
      for (const Dict::Entry& entry : a.as_dict().entries) {
        const Value* other = rt.find(right, entry.key);
        if (other == nullptr || !same(rt, entry.value, *other)) return false;
      }
      return true;
    }
    case Kind::kView:
      if (a.pointer() == b.pointer()) return true;
      rt.fail("comparing two views or ranges is not supported in chat templates");
    default:
      return a.pointer() == b.pointer();
  }
}

bool compare(Runtime& rt, Compare op, const Value& a, const Value& b) {
  switch (op) {
    case Compare::kEqual:
    case Compare::kNotEqual:
      return equals(rt, a, b) == (op == Compare::kEqual);
    case Compare::kIn:
    case Compare::kNotIn:
      return contains(rt, b, a) == (op == Compare::kIn);
    default:
      return ordered(rt, op, a, b);
  }
}

std::vector<Value> sorted(Runtime& rt, const std::vector<Value>& items, const std::vector<Value>& keys, bool reverse) {
  std::vector<size_t> order;
  const auto less = [&](size_t a, size_t b) {
    rt.step();
    return !same(rt, keys[a], keys[b]) && ordered(rt, Compare::kLess, keys[a], keys[b]);
  };
  // By insertion: the standard library's sorts promise nothing for an inconsistent order.
  for (size_t i = 0; i < items.size(); ++i) {
    rt.charge(sizeof(size_t) + sizeof(Value));
    const size_t item = reverse ? items.size() - 1 - i : i;
    auto place = order.end();
    while (place != order.begin() && less(item, place[-1])) --place;
    order.insert(place, item);
  }
  if (reverse) std::reverse(order.begin(), order.end());
  std::vector<Value> out;
  out.reserve(order.size());
  for (const size_t i : order) out.push_back(items[i]);
  return out;
}

Value arithmetic(Runtime& rt, Binary op, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return number_arithmetic(rt, op, a, b);
  if (op == Binary::kModulo && a.is(Kind::kString)) return format_percent(rt, a, b);
  if (op == Binary::kAdd && a.kind() == b.kind() && (a.is(Kind::kString) || a.is_sequence())) {
    return concatenate(rt, a, b);
  }
  if (op == Binary::kMultiply && a.is(Kind::kString) && b.is_integral()) return repeat(rt, a, b.as_int());
  if (op == Binary::kMultiply && b.is(Kind::kString) && a.is_integral()) return repeat(rt, b, a.as_int());
  if (op == Binary::kMultiply && a.is_sequence() && b.is_integral()) return repeat_items(rt, a, b.as_int());
  if (op == Binary::kMultiply && b.is_sequence() && a.is_integral()) return repeat_items(rt, b, a.as_int());
  if (a.undefined()) rt.fail_undefined(a);
  if (b.undefined()) rt.fail_undefined(b);
  if (op == Binary::kAdd && a.is(Kind::kString)) {
    rt.fail("can only concatenate str (not \"{}\") to str", type_name(b));
  }
  rt.fail("unsupported operand type(s) for {}: '{}' and '{}'", kBinarySymbols[static_cast<size_t>(op)], type_name(a),
          type_name(b));
}

Value negate(Runtime& rt, const Value& a) {
  if (a.is_integral()) return Value::integer(-a.as_int());
  if (a.is(Kind::kFloat)) return Value::real(-a.as_real());
  if (a.undefined()) rt.fail_undefined(a);
  rt.fail("bad operand type for unary -: '{}'", type_name(a));
}

Int int_argument(Runtime& rt, const Value& v, const char* what) {
  if (v.is_integral()) return v.as_int();
  if (v.undefined()) rt.fail_undefined(v);
  rt.fail("{} must be an integer, not '{}'", what, type_name(v));
}

}  // namespace nfp::jinja
