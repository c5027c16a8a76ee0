#include "text/jinja/string_literal.h"

#include <fmt/format.h>

#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

bool unescape(std::string_view literal, std::string* out, std::string* error) {
  // jinja2 encodes a literal so before it resolves escapes, which shows in one case: a backslash before a letter that
  // is not ASCII turns the letter into its escape's text.
  const std::string text = unicode::escape_non_ascii(literal);
  out->clear();
  for (size_t pos = 0; pos < text.size();) {
    const char c = text[pos++];
    if (c != '\\' || pos == text.size()) {
      *out += c;
      continue;
    }
    const char kind = text[pos++];
    switch (kind) {
      case '\n':
        break;
      case '\\':
      case '\'':
      case '"':
        *out += kind;
        break;
      case 'a':
        *out += '\a';
        break;
      case 'b':
        *out += '\b';
        break;
      case 'f':
        *out += '\f';
        break;
      case 'n':
        *out += '\n';
        break;
      case 'r':
        *out += '\r';
        break;
      case 't':
        *out += '\t';
        break;
      case 'v':
        *out += '\v';
        break;
      case '0':
      case '1':
      case '2':
      case '3':
      case '4':
      case '5':
      case '6':
      case '7': {
        uint32_t value = static_cast<uint32_t>(kind - '0');
        for (int i = 0; i < 2 && pos < text.size() && text[pos] >= '0' && text[pos] <= '7'; ++i) {
          value = value * 8 + static_cast<uint32_t>(text[pos++] - '0');
        }
        unicode::append(*out, value);
        break;
      }
      case 'x':
      case 'u':
      case 'U': {
        const int digits = kind == 'x' ? 2 : kind == 'u' ? 4 : 8;
        uint32_t value = 0;
        for (int i = 0; i < digits; ++i) {
          const int digit = pos < text.size() ? hex_digit(text[pos]) : -1;
          if (digit < 0) {
            *error = fmt::format("truncated \\{} escape in a string", kind);
            return false;
          }
          value = value << 4 | static_cast<uint32_t>(digit);
          ++pos;
        }
        if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
          *error = fmt::format("illegal Unicode character in a \\{} escape", kind);
          return false;
        }
        unicode::append(*out, value);
        break;
      }
      case 'N':
        *error = "\\N{...} escapes are not supported; write the character itself";
        return false;
      default:
        *out += '\\';
        *out += kind;
    }
  }
  return true;
}

}  // namespace nfp::jinja
