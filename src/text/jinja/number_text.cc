#include "text/jinja/number_text.h"

#include <cstdlib>
#include <limits>
#include <string>

#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Copies digits that may have single underscores between them; returns how many characters it read.
size_t take_digits(std::string_view text, std::string* out) {
  size_t i = 0;
  while (i < text.size()) {
    const size_t digit = text[i] == '_' && i > 0 ? i + 1 : i;
    if (digit >= text.size() || !is_digit(text[digit])) break;
    *out += text[digit];
    i = digit + 1;
  }
  return i;
}

bool equals_ignoring_case(std::string_view text, std::string_view lower) {
  if (text.size() != lower.size()) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((text[i] | 0x20) != lower[i]) return false;
  }
  return true;
}

}  // namespace

std::optional<Int> parse_int(std::string_view text, int base) {
  if (base != 0 && (base < 2 || base > 36)) return std::nullopt;
  text = unicode::strip_right(unicode::strip_left(text));
  bool negative = false;
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  bool after_prefix = false;
  if (text.size() > 1 && text[0] == '0') {
    const char marker = static_cast<char>(text[1] | 0x20);
    const int marked = marker == 'x' ? 16 : marker == 'o' ? 8 : marker == 'b' ? 2 : 0;
    if (marked != 0 && (base == 0 || base == marked)) {
      base = marked;
      text.remove_prefix(2);
      after_prefix = true;
    }
  }
  if (base == 0) {
    base = 10;
    // A decimal literal has no leading zeros unless it is zero.
    if (text.size() > 1 && text[0] == '0' && text.find_first_not_of("0_") != std::string_view::npos)
      return std::nullopt;
  }
  Int value = 0;
  bool any = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_' && (any || after_prefix)) {
      if (++i >= text.size()) return std::nullopt;
    }
    const char c = text[i];
    const char lower = static_cast<char>(c | 0x20);
    const int digit = is_digit(c) ? c - '0' : lower >= 'a' && lower <= 'z' ? lower - 'a' + 10 : 99;
    if (digit >= base) return std::nullopt;
    value = value * base + digit;
    if (value >= kIntBound) return std::nullopt;
    any = true;
    after_prefix = false;
  }
  if (!any) return std::nullopt;
  return negative ? -value : value;
}

std::optional<double> parse_real(std::string_view text) {
  text = unicode::strip_right(unicode::strip_left(text));
  std::string plain;
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) {
    if (text[0] == '-') plain = "-";
    text.remove_prefix(1);
  }
  const double sign = plain.empty() ? 1 : -1;
  if (equals_ignoring_case(text, "inf") || equals_ignoring_case(text, "infinity")) {
    return sign * std::numeric_limits<double>::infinity();
  }
  if (equals_ignoring_case(text, "nan")) return std::numeric_limits<double>::quiet_NaN();
  const size_t whole = take_digits(text, &plain);
  text.remove_prefix(whole);
  size_t fraction = 0;
  if (!text.empty() && text[0] == '.') {
    plain += '.';
    text.remove_prefix(1);
    fraction = take_digits(text, &plain);
    text.remove_prefix(fraction);
  }
  if (whole + fraction == 0) return std::nullopt;
  if (!text.empty() && (text[0] == 'e' || text[0] == 'E')) {
    plain += 'e';
    text.remove_prefix(1);
    if (!text.empty() && (text[0] == '+' || text[0] == '-')) {
      plain += text[0];
      text.remove_prefix(1);
    }
    const size_t exponent = take_digits(text, &plain);
    if (exponent == 0) return std::nullopt;
    text.remove_prefix(exponent);
  }
  if (!text.empty()) return std::nullopt;
  return std::strtod(plain.c_str(), nullptr);
}

}  // namespace nfp::jinja
