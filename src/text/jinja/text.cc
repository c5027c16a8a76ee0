#include "text/jinja/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

// Values as Python's repr() prints them, or as JSON.
class Writer {
 public:
  Writer(Runtime& rt, const JsonStyle& style, bool json) : rt_(rt), style_(style), json_(json) {}

  void value(const Value& v) {
    const auto nest = rt_.nest();
    rt_.step();
    switch (v.kind()) {
      case Kind::kNone:
        return put(json_ ? "null" : "None");
      case Kind::kBool:
        return put(v.as_int() != 0 ? json_ ? "true" : "True" : json_ ? "false" : "False");
      case Kind::kInt:
        return put(fmt::format("{}", v.as_int()));
      case Kind::kFloat:
        return real(v.as_real());
      case Kind::kString:
        if (json_ || !v.is_safe()) return quoted(v.text());
        put("Markup(");
        quoted(v.text());
        return put(")");
      case Kind::kList:
        return list("[", v.items(), "]");
      case Kind::kTuple:
        return json_ ? list("[", v.items(), "]") : list("(", v.items(), v.items().size() == 1 ? ",)" : ")");
      case Kind::kDict:
        return dict(v.as_dict());
      default:
        return other(v);
    }
  }

  std::string out;

 private:
  void put(std::string_view text) {
    rt_.charge(text.size());
    out += text;
  }

  void real(double d) {
    if (std::isnan(d)) return put(json_ ? "NaN" : "nan");
    if (std::isinf(d)) return put(d < 0 ? json_ ? "-Infinity" : "-inf" : json_ ? "Infinity" : "inf");
    std::string text = fmt::format("{}", d);  // the shortest digits that read back; exponents begin where Python's do
    put(text.find_first_of(".e") == std::string::npos ? text + ".0" : text);
  }

  void other(const Value& v) {
    if (json_) rt_.fail("Object of type {} is not JSON serializable", type_name(v));
    if (v.is(Kind::kView) || v.is(Kind::kLoop)) {
      rt_.fail("printing a value of type '{}' is not supported in chat templates", type_name(v));
    }
    if (v.is(Kind::kNamespace)) {
      put("<Namespace ");
      dict(v.as<Namespace>().attributes);
      return put(">");
    }
    put(v.undefined() ? "Undefined" : fmt::format("<{} object>", type_name(v)));
  }

  // Python quotes with single quotes unless only double ones avoid an escape.
  void quoted(std::string_view text) {
    rt_.charge(text.size() + 2);
    const bool has_single = text.find('\'') != std::string_view::npos;
    const char quote = json_ || (has_single && text.find('"') == std::string_view::npos) ? '"' : '\'';
    constexpr std::string_view kPlain = "\n\r\t\b\f", kLetters = "nrtbf";
    out += quote;
    for (size_t pos = 0; pos < text.size();) {
      const char32_t c = text::next_code_point(text, pos);
      const size_t short_escape = c < 0x20 ? kPlain.substr(0, json_ ? 5 : 3).find(static_cast<char>(c)) : kPlain.npos;
      if (short_escape != kPlain.npos) {
        out += '\\';
        out += kLetters[short_escape];
      } else if (c == static_cast<unsigned char>(quote) || c == '\\') {
        out += '\\';
        out += static_cast<char>(c);
      } else if (json_ ? c >= 0x20 && (!style_.ascii || c < 0x7F) : text::is_printable(c)) {
        text::append_utf8(out, c);
      } else {
        escape(static_cast<uint32_t>(c));
      }
    }
    out += quote;
  }

  void escape(uint32_t c) {
    if (json_ && c >= 0x10000) {  // two UTF-16 units
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + ((c - 0x10000) & 0x3FF));
    } else if (json_ || (c >= 0x100 && c < 0x10000)) {
      out += fmt::format("\\u{:04x}", c);
    } else {
      out += c < 0x100 ? fmt::format("\\x{:02x}", c) : fmt::format("\\U{:08x}", c);
    }
  }

  void new_line() {
    if (!style_.pretty) return;
    put("\n");
    rt_.work(static_cast<uint64_t>(level_));  // an indent of nothing is no bytes
    for (int i = 0; i < level_; ++i) put(style_.indent);
  }

  // What stands between brackets: `item(i)` for each of `count` items.
  template <typename Item>
  void sequence(std::string_view open, size_t count, std::string_view close, const Item& item) {
    put(open);
    ++level_;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) put(style_.item_separator);
      new_line();
      item(i);
    }
    --level_;
    if (count > 0) new_line();
    put(close);
  }

  void list(std::string_view open, const std::vector<Value>& items, std::string_view close) {
    sequence(open, items.size(), close, [&](size_t i) { value(items[i]); });
  }

  void dict(const Dict& d) {
    std::vector<Value> keys;
    rt_.charge(d.entries.size() * sizeof(Value));
    for (const Dict::Entry& entry : d.entries) keys.push_back(entry.key);
    if (style_.sort_keys) keys = sorted(rt_, keys, keys, /*reverse=*/false);
    sequence("{", keys.size(), "}", [&](size_t i) {
      const bool bare = json_ && !keys[i].is(Kind::kString);  // a number: JSON's keys are strings
      if (bare) put("\"");
      value(keys[i]);
      if (bare) put("\"");
      put(style_.key_separator);
      value(style_.sort_keys ? *rt_.find(d, keys[i]) : d.entries[i].value);
    });
  }

  Runtime& rt_;
  const JsonStyle& style_;
  const bool json_;
  int level_ = 0;
};

void keep(Runtime& rt, std::vector<std::string_view>& parts, std::string_view part) {
  rt.step();
  rt.charge(sizeof(std::string_view));
  parts.push_back(part);
}

// Bytes of the word that the text begins with.
size_t word_size(std::string_view text) {
  size_t size = 0;
  for (size_t next = 0; next < text.size(); size = next) {
    if (text::is_python_space(text::next_code_point(text, next))) break;
  }
  return size;
}

}  // namespace

std::string repr(Runtime& rt, const Value& v) {
  const JsonStyle style;
  Writer writer(rt, style, /*json=*/false);
  writer.value(v);
  return std::move(writer.out);
}

std::string to_json(Runtime& rt, const Value& v, const JsonStyle& style) {
  Writer writer(rt, style, /*json=*/true);
  writer.value(v);
  return std::move(writer.out);
}

void append_text(Runtime& rt, std::string& out, const Value& v) {
  if (v.is(Kind::kString)) {
    rt.charge(v.text().size());
    out += v.text();
  } else if (!v.undefined()) {
    out += repr(rt, v);
  }
}

std::string to_text(Runtime& rt, const Value& v) {
  std::string out;
  append_text(rt, out, v);
  return out;
}

std::string escaped(Runtime& rt, const Value& v) {
  if (v.is_safe()) return to_text(rt, v);
  std::string out;
  for (const char c : to_text(rt, v)) {
    constexpr std::string_view kSpecial = "&<>'\"";
    constexpr std::string_view kNames[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    if (const size_t at = kSpecial.find(c); at != kSpecial.npos) {
      rt.charge(kNames[at].size());
      out += kNames[at];
    } else {
      out += c;
    }
  }
  return out;
}

std::string_view short_name(std::string_view name) { return name.substr(0, text::byte_of(name, 50)); }

std::optional<Int> parse_int(std::string_view text) {
  text = text::strip_space(text);
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || text.find_first_not_of("0123456789") != text.npos) return std::nullopt;
  Int value = 0;
  for (const char c : text) {
    value = value * 10 + (c - '0');
    if (value >= kIntBound) return std::nullopt;
  }
  return negative ? -value : value;
}

std::optional<double> parse_float(Runtime& rt, std::string_view text) {
  rt.work(text.size());
  text = text::strip_space(text);
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (text.find('_') != text.npos && text.find_first_of("0123456789") != text.npos) {
    rt.fail("a number with an underscore is not supported in chat templates");
  }
  if (text.empty() || text[0] == '-' || text.find('(') != text.npos) return std::nullopt;
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size()) return std::nullopt;
  if (code == std::errc::result_out_of_range) rt.fail("a number beyond floats is not supported in chat templates");
  return negative ? -value : value;
}

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

size_t find_last(Runtime& rt, std::string_view text, std::string_view needle) {
  // Backwards, as the search from the left is linear.
  rt.charge(text.size() + needle.size());
  const std::string reversed(text.rbegin(), text.rend()), reversed_needle(needle.rbegin(), needle.rend());
  const size_t at = find_text(rt, reversed, reversed_needle, 0);
  return at == std::string_view::npos ? at : text.size() - at - needle.size();
}

std::vector<std::string_view> split(Runtime& rt, std::string_view text, std::optional<std::string_view> separator,
                                    Int limit) {
  std::vector<std::string_view> parts;
  if (!separator) {
    rt.work(text.size());
    text = text::strip_space(text, true, false);
    for (Int n = 0; !text.empty(); ++n) {
      const size_t size = limit >= 0 && n >= limit ? text.size() : word_size(text);
      keep(rt, parts, text.substr(0, size));
      text = text::strip_space(text.substr(size), true, false);
    }
    return parts;
  }
  for (Int n = 0; limit < 0 || n < limit; ++n) {
    const size_t at = find_text(rt, text, *separator, 0);
    if (at == std::string_view::npos) break;
    keep(rt, parts, text.substr(0, at));
    text = text.substr(at + separator->size());
  }
  keep(rt, parts, text);
  return parts;
}

std::vector<std::string_view> split_from_right(Runtime& rt, std::string_view text,
                                               std::optional<std::string_view> separator, Int limit) {
  std::vector<std::string_view> parts;
  if (separator) {
    rt.charge(text.size() + separator->size());
    const std::string reversed(text.rbegin(), text.rend()), sought(separator->rbegin(), separator->rend());
    for (const std::string_view part : split(rt, reversed, sought, limit)) {
      const auto behind = static_cast<size_t>(part.data() - reversed.data());
      parts.push_back(text.substr(text.size() - behind - part.size(), part.size()));
    }
  } else {
    rt.work(text.size());
    text = text::strip_space(text, false, true);
    for (Int n = 0; !text.empty(); ++n) {
      size_t begin = limit >= 0 && n >= limit ? 0 : text.size();
      while (begin > 0) {
        const size_t before = text::last_character(text.substr(0, begin));
        size_t at = before;
        if (text::is_python_space(text::next_code_point(text, at))) break;
        begin = before;
      }
      keep(rt, parts, text.substr(begin));
      text = text::strip_space(text.substr(0, begin), false, true);
    }
  }
  std::reverse(parts.begin(), parts.end());
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
  // UTF-8: a character is in the set where its bytes are, since no character's bytes begin inside of another's.
  const auto in_set = [&](std::string_view character) {
    rt.step();
    rt.work(set.text().size());
    return set.text().find(character) != std::string_view::npos;
  };
  while (left && !text.empty()) {
    const size_t size = text::utf8_length(text[0]);
    if (!in_set(text.substr(0, size))) break;
    text.remove_prefix(size);
  }
  while (right && !text.empty()) {
    const size_t begin = text::last_character(text);
    if (!in_set(text.substr(begin))) break;
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

bool has_case(Runtime& rt, std::string_view text, text::Case of) {
  const bool lower = of == text::Case::kLower;
  return with_case(rt, text, of) == text &&
         with_case(rt, text, lower ? text::Case::kUpper : text::Case::kLower) != text;
}

std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int limit) {
  std::string out;
  const auto put = [&](std::string_view part) {
    rt.charge(part.size());
    out += part;
  };
  size_t begin = 0;
  if (from.empty()) {  // is before each character, and at the end
    for (Int n = 0; limit < 0 || n < limit; ++n) {
      put(to);
      if (begin == text.size()) return out;
      const size_t size = text::utf8_length(text[begin]);
      put(text.substr(begin, size));
      begin += size;
    }
    put(text.substr(begin));
    return out;
  }
  for (Int n = 0; limit < 0 || n < limit; ++n) {
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
