#include <cmath>

#include "text/jinja/format_text.h"
#include "text/jinja/html.h"
#include "text/jinja/operators.h"

namespace nfp::jinja {
namespace {

UInt magnitude(Int i) { return i < 0 ? UInt{0} - static_cast<UInt>(i) : static_cast<UInt>(i); }

int bits(UInt u) {
  const auto high = static_cast<uint64_t>(u >> 64);
  const auto low = static_cast<uint64_t>(u);
  return high != 0 ? 128 - __builtin_clzll(high) : low != 0 ? 64 - __builtin_clzll(low) : 0;
}

Int multiply_ints(Runtime& rt, Int a, Int b) {
  // Unsigned, because clang's overflow check of a signed 128-bit product needs a run-time library that GCC's does
  // not have; the sum of the bit lengths says beforehand that it fits.
  if (bits(magnitude(a)) + bits(magnitude(b)) > 126) rt.fail("the product of two integers is too large");
  const UInt product = magnitude(a) * magnitude(b);
  return checked_int(rt, (a < 0) != (b < 0) ? -static_cast<Int>(product) : static_cast<Int>(product)).as_int();
}

Int floor_div_ints(Int a, Int b) {
  const Int quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

struct RealDivision {
  double quotient;
  double remainder;
};

// Python's divmod of floats: the remainder has the divisor's sign.
RealDivision divide_reals(Runtime& rt, double a, double b) {
  if (b == 0) rt.fail("float division by zero");
  double remainder = std::fmod(a, b);
  double quotient = (a - remainder) / b;
  if (remainder != 0) {
    if ((b < 0) != (remainder < 0)) {
      remainder += b;
      quotient -= 1;
    }
  } else {
    remainder = std::copysign(0.0, b);
  }
  if (quotient != 0) {
    const double floor = std::floor(quotient);
    quotient = quotient - floor > 0.5 ? floor + 1 : floor;
  } else {
    quotient = std::copysign(0.0, a / b);
  }
  return {quotient, remainder};
}

[[noreturn]] void fail_operands(Runtime& rt, const char* op, const Value& a, const Value& b) {
  if (a.undefined()) fail_undefined(rt, a);
  if (b.undefined()) fail_undefined(rt, b);
  rt.fail("unsupported operand type(s) for {}: '{}' and '{}'", op, type_name(a), type_name(b));
}

Value repeat(Runtime& rt, const Value& sequence, Int count) {
  if (count < 0) count = 0;
  if (sequence.is(Kind::kString)) {
    const Str& s = sequence.as_str();
    if (!s.text.empty() && count > static_cast<Int>(rt.memory_left() / s.text.size())) {
      rt.charge(UINT64_MAX / 2);  // fails with the message of the memory limit
    }
    std::string out;
    if (!s.text.empty()) {
      out.reserve(s.text.size() * static_cast<size_t>(count));
      for (Int i = 0; i < count; ++i) out += s.text;
    }
    return rt.string(std::move(out), s.safe);
  }
  const auto& items = sequence.as_list().items;
  auto* list = rt.make<List>();
  if (!items.empty()) {
    if (count > static_cast<Int>(rt.memory_left() / sizeof(Value) / items.size())) rt.charge(UINT64_MAX / 2);
    rt.charge(items.size() * static_cast<size_t>(count) * sizeof(Value));
    list->items.reserve(items.size() * static_cast<size_t>(count));
    for (Int i = 0; i < count; ++i) list->items.insert(list->items.end(), items.begin(), items.end());
  }
  return Value::object(sequence.kind(), list);
}

bool is_sequence(const Value& v) { return v.is(Kind::kString) || v.is_list_like(); }

}  // namespace

Value checked_int(Runtime& rt, Int i) {
  if (i >= kIntBound || i <= -kIntBound) rt.fail("an integer is too large");
  return Value::integer(i);
}

Value int_of(Runtime& rt, double d) {
  if (std::isnan(d)) rt.fail("cannot convert float NaN to integer");
  if (std::isinf(d)) rt.fail("cannot convert float infinity to integer");
  if (std::fabs(d) >= 0x1p120) rt.fail("an integer is too large");
  return Value::integer(static_cast<Int>(d));
}

double real_of(Runtime& rt, const Value& number) {
  if (number.is(Kind::kFloat)) return number.as_real();
  if (number.is_integral()) return static_cast<double>(number.as_int());
  if (number.undefined()) fail_undefined(rt, number);
  rt.fail("a number is needed, not '{}'", type_name(number));
}

Int int_argument(Runtime& rt, const Value& v, const char* what) {
  if (v.is_integral()) return v.as_int();
  if (v.undefined()) fail_undefined(rt, v);
  rt.fail("{} must be an integer, not '{}'", what, type_name(v));
}

Value add(Runtime& rt, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return checked_int(rt, a.as_int() + b.as_int());
  if (a.is_number() && b.is_number()) return Value::real(real_of(rt, a) + real_of(rt, b));
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    const Str& left = a.as_str();
    const Str& right = b.as_str();
    if (left.safe != right.safe) {  // Markup escapes what is joined to it
      return left.safe ? rt.string(left.text + escape_html(rt, right.text), true)
                       : rt.string(escape_html(rt, left.text) + right.text, true);
    }
    std::string out;
    out.reserve(left.text.size() + right.text.size());
    out += left.text;
    out += right.text;
    return rt.string(std::move(out), left.safe);
  }
  if (a.is_list_like() && a.kind() == b.kind()) {
    const auto& left = a.as_list().items;
    const auto& right = b.as_list().items;
    rt.charge((left.size() + right.size()) * sizeof(Value));
    auto* list = rt.make<List>();
    list->items.reserve(left.size() + right.size());
    list->items = left;
    list->items.insert(list->items.end(), right.begin(), right.end());
    return Value::object(a.kind(), list);
  }
  if (a.is(Kind::kString) && !b.undefined()) {
    rt.fail("can only concatenate str (not \"{}\") to str", type_name(b));
  }
  fail_operands(rt, "+", a, b);
}

Value subtract(Runtime& rt, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return checked_int(rt, a.as_int() - b.as_int());
  if (a.is_number() && b.is_number()) return Value::real(real_of(rt, a) - real_of(rt, b));
  fail_operands(rt, "-", a, b);
}

Value multiply(Runtime& rt, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return Value::integer(multiply_ints(rt, a.as_int(), b.as_int()));
  if (a.is_number() && b.is_number()) return Value::real(real_of(rt, a) * real_of(rt, b));
  if (is_sequence(a) && b.is_integral()) return repeat(rt, a, b.as_int());
  if (is_sequence(b) && a.is_integral()) return repeat(rt, b, a.as_int());
  fail_operands(rt, "*", a, b);
}

Value divide(Runtime& rt, const Value& a, const Value& b) {
  if (!a.is_number() || !b.is_number()) fail_operands(rt, "/", a, b);
  const double divisor = real_of(rt, b);
  if (divisor == 0) rt.fail("division by zero");
  return Value::real(real_of(rt, a) / divisor);
}

Value floor_divide(Runtime& rt, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) {
    if (b.as_int() == 0) rt.fail("integer division or modulo by zero");
    return Value::integer(floor_div_ints(a.as_int(), b.as_int()));
  }
  if (!a.is_number() || !b.is_number()) fail_operands(rt, "//", a, b);
  return Value::real(divide_reals(rt, real_of(rt, a), real_of(rt, b)).quotient);
}

Value modulo(Runtime& rt, const Value& a, const Value& b) {
  if (a.is(Kind::kString)) return percent_format(rt, a, b);
  if (a.is_integral() && b.is_integral()) {
    if (b.as_int() == 0) rt.fail("integer division or modulo by zero");
    return Value::integer(a.as_int() - floor_div_ints(a.as_int(), b.as_int()) * b.as_int());
  }
  if (!a.is_number() || !b.is_number()) fail_operands(rt, "%", a, b);
  return Value::real(divide_reals(rt, real_of(rt, a), real_of(rt, b)).remainder);
}

Value power(Runtime& rt, const Value& a, const Value& b) {
  if (!a.is_number() || !b.is_number()) fail_operands(rt, "**", a, b);
  if (a.is_integral() && b.is_integral() && b.as_int() >= 0) {
    Int base = a.as_int();
    Int exponent = b.as_int();
    if (base == 0 || base == 1) return Value::integer(exponent == 0 ? 1 : base);
    if (base == -1) return Value::integer(exponent % 2 == 0 ? 1 : -1);
    if (exponent > 120) rt.fail("the power of two integers is too large");
    Int result = 1;
    for (; exponent > 0; --exponent) result = multiply_ints(rt, result, base);
    return Value::integer(result);
  }
  const double base = real_of(rt, a);
  const double exponent = real_of(rt, b);
  if (base == 0 && exponent < 0) rt.fail("0.0 cannot be raised to a negative power");
  if (base < 0 && std::isfinite(base) && std::isfinite(exponent) && exponent != std::floor(exponent)) {
    rt.fail("a negative number to a fractional power is complex, which is not supported");
  }
  const double result = std::pow(base, exponent);
  if (std::isinf(result) && std::isfinite(base) && std::isfinite(exponent))
    rt.fail("the power of two numbers is too large");
  return Value::real(result);
}

Value negate(Runtime& rt, const Value& a) {
  if (a.is_integral()) return Value::integer(-a.as_int());
  if (a.is(Kind::kFloat)) return Value::real(-a.as_real());
  if (a.undefined()) fail_undefined(rt, a);
  rt.fail("bad operand type for unary -: '{}'", type_name(a));
}

Value plus(Runtime& rt, const Value& a) {
  if (a.is_integral()) return Value::integer(a.as_int());
  if (a.is(Kind::kFloat)) return a;
  if (a.undefined()) fail_undefined(rt, a);
  rt.fail("bad operand type for unary +: '{}'", type_name(a));
}

}  // namespace nfp::jinja
