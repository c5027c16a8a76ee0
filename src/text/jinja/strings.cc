#include "text/jinja/strings.h"

#include <algorithm>

#include "text/jinja/search.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

constexpr auto kNotFound = std::string_view::npos;

void keep(Runtime& rt, std::vector<std::string_view>& parts, std::string_view part) {
  rt.step();
  rt.charge(sizeof(part));
  parts.push_back(part);
}

// The byte where the code point that ends at byte `end` begins.
size_t before(std::string_view text, size_t end) {
  --end;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return end;
}

bool in_set(std::string_view set, uint32_t c) {
  for (size_t pos = 0; pos < set.size();) {
    if (unicode::next(set, pos) == c) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string_view> split(Runtime& rt, std::string_view text, std::string_view separator, Int limit,
                                    bool from_right) {
  std::vector<std::string_view> parts;
  if (from_right) {
    size_t end = text.size();
    for (Int n = 0; limit < 0 || n < limit; ++n) {
      const size_t at = find_text_backward(rt, text, separator, end);
      if (at == kNotFound) break;
      keep(rt, parts, text.substr(at + separator.size(), end - at - separator.size()));
      end = at;
    }
    keep(rt, parts, text.substr(0, end));
    std::reverse(parts.begin(), parts.end());
    return parts;
  }
  size_t begin = 0;
  for (Int n = 0; limit < 0 || n < limit; ++n) {
    const size_t at = find_text(rt, text, separator, begin);
    if (at == kNotFound) break;
    keep(rt, parts, text.substr(begin, at - begin));
    begin = at + separator.size();
  }
  keep(rt, parts, text.substr(begin));
  return parts;
}

std::vector<std::string_view> split_space(Runtime& rt, std::string_view text, Int limit, bool from_right) {
  std::vector<std::string_view> parts;
  rt.work(text.size());
  if (from_right) {
    text = unicode::strip_right(text);
    for (Int n = 0; !text.empty(); ++n) {
      if (limit >= 0 && n >= limit) {
        keep(rt, parts, text);
        break;
      }
      size_t begin = text.size();
      for (size_t end = begin; end > 0; end = begin) {
        size_t pos = before(text, end);
        const size_t start = pos;
        if (unicode::is_space(unicode::next(text, pos))) break;
        begin = start;
      }
      keep(rt, parts, text.substr(begin));
      text = unicode::strip_right(text.substr(0, begin));
    }
    std::reverse(parts.begin(), parts.end());
    return parts;
  }
  text = unicode::strip_left(text);
  for (Int n = 0; !text.empty(); ++n) {
    if (limit >= 0 && n >= limit) {
      keep(rt, parts, text);
      break;
    }
    size_t end = 0;
    for (size_t pos = 0; pos < text.size(); end = pos) {
      if (unicode::is_space(unicode::next(text, pos))) break;
    }
    keep(rt, parts, text.substr(0, end));
    text = unicode::strip_left(text.substr(end));
  }
  return parts;
}

std::vector<std::string_view> split_lines(Runtime& rt, std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  rt.work(text.size());
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t end = pos;
    const uint32_t c = unicode::next(text, pos);
    if (!unicode::is_line_break(c)) continue;
    if (c == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    keep(rt, lines, text.substr(begin, (keep_ends ? pos : end) - begin));
    begin = pos;
  }
  if (begin < text.size()) keep(rt, lines, text.substr(begin));
  return lines;
}

std::string_view strip(Runtime& rt, std::string_view text, const std::string_view* set, bool left, bool right) {
  if (set == nullptr) {
    if (left) text = unicode::strip_left(text);
    return right ? unicode::strip_right(text) : text;
  }
  while (left && !text.empty()) {
    size_t pos = 0;
    rt.work(set->size());
    if (!in_set(*set, unicode::next(text, pos))) break;
    text.remove_prefix(pos);
  }
  while (right && !text.empty()) {
    const size_t begin = before(text, text.size());
    size_t pos = begin;
    rt.work(set->size());
    if (!in_set(*set, unicode::next(text, pos))) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int limit) {
  std::string out;
  const auto put = [&](std::string_view part) {
    rt.charge(part.size());
    out += part;
  };
  if (from.empty()) {  // before each code point, and at the end
    Int n = 0;
    for (size_t pos = 0; pos < text.size();) {
      const size_t begin = pos;
      unicode::next(text, pos);
      if (limit < 0 || n++ < limit) put(to);
      put(text.substr(begin, pos - begin));
    }
    if (limit < 0 || n < limit) put(to);
    return out;
  }
  size_t begin = 0;
  for (Int n = 0; limit < 0 || n < limit; ++n) {
    const size_t at = find_text(rt, text, from, begin);
    if (at == kNotFound) break;
    put(text.substr(begin, at - begin));
    put(to);
    begin = at + from.size();
  }
  put(text.substr(begin));
  return out;
}

std::string pad(Runtime& rt, std::string_view text, Int left, Int right, std::string_view fill) {
  const auto room = static_cast<Int>(rt.memory_left());
  if (left > room || right > room) rt.charge(UINT64_MAX / 2);  // fails with the message of the memory limit
  rt.charge(static_cast<uint64_t>(left + right) * fill.size() + text.size());
  std::string out;
  out.reserve(static_cast<size_t>(left + right) * fill.size() + text.size());
  for (Int i = 0; i < left; ++i) out += fill;
  out += text;
  for (Int i = 0; i < right; ++i) out += fill;
  return out;
}

bool is_lower_text(std::string_view text) {
  bool any = false;
  for (size_t pos = 0; pos < text.size();) {
    const uint32_t c = unicode::next(text, pos);
    if (unicode::is_upper(c) || unicode::is_title(c)) return false;
    any = any || unicode::is_lower(c);
  }
  return any;
}

bool is_upper_text(std::string_view text) {
  bool any = false;
  for (size_t pos = 0; pos < text.size();) {
    const uint32_t c = unicode::next(text, pos);
    if (unicode::is_lower(c) || unicode::is_title(c)) return false;
    any = any || unicode::is_upper(c);
  }
  return any;
}

}  // namespace nfp::jinja
