// UTF-8 as Unicode 15, section 3.9 (table 3-7) defines it: no surrogates, nothing above U+10FFFF, no overlong forms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nfp::text {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// What stands at the start of nonempty bytes.
struct Utf8Unit {
  enum Kind : uint8_t {
    kComplete,    // one code point of `size` bytes
    kIncomplete,  // all bytes up to the end: a sequence could go on after them
    kIllFormed,   // the maximal ill-formed part, `size` bytes: one U+FFFD by convention (table 3-8)
  };
  Kind kind;
  uint8_t size;
};
Utf8Unit utf8_unit(std::string_view bytes);

bool is_utf8(std::string_view bytes);

// Copies `bytes` with U+FFFD for each maximal ill-formed part, as Rust's String::from_utf8_lossy does.
std::string utf8_lossy(std::string_view bytes);

// The code point at `text[offset]` of valid UTF-8; moves `offset` past it.
inline char32_t next_code_point(std::string_view text, size_t& offset) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
  const char32_t lead = byte(offset);
  if (lead < 0x80) {
    offset += 1;
    return lead;
  }
  if (lead < 0xE0) {
    offset += 2;
    return (lead & 0x1F) << 6 | (byte(offset - 1) & 0x3F);
  }
  if (lead < 0xF0) {
    offset += 3;
    return (lead & 0x0F) << 12 | (byte(offset - 2) & 0x3F) << 6 | (byte(offset - 1) & 0x3F);
  }
  offset += 4;
  return (lead & 0x07) << 18 | (byte(offset - 3) & 0x3F) << 12 | (byte(offset - 2) & 0x3F) << 6 |
         (byte(offset - 1) & 0x3F);
}

// Bytes of the sequence that begins with this lead byte of valid UTF-8.
inline size_t utf8_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

inline bool is_utf8_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Unicode's White_Space property, as Rust's char::is_whitespace and Oniguruma's \s.
bool is_white_space(char32_t code_point);
// Bytes of white space at the beginning and at the end of valid UTF-8.
size_t leading_white_space(std::string_view text);
size_t trailing_white_space(std::string_view text);

// Where the last character of nonempty valid UTF-8 begins.
inline size_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (is_utf8_continuation(text[at])) --at;
  return at;
}

// `code_point` is a Unicode scalar value.
void append_utf8(std::string& out, char32_t code_point);

}  // namespace nfp::text
