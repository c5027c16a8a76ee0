// What Python's str knows about letters, for chat templates: by Unicode's general categories. Texts are valid UTF-8.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace nfp::text {

size_t count_code_points(std::string_view text);
// The byte at which code point `index` starts; index <= count_code_points(text).
size_t byte_of(std::string_view text, size_t index);

bool is_python_space(char32_t c);  // str.isspace, str.strip, and \s of re: White_Space and the separators 1C to 1F
bool is_line_break(char32_t c);    // str.splitlines
bool is_printable(char32_t c);     // what repr leaves unescaped
bool is_word(char32_t c);          // \w of re

enum class Case { kLower, kUpper, kCapitalize, kTitle };
// str.lower, upper, capitalize and title. nullopt: a letter of the text has a capital of several letters (U+FB01 and
// others of SpecialCasing.txt; U+00DF is known).
std::optional<std::string> change_case(std::string_view text, Case to);

// Without Python's white space at its left, its right or both.
std::string_view strip_space(std::string_view text, bool left = true, bool right = true);

}  // namespace nfp::text
