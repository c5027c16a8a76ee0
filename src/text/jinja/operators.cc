#include "text/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "text/jinja/text.h"

namespace nfp::jinja {
namespace {

const char* symbol(Compare op) {
  return op == Compare::kLess ? "<" : op == Compare::kLessEqual ? "<=" : op == Compare::kGreater ? ">" : ">=";
}
const char* symbol(Binary op) {
  constexpr const char* kSymbols[] = {"+", "-", "*", "/", "//", "%"};
  return kSymbols[static_cast<size_t>(op)];
}

// Of an order's sign.
bool holds(Compare op, int sign) {
  switch (op) {
    case Compare::kLess:
      return sign < 0;
    case Compare::kLessEqual:
      return sign <= 0;
    case Compare::kGreater:
      return sign > 0;
    default:
      return sign >= 0;
  }
}

bool same(Runtime& rt, const Value& a, const Value& b) { return identical(a, b) || equals(rt, a, b); }

bool ordered(Runtime& rt, Compare op, const Value& a, const Value& b) {
  const Runtime::Nest nest(rt);
  if (a.is_number() && b.is_number()) {
    const int sign = compare_numbers(a, b);
    return sign != 2 && holds(op, sign);
  }
  if (a.undefined()) rt.fail_undefined(a);
  if (b.undefined()) rt.fail_undefined(b);
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    rt.work(std::min(a.text().size(), b.text().size()));
    return holds(op, a.text().compare(b.text()));  // UTF-8 bytes sort as code points do
  }
  if (a.is_sequence() && a.kind() == b.kind()) {
    const auto& left = a.items();
    const auto& right = b.items();
    for (size_t i = 0; i < left.size() && i < right.size(); ++i) {
      rt.step();
      if (!same(rt, left[i], right[i])) return ordered(rt, op, left[i], right[i]);
    }
    return holds(op, left.size() < right.size() ? -1 : left.size() > right.size() ? 1 : 0);
  }
  rt.fail("'{}' not supported between instances of '{}' and '{}'", symbol(op), type_name(a), type_name(b));
}

Value checked(Runtime& rt, Int i) {
  if (i >= kIntBound || i <= -kIntBound) rt.fail("an integer is too large");
  return Value::integer(i);
}

Value multiply_ints(Runtime& rt, Int a, Int b) {
  constexpr Int kHalf = Int{1} << 60;
  const bool fits = a > -kHalf && a < kHalf && b > -kHalf && b < kHalf;
  if (!fits && a != 0 && b != 0 && a != 1 && b != 1) rt.fail("the product of two integers is too large");
  return checked(rt, a * b);
}

Int floor_div_ints(Int a, Int b) {
  const Int quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

// Python's divmod of floats: the remainder has the divisor's sign.
double divide_reals(double a, double b, double* remainder) {
  double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest == 0) {
    rest = std::copysign(0.0, b);
  } else if ((b < 0) != (rest < 0)) {
    rest += b;
    quotient -= 1;
  }
  *remainder = rest;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double floor = std::floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

Value divide_floored(Runtime& rt, Binary op, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) {
    if (b.as_int() == 0) rt.fail("integer division or modulo by zero");
    const Int quotient = floor_div_ints(a.as_int(), b.as_int());
    return Value::integer(op == Binary::kFloorDivide ? quotient : a.as_int() - quotient * b.as_int());
  }
  if (real_of(b) == 0) rt.fail("float division by zero");
  double remainder = 0;
  const double quotient = divide_reals(real_of(a), real_of(b), &remainder);
  return Value::real(op == Binary::kFloorDivide ? quotient : remainder);
}

Value number_arithmetic(Runtime& rt, Binary op, const Value& a, const Value& b) {
  const bool whole = a.is_integral() && b.is_integral();
  switch (op) {
    case Binary::kAdd:
      return whole ? checked(rt, a.as_int() + b.as_int()) : Value::real(real_of(a) + real_of(b));
    case Binary::kSubtract:
      return whole ? checked(rt, a.as_int() - b.as_int()) : Value::real(real_of(a) - real_of(b));
    case Binary::kMultiply:
      return whole ? multiply_ints(rt, a.as_int(), b.as_int()) : Value::real(real_of(a) * real_of(b));
    case Binary::kDivide:
      if (real_of(b) == 0) rt.fail("division by zero");
      return Value::real(real_of(a) / real_of(b));
    default:
      return divide_floored(rt, op, a, b);
  }
}

Value repeat(Runtime& rt, const Value& sequence, Int count) {
  if (sequence.is(Kind::kString)) {
    const std::string_view text = sequence.text();
    rt.charge(text.size(), count);
    std::string out;
    for (Int i = 0; i < count && !text.empty(); ++i) out += text;
    return rt.string(std::move(out));
  }
  const auto& items = sequence.items();
  rt.charge(items.size() * sizeof(Value), count);
  std::vector<Value> out;
  for (Int i = 0; i < count && !items.empty(); ++i) out.insert(out.end(), items.begin(), items.end());
  return rt.list(std::move(out), sequence.kind());
}

Value concatenate(Runtime& rt, const Value& a, const Value& b) {
  if (a.is(Kind::kString)) {
    std::string out;
    out.reserve(a.text().size() + b.text().size());
    out += a.text();
    out += b.text();
    return rt.string(std::move(out));
  }
  std::vector<Value> items;
  rt.charge(sizeof(Value), static_cast<Int>(a.items().size() + b.items().size()));
  items.reserve(a.items().size() + b.items().size());
  items = a.items();
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
      return v.as_bool();
    case Kind::kInt:
      return v.as_int() != 0;
    case Kind::kFloat:
      return v.as_real() != 0;
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
    case Kind::kDict:
    case Kind::kRange:
    case Kind::kLoop:
      return length(rt, v) != 0;
    default:
      return true;
  }
}

bool identical(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kMissing:
    case Kind::kNone:
      return true;
    case Kind::kBool:
    case Kind::kInt:
      return a.as_int() == b.as_int();
    case Kind::kFloat:
      return a.as_real() == b.as_real();
    default:
      return a.pointer() == b.pointer();
  }
}

bool equals(Runtime& rt, const Value& a, const Value& b) {
  const Runtime::Nest nest(rt);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
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
    case Kind::kRange:
      if (a.pointer() == b.pointer()) return true;
      rt.fail("comparing two values of type '{}' is not supported in chat templates", type_name(a));
    default:
      return a.pointer() == b.pointer();
  }
}

bool compare(Runtime& rt, Compare op, const Value& a, const Value& b) {
  switch (op) {
    case Compare::kEqual:
      return equals(rt, a, b);
    case Compare::kNotEqual:
      return !equals(rt, a, b);
    case Compare::kIn:
      return contains(rt, b, a);
    case Compare::kNotIn:
      return !contains(rt, b, a);
    default:
      return ordered(rt, op, a, b);
  }
}

bool contains(Runtime& rt, const Value& container, const Value& item) {
  if (container.is(Kind::kString)) {
    if (!item.is(Kind::kString)) rt.fail("'in <string>' requires string as left operand, not {}", type_name(item));
    return find_text(rt, container.text(), item.text(), 0) != std::string_view::npos;
  }
  if (container.is(Kind::kDict)) return rt.find(container.as_dict(), item) != nullptr;
  if (container.is(Kind::kView) && std::string_view(type_name(container)) == "dict_keys") rt.check_key(item);
  Cursor cursor(rt, container);
  for (Value candidate; cursor.next(&candidate);) {
    if (same(rt, candidate, item)) return true;
  }
  return false;
}

std::vector<Value> sorted(Runtime& rt, const std::vector<Value>& items, const std::vector<Value>& keys, bool reverse) {
  const size_t n = items.size();
  rt.charge(n * (2 * sizeof(size_t) + sizeof(Value)));
  std::vector<size_t> order(n), merged(n);
  for (size_t i = 0; i < n; ++i) order[i] = reverse ? n - 1 - i : i;
  const auto less = [&](size_t a, size_t b) {
    rt.step();
    return !same(rt, keys[a], keys[b]) && ordered(rt, Compare::kLess, keys[a], keys[b]);
  };
  // Merge sort: the standard library's sorts promise nothing for an inconsistent order or a comparison that throws.
  for (size_t width = 1; width < n; width *= 2) {
    for (size_t begin = 0; begin < n; begin += 2 * width) {
      const size_t middle = std::min(begin + width, n), end = std::min(begin + 2 * width, n);
      for (size_t left = begin, right = middle, out = begin; out < end; ++out) {
        const bool take_right = left == middle || (right < end && less(order[right], order[left]));
        merged[out] = take_right ? order[right++] : order[left++];
      }
    }
    order.swap(merged);
  }
  if (reverse) std::reverse(order.begin(), order.end());
  std::vector<Value> out;
  out.reserve(n);
  for (const size_t i : order) out.push_back(items[i]);
  return out;
}

Value arithmetic(Runtime& rt, Binary op, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return number_arithmetic(rt, op, a, b);
  if (op == Binary::kModulo && a.is(Kind::kString)) {
    rt.fail("formatting with % is not supported in chat templates; use ~ or join");
  }
  const auto repeatable = [](const Value& v) { return v.is(Kind::kString) || v.is_sequence(); };
  if (op == Binary::kAdd && a.kind() == b.kind() && repeatable(a)) return concatenate(rt, a, b);
  if (op == Binary::kMultiply && repeatable(a) && b.is_integral()) return repeat(rt, a, b.as_int());
  if (op == Binary::kMultiply && repeatable(b) && a.is_integral()) return repeat(rt, b, a.as_int());
  if (a.undefined()) rt.fail_undefined(a);
  if (b.undefined()) rt.fail_undefined(b);
  if (op == Binary::kAdd && a.is(Kind::kString)) {
    rt.fail("can only concatenate str (not \"{}\") to str", type_name(b));
  }
  rt.fail("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op), type_name(a), type_name(b));
}

Value negate(Runtime& rt, const Value& a) {
  if (a.is_integral()) return Value::integer(-a.as_int());
  if (a.is(Kind::kFloat)) return Value::real(-a.as_real());
  if (a.undefined()) rt.fail_undefined(a);
  rt.fail("bad operand type for unary -: '{}'", type_name(a));
}

Value int_of(Runtime& rt, double d) {
  if (!std::isfinite(d)) rt.fail("cannot convert float {} to integer", std::isnan(d) ? "NaN" : "infinity");
  if (std::fabs(d) >= 0x1p120) rt.fail("an integer is too large");
  return Value::integer(static_cast<Int>(d));
}

double real_of(const Value& number) {
  return number.is(Kind::kFloat) ? number.as_real() : static_cast<double>(number.as_int());
}

Int int_argument(Runtime& rt, const Value& v, const char* what) {
  if (v.is_integral()) return v.as_int();
  if (v.undefined()) rt.fail_undefined(v);
  rt.fail("{} must be an integer, not '{}'", what, type_name(v));
}

}  // namespace nfp::jinja
