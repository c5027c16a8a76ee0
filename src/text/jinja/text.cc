#include "text/jinja/text.h"

#include <charconv>
#include <cmath>

#include "text/jinja/interpreter.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

// The shortest digits that read back as the same number; an exponent from 1e16 on and below 1e-4.
std::string repr_real(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), d, std::chars_format::scientific).ptr;
  const std::string_view scientific(buffer, static_cast<size_t>(end - buffer));
  const size_t e = scientific.find('e');
  const std::string_view sign = scientific[0] == '-' ? "-" : "";
  std::string digits;
  for (const char c : scientific.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  int exponent = 0;
  std::from_chars(scientific.data() + e + (scientific[e + 1] == '+' ? 2 : 1), end, exponent);
  if (exponent >= 16 || exponent < -4) {
    const std::string fraction = digits.size() > 1 ? "." + digits.substr(1) : "";
    return fmt::format("{}{}{}e{}{:02}", sign, digits[0], fraction, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return fmt::format("{}0.{}{}", sign, std::string(static_cast<size_t>(-exponent) - 1, '0'), digits);
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return fmt::format("{}{}{}.0", sign, digits, std::string(whole - digits.size(), '0'));
  return fmt::format("{}{}.{}", sign, digits.substr(0, whole), digits.substr(whole));
}

// The letter behind the backslash of c's short escape in a Python or JSON string, 0 when it has none.
char short_escape(char32_t c) { return c == '\n' ? 'n' : c == '\r' ? 'r' : c == '\t' ? 't' : '\0'; }

// repr() as Python prints it.
class Writer {
 public:
  explicit Writer(Runtime& rt) : rt_(rt) {}

  void value(const Value& v) {
    const Runtime::Nest nest(rt_);
    rt_.step();
    switch (v.kind()) {
      case Kind::kMissing:
      case Kind::kUndefined:
        return put("Undefined");
      case Kind::kNone:
        return put("None");
      case Kind::kBool:
        return put(v.as_bool() ? "True" : "False");
      case Kind::kInt:
        return put(fmt::format("{}", v.as_int()));
      case Kind::kFloat:
        return put(repr_real(v.as_real()));
      case Kind::kString:
        return quoted(v.text());
      case Kind::kList:
        return items("[", v.items(), "]");
      case Kind::kTuple:
        return items("(", v.items(), v.items().size() == 1 ? ",)" : ")");
      case Kind::kView:
        put(type_name(v));
        return items("([", v.items(), "])");
      case Kind::kDict:
        return dict(v.as_dict());
      case Kind::kRange: {
        const auto& range = v.as<Range>();
        put(fmt::format("range({}, {}", range.start, range.stop));
        if (range.step != 1) put(fmt::format(", {}", range.step));
        return put(")");
      }
      case Kind::kNamespace:
        put("<Namespace ");
        dict(v.as<Namespace>().attributes);
        return put(">");
      case Kind::kLoop:
        return put(fmt::format("<LoopContext {}/{}>", v.as<Loop>().index0 + 1, v.as<Loop>().length(rt_)));
      default:
        return put(fmt::format("<{} object>", type_name(v)));
    }
  }

  std::string out;

 private:
  void put(std::string_view text) {
    rt_.charge(text.size());
    out += text;
  }

  // Single quotes unless only double ones avoid an escape.
  void quoted(std::string_view text) {
    rt_.charge(text.size() + 2);
    const bool has_single = text.find('\'') != std::string_view::npos;
    const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
    out += quote;
    for (size_t pos = 0; pos < text.size();) {
      const char32_t c = text::next_code_point(text, pos);
      if (c == static_cast<unsigned char>(quote) || c == '\\') {
        out += '\\';
        out += static_cast<char>(c);
      } else if (const char letter = short_escape(c)) {
        out += '\\';
        out += letter;
      } else if (text::is_printable(c)) {
        text::append_utf8(out, c);
      } else {
        const auto number = static_cast<uint32_t>(c);
        out += c < 0x100     ? fmt::format("\\x{:02x}", number)
               : c < 0x10000 ? fmt::format("\\u{:04x}", number)
                             : fmt::format("\\U{:08x}", number);
      }
    }
    out += quote;
  }

  void items(std::string_view open, const std::vector<Value>& list, std::string_view close) {
    put(open);
    for (size_t i = 0; i < list.size(); ++i) {
      if (i > 0) put(", ");
      value(list[i]);
    }
    put(close);
  }

  void dict(const Dict& d) {
    put("{");
    for (size_t i = 0; i < d.entries.size(); ++i) {
      if (i > 0) put(", ");
      value(d.entries[i].key);
      put(": ");
      value(d.entries[i].value);
    }
    put("}");
  }

  Runtime& rt_;
};

class JsonWriter {
 public:
  JsonWriter(Runtime& rt, const JsonStyle& style) : rt_(rt), style_(style) {}

  void value(const Value& v) {
    const Runtime::Nest nest(rt_);
    rt_.step();
    switch (v.kind()) {
      case Kind::kString:
        return string(v.text());
      case Kind::kList:
      case Kind::kTuple:
        return list(v.items());
      case Kind::kDict:
        return dict(v.as_dict());
      default:
        return put(scalar(v, "Object of type {} is not JSON serializable"));
    }
  }

  std::string out;

 private:
  void put(std::string_view text) {
    rt_.charge(text.size());
    out += text;
  }

  std::string scalar(const Value& v, fmt::format_string<const char*> otherwise) {
    switch (v.kind()) {
      case Kind::kNone:
        return "null";
      case Kind::kBool:
        return v.as_bool() ? "true" : "false";
      case Kind::kInt:
        return fmt::format("{}", v.as_int());
      case Kind::kFloat:
        if (std::isnan(v.as_real())) return "NaN";
        if (std::isinf(v.as_real())) return v.as_real() < 0 ? "-Infinity" : "Infinity";
        return repr_real(v.as_real());
      default:
        rt_.fail(otherwise, type_name(v));
    }
  }

  void string(std::string_view text) {
    rt_.charge(text.size() + 2);
    out += '"';
    for (size_t pos = 0; pos < text.size();) {
      const char32_t c = text::next_code_point(text, pos);
      const char letter = c == '\f' ? 'f' : c == '\b' ? 'b' : c == '"' || c == '\\' ? static_cast<char>(c) : '\0';
      if (letter != '\0' || short_escape(c) != '\0') {
        out += '\\';
        out += letter != '\0' ? letter : short_escape(c);
      } else if (style_.ascii && c >= 0x10000) {
        unit(0xD800 + ((c - 0x10000) >> 10));
        unit(0xDC00 + ((c - 0x10000) & 0x3FF));
      } else if (c < 0x20 || (style_.ascii && c >= 0x7F)) {
        unit(c);
      } else {
        text::append_utf8(out, c);
      }
    }
    out += '"';
  }
  void unit(char32_t utf16) { out += fmt::format("\\u{:04x}", static_cast<uint32_t>(utf16)); }

  void new_line() {
    if (!style_.pretty) return;
    put("\n");
    for (int i = 0; i < level_; ++i) put(style_.indent);
  }

  // What stands between brackets: `item(i)` for each of `count` items.
  template <typename Item>
  void sequence(std::string_view brackets, size_t count, const Item& item) {
    if (count == 0) return put(brackets);
    put(brackets.substr(0, 1));
    ++level_;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) put(style_.item_separator);
      new_line();
      item(i);
    }
    --level_;
    new_line();
    put(brackets.substr(1));
  }

  void list(const std::vector<Value>& items) {
    sequence("[]", items.size(), [&](size_t i) { value(items[i]); });
  }

  void dict(const Dict& d) {
    std::vector<Value> keys;
    rt_.charge(d.entries.size() * sizeof(Value));
    for (const Dict::Entry& entry : d.entries) keys.push_back(entry.key);
    if (style_.sort_keys) keys = sorted(rt_, keys, keys, /*reverse=*/false);
    sequence("{}", keys.size(), [&](size_t i) {
      const Value& key = keys[i];
      string(key.is(Kind::kString) ? std::string(key.text())
                                   : scalar(key, "keys must be str, int, float, bool or None, not {}"));
      put(style_.key_separator);
      value(style_.sort_keys ? *rt_.find(d, key) : d.entries[i].value);
    });
  }

  Runtime& rt_;
  const JsonStyle& style_;
  int level_ = 0;
};

}  // namespace

std::string repr(Runtime& rt, const Value& v) {
  Writer writer(rt);
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

std::string to_json(Runtime& rt, const Value& v, const JsonStyle& style) {
  JsonWriter writer(rt, style);
  writer.value(v);
  return std::move(writer.out);
}

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

std::optional<double> parse_real(std::string_view text) {
  text = text::strip_space(text);
  const bool signed_plus = text.starts_with('+');
  if (signed_plus) text.remove_prefix(1);
  if (text.empty() || (signed_plus && text.starts_with('-'))) return std::nullopt;
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size() || text.find('(') != text.npos) return std::nullopt;
  // Too large is infinity in Python and too small zero; from_chars leaves the value alone then.
  return code == std::errc::result_out_of_range ? std::strtod(std::string(text).c_str(), nullptr) : value;
}

}  // namespace nfp::jinja
