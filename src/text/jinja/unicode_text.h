// Python's view of a string, a sequence of code points, on top of valid UTF-8 in std::string: what templates' strip,
// upper, isdigit, slices and repr need. Every std::string_view here must be valid UTF-8 (see is_valid).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace nfp::jinja::unicode {

bool is_valid(std::string_view bytes);  // no overlong forms, no surrogates
size_t count(std::string_view text);    // code points
// Reads the code point at byte `pos` and moves pos behind it.
uint32_t next(std::string_view text, size_t& pos);
void append(std::string& out, uint32_t code_point);
// The byte at which code point `index` starts; index <= count(text).
size_t byte_of(std::string_view text, size_t index);
// What is not ASCII as \x, \u or \U escapes, as in Python's ascii().
std::string escape_non_ascii(std::string_view text);

bool is_space(uint32_t c);       // str.isspace, str.strip, and \s of re
bool is_line_break(uint32_t c);  // str.splitlines
bool is_alpha(uint32_t c);
bool is_decimal(uint32_t c);
bool is_digit(uint32_t c);
bool is_numeric(uint32_t c);
bool is_alnum(uint32_t c);
bool is_lower(uint32_t c);
bool is_upper(uint32_t c);
bool is_title(uint32_t c);
bool is_printable(uint32_t c);  // what repr leaves unescaped
bool is_word(uint32_t c);       // \w of re

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string casefold(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);  // str.title
std::string swapcase(std::string_view text);

std::string_view strip_left(std::string_view text);
std::string_view strip_right(std::string_view text);

}  // namespace nfp::jinja::unicode
