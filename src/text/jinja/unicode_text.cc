#include "text/jinja/unicode_text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "text/jinja/special_casing.h"

namespace nfp::jinja::unicode {
namespace {

utf8proc_category_t category(uint32_t c) { return utf8proc_category(static_cast<utf8proc_int32_t>(c)); }

struct Range {
  uint32_t first;
  uint32_t last;
};

// Numeric_Type=Digit outside category Nd: superscripts, circled digits and the like.
constexpr Range kOtherDigits[] = {{0xB2, 0xB3},       {0xB9, 0xB9},       {0x1369, 0x1371},   {0x19DA, 0x19DA},
                                  {0x2070, 0x2070},   {0x2074, 0x2079},   {0x2080, 0x2089},   {0x2460, 0x2468},
                                  {0x2474, 0x247C},   {0x2488, 0x2490},   {0x24EA, 0x24EA},   {0x24F5, 0x24FD},
                                  {0x24FF, 0x24FF},   {0x2776, 0x277E},   {0x2780, 0x2788},   {0x278A, 0x2792},
                                  {0x10A40, 0x10A43}, {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A}};
// Other_Lowercase and Other_Uppercase of PropList.txt.
constexpr Range kOtherLower[] = {
    {0xAA, 0xAA},     {0xBA, 0xBA},     {0x2B0, 0x2B8},     {0x2C0, 0x2C1},     {0x2E0, 0x2E4},     {0x345, 0x345},
    {0x37A, 0x37A},   {0x1D2C, 0x1D6A}, {0x1D78, 0x1D78},   {0x1D9B, 0x1DBF},   {0x2071, 0x2071},   {0x207F, 0x207F},
    {0x2090, 0x209C}, {0x2170, 0x217F}, {0x24D0, 0x24E9},   {0x2C7C, 0x2C7D},   {0xA69C, 0xA69D},   {0xA770, 0xA770},
    {0xA7F8, 0xA7F9}, {0xAB5C, 0xAB5F}, {0x10780, 0x10780}, {0x10783, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA}};
constexpr Range kOtherUpper[] = {
    {0x2160, 0x216F}, {0x24B6, 0x24CF}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};

template <size_t N>
bool contains(const Range (&ranges)[N], uint32_t c) {
  return std::any_of(std::begin(ranges), std::end(ranges), [c](const Range& r) { return r.first <= c && c <= r.last; });
}

bool is_cased(uint32_t c) { return is_lower(c) || is_upper(c) || is_title(c); }

// Case_Ignorable, as the rule for the final sigma wants it.
bool is_case_ignorable(uint32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return c == '\'' || c == '.' || c == ':' || c == 0xB7 || c == 0x387 || c == 0x55F || c == 0x5F4 || c == 0x2018 ||
             c == 0x2019 || c == 0x2024 || c == 0x2027 || c == 0xFE13 || c == 0xFE52 || c == 0xFE55 || c == 0xFF07 ||
             c == 0xFF0E || c == 0xFF1A;
  }
}

const SpecialCase* special_case(uint32_t c) {
  if (c < 0xDF || c > 0xFB17) return nullptr;
  const auto* row = std::lower_bound(std::begin(kSpecialCases), std::end(kSpecialCases), c,
                                     [](const SpecialCase& s, uint32_t value) { return s.letter < value; });
  return row != std::end(kSpecialCases) && row->letter == c ? row : nullptr;
}

void append_all(std::string& out, const char16_t* letters) {
  for (; *letters != 0; ++letters) append(out, *letters);
}

void append_upper(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c);
  } else if (const SpecialCase* special = special_case(c)) {
    append_all(out, special->upper);
  } else if (c >= 0x1F80 && c <= 0x1FAF) {  // Greek letters with iota subscript: the letter, then a capital iota
    constexpr uint32_t kCapitals[] = {0x1F08, 0x1F28, 0x1F68};
    append(out, kCapitals[(c - 0x1F80) / 16] + (c & 7));
    append(out, 0x399);
  } else {
    append(out, static_cast<uint32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))));
  }
}

void append_title(std::string& out, uint32_t c) {
  if (c < 0x80) {
    append_upper(out, c);
  } else if (const SpecialCase* special = special_case(c)) {
    append_all(out, special->title);
  } else {
    append(out, static_cast<uint32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
  }
}

// `at` is the byte of c in text. A capital sigma at the end of a word becomes the final form.
void append_lower(std::string& out, std::string_view text, size_t at, uint32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
    return;
  }
  if (c == 0x130) {
    out += "i\xCC\x87";
    return;
  }
  if (c != 0x3A3) {
    append(out, static_cast<uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
    return;
  }
  bool after_letter = false;
  for (size_t end = at; end > 0;) {
    size_t begin = end - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    size_t pos = begin;
    const uint32_t before = next(text, pos);
    if (!is_case_ignorable(before)) {
      after_letter = is_cased(before);
      break;
    }
    end = begin;
  }
  bool before_letter = false;
  size_t pos = at;
  next(text, pos);
  while (pos < text.size()) {
    const uint32_t after = next(text, pos);
    if (!is_case_ignorable(after)) {
      before_letter = is_cased(after);
      break;
    }
  }
  append(out, after_letter && !before_letter ? 0x3C2 : 0x3C3);
}

}  // namespace

bool is_valid(std::string_view bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || bytes.size() - i < length) return false;
    uint32_t c = lead & (0x7Fu >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto byte = static_cast<unsigned char>(bytes[i + k]);
      if ((byte & 0xC0) != 0x80) return false;
      c = c << 6 | (byte & 0x3Fu);
    }
    if (c > 0x10FFFF || (c >= 0xD800 && c < 0xE000) || c < (length == 2 ? 0x80u : length == 3 ? 0x800u : 0x10000u)) {
      return false;
    }
    i += length;
  }
  return true;
}

size_t count(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

uint32_t next(std::string_view text, size_t& pos) {
  const auto lead = static_cast<unsigned char>(text[pos++]);
  if (lead < 0x80) return lead;
  int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
  uint32_t c = lead & (0x3Fu >> more);
  for (; more > 0 && pos < text.size(); --more) c = c << 6 | (static_cast<unsigned char>(text[pos++]) & 0x3Fu);
  return c;
}

void append(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

size_t byte_of(std::string_view text, size_t index) {
  size_t pos = 0;
  for (; index > 0 && pos < text.size(); --index) {
    ++pos;
    while (pos < text.size() && (static_cast<unsigned char>(text[pos]) & 0xC0) == 0x80) ++pos;
  }
  return pos;
}

std::string escape_non_ascii(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const uint32_t c = next(text, pos);
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else {
      out += c < 0x100     ? fmt::format("\\x{:02x}", c)
             : c < 0x10000 ? fmt::format("\\u{:04x}", c)
                           : fmt::format("\\U{:08x}", c);
    }
  }
  return out;
}

bool is_space(uint32_t c) {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
         c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_line_break(uint32_t c) {
  return (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

bool is_alpha(uint32_t c) {
  const utf8proc_category_t k = category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}
bool is_decimal(uint32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }
bool is_digit(uint32_t c) { return is_decimal(c) || (c >= 0x80 && contains(kOtherDigits, c)); }
bool is_numeric(uint32_t c) {
  const utf8proc_category_t k = category(c);
  return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}
bool is_alnum(uint32_t c) { return is_alpha(c) || is_numeric(c); }
bool is_lower(uint32_t c) { return category(c) == UTF8PROC_CATEGORY_LL || (c >= 0x80 && contains(kOtherLower, c)); }
bool is_upper(uint32_t c) { return category(c) == UTF8PROC_CATEGORY_LU || (c >= 0x80 && contains(kOtherUpper, c)); }
bool is_title(uint32_t c) { return category(c) == UTF8PROC_CATEGORY_LT; }

bool is_printable(uint32_t c) {
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

bool is_word(uint32_t c) { return c == '_' || is_alnum(c); }

std::string upper(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) append_upper(out, next(text, pos));
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const uint32_t c = next(text, pos);
    append_lower(out, text, at, c);
  }
  return out;
}

std::string casefold(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const uint32_t c = next(text, pos);
    utf8proc_int32_t folded[8];
    int boundary = 0;
    const utf8proc_ssize_t n =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), folded, 8, UTF8PROC_CASEFOLD, &boundary);
    if (n <= 0 || n > 8) {
      append(out, c);
    } else {
      for (utf8proc_ssize_t i = 0; i < n; ++i) append(out, static_cast<uint32_t>(folded[i]));
    }
  }
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const uint32_t c = next(text, pos);
    if (at == 0) {
      append_title(out, c);
    } else {
      append_lower(out, text, at, c);
    }
  }
  return out;
}

std::string title(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool after_letter = false;
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const uint32_t c = next(text, pos);
    if (after_letter) {
      append_lower(out, text, at, c);
    } else {
      append_title(out, c);
    }
    after_letter = is_cased(c);
  }
  return out;
}

std::string swapcase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const uint32_t c = next(text, pos);
    if (is_upper(c)) {
      append_lower(out, text, at, c);
    } else if (is_lower(c)) {
      append_upper(out, c);
    } else {
      append(out, c);
    }
  }
  return out;
}

std::string_view strip_left(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    size_t after = pos;
    if (!is_space(next(text, after))) break;
    pos = after;
  }
  return text.substr(pos);
}

std::string_view strip_right(std::string_view text) {
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    size_t pos = begin;
    if (!is_space(next(text, pos))) break;
    text = text.substr(0, begin);
  }
  return text;
}

}  // namespace nfp::jinja::unicode
