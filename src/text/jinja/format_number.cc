// format(value, specification) of Python: [[fill]align][sign][#][0][width][,_][.precision][type].
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text/jinja/format_text.h"
#include "text/jinja/operators.h"
#include "text/jinja/strings.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

constexpr Int kMaxPrecision = 1000;
constexpr size_t kMaxWidthDigits = 9;

struct Spec {
  std::string fill = " ";
  char align = 0;
  char sign = '-';
  bool alternate = false;
  bool zero = false;
  Int width = 0;
  char grouping = 0;
  Int precision = -1;
  char type = 0;
};

Int read_number(Runtime& rt, std::string_view spec, size_t& pos) {
  const size_t begin = pos;
  Int n = 0;
  for (; pos < spec.size() && spec[pos] >= '0' && spec[pos] <= '9'; ++pos) {
    if (pos - begin >= kMaxWidthDigits) rt.fail("Too many decimal digits in format string");
    n = n * 10 + (spec[pos] - '0');
  }
  return n;
}

bool is_align(char c) { return c == '<' || c == '>' || c == '^' || c == '='; }

Spec parse_spec(Runtime& rt, std::string_view spec) {
  Spec out;
  size_t pos = 0;
  size_t after_fill = 0;
  if (!spec.empty()) unicode::next(spec, after_fill);
  if (after_fill > 0 && after_fill < spec.size() && is_align(spec[after_fill])) {
    out.fill = spec.substr(0, after_fill);
    out.align = spec[after_fill];
    pos = after_fill + 1;
  } else if (!spec.empty() && is_align(spec[0])) {
    out.align = spec[0];
    pos = 1;
  }
  const bool has_fill = pos > 1;
  const auto at = [&](char c) { return pos < spec.size() && spec[pos] == c; };
  if (at('+') || at('-') || at(' ')) out.sign = spec[pos++];
  if (at('#')) {
    out.alternate = true;
    ++pos;
  }
  if (at('0')) {
    out.zero = true;
    if (!has_fill) out.fill = "0";
    if (out.align == 0) out.align = '=';
    ++pos;
  }
  out.width = read_number(rt, spec, pos);
  if (at(',') || at('_')) out.grouping = spec[pos++];
  if (at('.')) {
    const size_t digits = ++pos;
    out.precision = read_number(rt, spec, pos);
    if (pos == digits) rt.fail("Format specifier missing precision");
  }
  if (pos < spec.size()) out.type = spec[pos++];
  if (pos != spec.size()) rt.fail("Invalid format specifier");
  return out;
}

std::string grouped(std::string_view digits, char separator, size_t size) {
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % size == 0) out += separator;
    out += digits[i];
  }
  return out;
}

std::string aligned(Runtime& rt, const Spec& spec, std::string_view prefix, std::string_view body, char if_absent) {
  std::string whole = std::string(prefix) + std::string(body);
  const Int missing = spec.width - static_cast<Int>(unicode::count(whole));
  if (missing <= 0) return whole;
  switch (spec.align != 0 ? spec.align : if_absent) {
    case '<':
      return pad(rt, whole, 0, missing, spec.fill);
    case '^':
      return pad(rt, whole, missing / 2, missing - missing / 2, spec.fill);
    case '=':
      return std::string(prefix) + pad(rt, body, missing, 0, spec.fill);
    default:
      return pad(rt, whole, missing, 0, spec.fill);
  }
}

// Sign, grouping and padding of digits with an optional fraction or exponent behind them.
std::string number(Runtime& rt, const Spec& spec, bool negative, std::string_view base_prefix, std::string digits,
                   std::string_view tail, size_t group_size) {
  std::string prefix = negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
  prefix += base_prefix;
  if (spec.grouping != 0) {
    std::string body = grouped(digits, spec.grouping, group_size);
    if (spec.align == '=' && spec.fill == "0") {
      rt.charge(static_cast<uint64_t>(spec.width) + digits.size());
      const auto width = static_cast<size_t>(spec.width);
      const size_t fixed = prefix.size() + tail.size();
      const size_t room = width > fixed ? width - fixed : 0;
      if (body.size() < room) {
        // As many digits as with their separators reach the width; a separator never comes first.
        size_t n = digits.size();
        while (n + (n - 1) / group_size < room) ++n;
        digits.insert(0, n - digits.size(), '0');
        body = grouped(digits, spec.grouping, group_size);
      }
    }
    digits = std::move(body);
  }
  digits += tail;
  return aligned(rt, spec, prefix, digits, '>');
}

std::string format_int(Runtime& rt, const Spec& spec, Int i) {
  if (spec.precision >= 0) rt.fail("Precision not allowed in integer format specifier");
  int base = 10;
  std::string_view prefix;
  switch (spec.type) {
    case 'b':
      base = 2;
      prefix = "0b";
      break;
    case 'o':
      base = 8;
      prefix = "0o";
      break;
    case 'x':
      base = 16;
      prefix = "0x";
      break;
    case 'X':
      base = 16;
      prefix = "0X";
      break;
    case 'c': {
      if (i < 0 || i > 0x10FFFF || (i >= 0xD800 && i < 0xE000)) rt.fail("%c arg not in range(0x110000)");
      if (spec.sign != '-') rt.fail("Sign not allowed with integer format specifier 'c'");
      std::string out;
      unicode::append(out, static_cast<uint32_t>(i));
      return aligned(rt, spec, "", out, '<');
    }
    default:
      break;
  }
  if (spec.grouping == ',' && base != 10) rt.fail("Cannot specify ',' with '{}'.", std::string_view(&spec.type, 1));
  return number(rt, spec, i < 0, spec.alternate ? prefix : "", format_digits(i, base, spec.type == 'X'), "",
                base == 10 ? 3 : 4);
}

std::string format_float(Runtime& rt, const Spec& spec, double d) {
  std::string text;
  std::string_view suffix;
  switch (spec.type) {
    case 0:
      if (spec.precision < 0) {
        text = repr_real(d);
      } else {
        text = format_real(rt, d, 'g', std::max<Int>(spec.precision, 1), spec.alternate);
        if (std::isfinite(d) && text.find_first_of(".e") == std::string::npos) text += ".0";
      }
      break;
    case 'n':
      text = format_real(rt, d, 'g', spec.precision < 0 ? 6 : spec.precision, spec.alternate);
      break;
    case '%':
      text = format_real(rt, d * 100, 'f', spec.precision < 0 ? 6 : spec.precision, spec.alternate);
      suffix = "%";
      break;
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
      text = format_real(rt, d, spec.type, spec.precision < 0 ? 6 : spec.precision, spec.alternate);
      break;
    default:
      rt.fail("Unknown format code '{}' for object of type 'float'", std::string_view(&spec.type, 1));
  }
  const bool negative = text[0] == '-';
  if (negative) text.erase(0, 1);
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  return number(rt, spec, negative, "", text.substr(0, digits), text.substr(digits) + std::string(suffix), 3);
}

std::string format_string(Runtime& rt, const Spec& spec, std::string_view text) {
  if (spec.type != 0 && spec.type != 's') {
    rt.fail("Unknown format code '{}' for object of type 'str'", std::string_view(&spec.type, 1));
  }
  if (spec.sign != '-') rt.fail("Sign not allowed in string format specifier");
  if (spec.alternate) rt.fail("Alternate form (#) not allowed in string format specifier");
  if (spec.grouping != 0) rt.fail("Cannot specify '{}' with 's'.", std::string_view(&spec.grouping, 1));
  if (spec.align == '=' && !spec.zero) rt.fail("'=' alignment not allowed in string format specifier");
  Spec plain = spec;
  if (spec.align == '=') plain.align = '<';
  if (spec.precision >= 0 && spec.precision < static_cast<Int>(text.size())) {
    text = text.substr(0, unicode::byte_of(text, static_cast<size_t>(spec.precision)));
  }
  return aligned(rt, plain, "", text, '<');
}

}  // namespace

std::string format_digits(Int i, int base, bool upper) {
  auto rest = static_cast<UInt>(i < 0 ? -i : i);
  std::string out;
  do {
    const auto digit = static_cast<unsigned>(rest % static_cast<unsigned>(base));
    out += static_cast<char>(digit < 10 ? '0' + digit : (upper ? 'A' : 'a') + digit - 10);
    rest /= static_cast<unsigned>(base);
  } while (rest != 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::string format_real(Runtime& rt, double d, char type, Int precision, bool alternate) {
  const bool upper = type >= 'A' && type <= 'Z';
  if (std::isnan(d)) return upper ? "NAN" : "nan";
  if (std::isinf(d)) return d < 0 ? (upper ? "-INF" : "-inf") : (upper ? "INF" : "inf");
  if (precision > kMaxPrecision)
    rt.fail("precision {} is too large; at most {}", repr_int(precision), repr_int(kMaxPrecision));
  const char format[] = {
      '%', alternate ? '#' : '.', alternate ? '.' : '*', alternate ? '*' : type, alternate ? type : '\0', '\0'};
  std::string out(static_cast<size_t>(precision) + 350, '\0');
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  const int n = std::snprintf(out.data(), out.size(), format, static_cast<int>(precision), d);
#pragma GCC diagnostic pop
  out.resize(n < 0 ? 0 : std::min(static_cast<size_t>(n), out.size()));
  rt.charge(out.size());
  return out;
}

std::string ascii_repr(Runtime& rt, const Value& v) { return unicode::escape_non_ascii(repr(rt, v)); }

std::string format_value(Runtime& rt, const Value& v, std::string_view spec_text) {
  if (spec_text.empty()) return to_text(rt, v);
  const Spec spec = parse_spec(rt, spec_text);
  const bool real_type = spec.type != 0 && std::string_view("eEfFgG%").find(spec.type) != std::string_view::npos;
  const bool int_type = spec.type == 0 || std::string_view("bcdoxXn").find(spec.type) != std::string_view::npos;
  if (v.is_integral()) {
    if (real_type) return format_float(rt, spec, real_of(rt, v));
    if (!int_type) rt.fail("Unknown format code '{}' for object of type 'int'", std::string_view(&spec.type, 1));
    return format_int(rt, spec, v.as_int());
  }
  if (v.is(Kind::kFloat)) return format_float(rt, spec, v.as_real());
  if (v.is(Kind::kString)) return format_string(rt, spec, v.text());
  rt.fail("unsupported format string passed to {}.__format__", type_name(v));
}

}  // namespace nfp::jinja
