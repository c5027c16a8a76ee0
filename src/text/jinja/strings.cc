// Searching, splitting, stripping and replacing; see text.h.
#include <algorithm>
#include <cstring>

#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

void keep(Runtime& rt, std::vector<std::string_view>& parts, std::string_view part) {
  rt.step();
  rt.charge(sizeof(part));
  parts.push_back(part);
}

bool in_set(std::string_view set, char32_t c) {
  for (size_t pos = 0; pos < set.size();) {
    if (text::next_code_point(set, pos) == c) return true;
  }
  return false;
}

// Bytes of the first, or last, word of a text that begins, or ends, with one.
size_t word_size(std::string_view text, bool last) {
  size_t size = 0;
  while (size < text.size()) {
    const size_t at = last ? text::last_character(text.substr(0, text.size() - size)) : size;
    size_t next = at;
    if (text::is_python_space(text::next_code_point(text, next))) break;
    size = last ? text.size() - at : next;
  }
  return size;
}

}  // namespace

size_t find_text(Runtime& rt, std::string_view text, std::string_view needle, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  if (needle.empty()) return from;
  // memmem is linear (two-way string matching); std::string_view::find is not.
  const void* hit = memmem(text.data() + from, text.size() - from, needle.data(), needle.size());
  const size_t at =
      hit == nullptr ? std::string_view::npos : static_cast<size_t>(static_cast<const char*>(hit) - text.data());
  rt.step();
  rt.work(needle.size() + (hit == nullptr ? text.size() : at) - from);
  return at;
}

size_t find_text_backward(Runtime& rt, std::string_view text, std::string_view needle, size_t end) {
  if (needle.size() > end) return std::string_view::npos;
  if (needle.empty()) return end;
  for (size_t at = end - needle.size() + 1; at-- > 0;) {
    if (text[at] == needle[0]) {
      // What memcmp may read is paid for, so that a hostile pair of strings ends at the limit.
      rt.work(needle.size());
      if (std::memcmp(text.data() + at, needle.data(), needle.size()) == 0) {
        rt.work(end - at);
        return at;
      }
    }
  }
  rt.work(end);
  return std::string_view::npos;
}

std::vector<std::string_view> split(Runtime& rt, std::string_view text, std::string_view separator, Int limit,
                                    bool from_right) {
  std::vector<std::string_view> parts;
  for (Int n = 0; limit < 0 || n < limit; ++n) {
    const size_t at =
        from_right ? find_text_backward(rt, text, separator, text.size()) : find_text(rt, text, separator, 0);
    if (at == std::string_view::npos) break;
    keep(rt, parts, from_right ? text.substr(at + separator.size()) : text.substr(0, at));
    text = from_right ? text.substr(0, at) : text.substr(at + separator.size());
  }
  keep(rt, parts, text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_space(Runtime& rt, std::string_view text, Int limit, bool from_right) {
  std::vector<std::string_view> parts;
  rt.work(text.size());
  text = text::strip_space(text, !from_right, from_right);
  for (Int n = 0; !text.empty(); ++n) {
    const size_t size = limit >= 0 && n >= limit ? text.size() : word_size(text, from_right);
    const size_t at = from_right ? text.size() - size : 0;
    keep(rt, parts, text.substr(at, size));
    text = from_right ? text.substr(0, at) : text.substr(size);
    text = text::strip_space(text, !from_right, from_right);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_lines(Runtime& rt, std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  rt.work(text.size());
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t end = pos;
    const char32_t c = text::next_code_point(text, pos);
    if (!text::is_line_break(c)) continue;
    if (c == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    keep(rt, lines, text.substr(begin, (keep_ends ? pos : end) - begin));
    begin = pos;
  }
  if (begin < text.size()) keep(rt, lines, text.substr(begin));
  return lines;
}

std::string_view strip(Runtime& rt, std::string_view text, const Value& set, bool left, bool right) {
  rt.work(text.size());
  if (set.none_or_missing()) return text::strip_space(text, left, right);
  if (!set.is(Kind::kString)) rt.fail("strip arg must be None or str");
  while (left && !text.empty()) {
    size_t pos = 0;
    rt.work(set.text().size());
    if (!in_set(set.text(), text::next_code_point(text, pos))) break;
    text.remove_prefix(pos);
  }
  while (right && !text.empty()) {
    const size_t begin = text::last_character(text);
    size_t pos = begin;
    rt.work(set.text().size());
    if (!in_set(set.text(), text::next_code_point(text, pos))) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::string with_case(Runtime& rt, std::string_view text, text::Case to) {
  rt.work(text.size());
  std::optional<std::string> out = text::change_case(text, to);
  if (!out) rt.fail("a capital of several letters (SpecialCasing of Unicode) is not supported in chat templates");
  return *std::move(out);
}

std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int limit) {
  std::string out;
  const auto put = [&](std::string_view part) {
    rt.charge(part.size());
    out += part;
  };
  size_t begin = 0;
  Int n = 0;
  if (from.empty()) {  // before each code point, and at the end
    for (; begin < text.size() && (limit < 0 || n < limit); ++n) {
      const size_t size = text::utf8_length(text[begin]);
      put(to);
      put(text.substr(begin, size));
      begin += size;
    }
    put(text.substr(begin));
    if (limit < 0 || n < limit) put(to);
    return out;
  }
  for (; limit < 0 || n < limit; ++n) {
    const size_t at = find_text(rt, text, from, begin);
    if (at == std::string_view::npos) break;
    put(text.substr(begin, at - begin));
    put(to);
    begin = at + from.size();
  }
  put(text.substr(begin));
  return out;
}

}  // namespace nfp::jinja
