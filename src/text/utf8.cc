#include "text/utf8.h"

#include <simdjson.h>

namespace nfp::text {

Utf8Unit utf8_unit(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8Unit::kComplete, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Unit::kIllFormed, 1};
  // The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Utf8Unit::kIncomplete, static_cast<uint8_t>(i)};
    const bool good = i == 1 ? byte(i) >= low && byte(i) <= high : is_utf8_continuation(bytes[i]);
    if (!good) return {Utf8Unit::kIllFormed, static_cast<uint8_t>(i)};
  }
  return {Utf8Unit::kComplete, static_cast<uint8_t>(length)};
}

bool is_utf8(std::string_view bytes) { return simdjson::validate_utf8(bytes.data(), bytes.size()); }

std::string utf8_lossy(std::string_view bytes) {
  if (is_utf8(bytes)) return std::string(bytes);
  std::string out;
  out.reserve(bytes.size() + bytes.size() / 8);
  while (!bytes.empty()) {
    const Utf8Unit unit = utf8_unit(bytes);
    if (unit.kind == Utf8Unit::kComplete) {
      out += bytes.substr(0, unit.size);
    } else {
      out += kReplacement;
    }
    bytes.remove_prefix(unit.size);
  }
  return out;
}

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t leading_white_space(std::string_view text) {
  size_t end = 0;
  for (size_t next = 0; next < text.size() && is_white_space(next_code_point(text, next));) end = next;
  return end;
}

size_t trailing_white_space(std::string_view text) {
  size_t begin = text.size();
  while (begin > 0) {
    const size_t last = last_character(text.substr(0, begin));
    size_t next = last;
    if (!is_white_space(next_code_point(text, next))) break;
    begin = last;
  }
  return text.size() - begin;
}

void append_utf8(std::string& out, char32_t code_point) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

}  // namespace nfp::text
