#include "text/unicode.h"

#include <utf8proc.h>

#include <algorithm>

#include "text/utf8.h"

namespace nfp::text {
namespace {

utf8proc_category_t category(char32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }
bool is_cased(char32_t c) {
  const utf8proc_category_t k = category(c);
  return k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LT;
}

// Case_Ignorable, but for its rarest members.
bool is_case_ignorable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return c == '\'' || c == '.' || c == ':' || c == 0xB7 || c == 0x2018 || c == 0x2019;
  }
}

// Whether the capital sigma at byte `at` ends a word (Final_Sigma of Unicode 15, table 3-17). Scans no further than the
// next letters, so that a text of sigmas takes linear time.
bool is_final_sigma(std::string_view text, size_t at) {
  bool after_letter = false;
  for (size_t end = at; end > 0;) {
    const size_t begin = last_character(text.substr(0, end));
    size_t pos = begin;
    const char32_t before = next_code_point(text, pos);
    if (!is_case_ignorable(before)) {
      after_letter = is_cased(before);
      break;
    }
    end = begin;
  }
  if (!after_letter) return false;
  size_t pos = at;
  next_code_point(text, pos);
  while (pos < text.size()) {
    const char32_t after = next_code_point(text, pos);
    if (!is_case_ignorable(after)) return !is_cased(after);
  }
  return true;
}

void append_lower(std::string& out, std::string_view text, size_t at, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  } else if (c == 0x130) {  // I with a dot: an i, and the dot as a mark
    out += "i\xCC\x87";
  } else if (c == 0x3A3) {
    append_utf8(out, is_final_sigma(text, at) ? 0x3C2 : 0x3C3);
  } else {
    append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
  }
}

// The blocks of SpecialCasing.txt's letters with capitals of several letters.
bool has_long_capital(char32_t c) {
  return c == 0x149 || c == 0x1F0 || c == 0x390 || c == 0x3B0 || c == 0x587 || (c >= 0x1E96 && c <= 0x1E9A) ||
         (c >= 0x1F50 && c <= 0x1F56) || (c >= 0x1F80 && c <= 0x1FFC) || (c >= 0xFB00 && c <= 0xFB17);
}

bool append_capital(std::string& out, char32_t c, bool title) {
  const auto letter = static_cast<utf8proc_int32_t>(c);
  if (c < 0x80) {
    out += static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c);
  } else if (c == 0xDF) {
    out += title ? "Ss" : "SS";
  } else if (has_long_capital(c)) {
    return false;
  } else {
    append_utf8(out, static_cast<char32_t>(title ? utf8proc_totitle(letter) : utf8proc_toupper(letter)));
  }
  return true;
}

}  // namespace

size_t count_code_points(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return !is_utf8_continuation(c); }));
}

size_t byte_of(std::string_view text, size_t index) {
  size_t pos = 0;
  for (; index > 0 && pos < text.size(); --index) pos += utf8_length(text[pos]);
  return pos;
}

bool is_python_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }
bool is_line_break(char32_t c) {
  return (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}
bool is_word(char32_t c) {
  const utf8proc_category_t k = category(c);
  const bool is_letter = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
  const bool is_number = k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
  return c == '_' || is_letter || is_number;
}

bool is_printable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return c == ' ';
    default:
      return true;
  }
}

std::optional<std::string> change_case(std::string_view text, Case to) {
  std::string out;
  out.reserve(text.size());
  bool after_letter = false;
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const char32_t c = next_code_point(text, pos);
    const bool capital =
        to == Case::kUpper || (to == Case::kCapitalize && at == 0) || (to == Case::kTitle && !after_letter);
    if (!capital) {
      append_lower(out, text, at, c);
    } else if (!append_capital(out, c, to != Case::kUpper)) {
      return std::nullopt;
    }
    after_letter = is_cased(c);
  }
  return out;
}

std::string_view strip_space(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    size_t after = 0;
    if (!is_python_space(next_code_point(text, after))) break;
    text.remove_prefix(after);
  }
  while (right && !text.empty()) {
    const size_t last = last_character(text);
    size_t pos = last;
    if (!is_python_space(next_code_point(text, pos))) break;
    text = text.substr(0, last);
  }
  return text;
}

}  // namespace nfp::text
