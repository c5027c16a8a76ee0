#include "text/jinja/format_text.h"

#include <algorithm>

#include "text/jinja/operators.h"
#include "text/jinja/strings.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

constexpr int kMaxWidthDigits = 9;
// str.format's replacement fields nest in a format's own specification, once.
constexpr int kMaxFieldNesting = 2;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// One "%..." of a % format.
struct Conversion {
  bool left = false, plus = false, space = false, alternate = false, zero = false;
  Int width = 0;
  Int precision = -1;  // none
  char type = 0;
};

class PercentFormatter {
 public:
  PercentFormatter(Runtime& rt, std::string_view format, const Value& values)
      : rt_(rt), format_(format), values_(values) {}

  std::string run() {
    std::string out;
    while (pos_ < format_.size()) {
      const size_t percent = std::min(format_.find('%', pos_), format_.size());
      put(out, format_.substr(pos_, percent - pos_));
      pos_ = percent;
      if (pos_ < format_.size()) {
        ++pos_;
        put(out, conversion());
      }
    }
    const bool may_be_left = values_.is(Kind::kDict) || values_.is(Kind::kList) || values_.undefined() ||
                             values_.is(Kind::kRange) || (values_.is(Kind::kTuple) && used_ == tuple_size());
    if (!may_be_left && used_ == 0) rt_.fail("not all arguments converted during string formatting");
    if (values_.is(Kind::kTuple) && used_ < tuple_size()) {
      rt_.fail("not all arguments converted during string formatting");
    }
    return out;
  }

 private:
  void put(std::string& out, std::string_view text) {
    rt_.charge(text.size());
    out += text;
  }

  size_t tuple_size() const { return values_.as_list().items.size(); }

  char peek() const {
    if (pos_ >= format_.size()) rt_.fail("incomplete format");
    return format_[pos_];
  }

  Value next_value() {
    if (keyed_) {
      keyed_ = false;
      return key_value_;
    }
    if (values_.is(Kind::kTuple)) {
      if (used_ >= tuple_size()) rt_.fail("not enough arguments for format string");
      return values_.as_list().items[used_++];
    }
    if (used_++ > 0) rt_.fail("not enough arguments for format string");
    return values_;
  }

  Int number_or_star() {
    if (peek() == '*') {
      ++pos_;
      const Value v = next_value();
      if (!v.is_integral()) rt_.fail("* wants int");
      return v.as_int();
    }
    Int n = 0;
    for (int digits = 0; pos_ < format_.size() && is_digit(format_[pos_]); ++pos_) {
      if (++digits > kMaxWidthDigits) rt_.fail("width too big");
      n = n * 10 + (format_[pos_] - '0');
    }
    return n;
  }

  std::string conversion() {
    Conversion c;
    if (peek() == '(') {
      size_t depth = 1;
      const size_t begin = ++pos_;
      for (; depth > 0; ++pos_) {
        if (pos_ >= format_.size()) rt_.fail("incomplete format key");
        if (format_[pos_] == '(') ++depth;
        if (format_[pos_] == ')') --depth;
      }
      if (!values_.is(Kind::kDict)) rt_.fail("format requires a mapping");
      const std::string key(format_.substr(begin, pos_ - 1 - begin));
      const Value* found = values_.as_dict().find(key);
      if (found == nullptr) rt_.fail("KeyError: '{}'", key.substr(0, 100));
      key_value_ = *found;
      keyed_ = true;
      used_ = 1;
    }
    for (bool flag = true; flag;) {
      switch (peek()) {
        case '-':
          c.left = true;
          break;
        case '+':
          c.plus = true;
          break;
        case ' ':
          c.space = true;
          break;
        case '#':
          c.alternate = true;
          break;
        case '0':
          c.zero = true;
          break;
        default:
          flag = false;
      }
      if (flag) ++pos_;
    }
    c.width = number_or_star();
    if (c.width < 0) {
      c.left = true;
      c.width = -c.width;
    }
    if (peek() == '.') {
      ++pos_;
      c.precision = std::max<Int>(number_or_star(), 0);
    }
    while (peek() == 'h' || peek() == 'l' || peek() == 'L') ++pos_;
    c.type = peek();
    ++pos_;
    if (c.type == '%') return "%";
    return fit(c, next_value());
  }

  // Sign or base prefix first, then padding, then the rest.
  std::string fit(const Conversion& c, const Value& v) {
    std::string prefix, body;
    bool numeric = true;
    switch (c.type) {
      case 's':
      case 'r':
      case 'a':
      case 'c':
        body = text(c, v);
        numeric = false;
        break;
      case 'd':
      case 'i':
      case 'u':
      case 'o':
      case 'x':
      case 'X':
        body = integer(c, v, &prefix);
        break;
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G':
        if (!v.is_number()) rt_.fail("must be real number, not {}", type_name(v));
        body = format_real(rt_, real_of(rt_, v), c.type, c.precision < 0 ? 6 : c.precision, c.alternate);
        if (body[0] == '-') {
          prefix = "-";
          body.erase(0, 1);
        }
        break;
      default:
        rt_.fail("unsupported format character '{}'", std::string_view(&c.type, 1));
    }
    if (numeric && (prefix.empty() || prefix[0] != '-')) {
      prefix.insert(0, c.plus ? "+" : c.space ? " " : "");
    }
    const Int missing = c.width - static_cast<Int>(unicode::count(prefix) + unicode::count(body));
    if (missing <= 0) return prefix + body;
    if (c.left) return pad(rt_, prefix + body, 0, missing, " ");
    if (c.zero && numeric) return prefix + pad(rt_, body, missing, 0, "0");
    return pad(rt_, prefix + body, missing, 0, " ");
  }

  std::string text(const Conversion& c, const Value& v) {
    if (c.type == 'c') {
      std::string out;
      if (v.is_integral()) {
        if (v.as_int() < 0 || v.as_int() > 0x10FFFF) rt_.fail("%c arg not in range(0x110000)");
        const auto code = static_cast<uint32_t>(v.as_int());
        if (code >= 0xD800 && code < 0xE000) rt_.fail("%c of a surrogate is not supported");
        unicode::append(out, code);
      } else if (v.is(Kind::kString) && v.as_str().length == 1) {
        out = v.text();
      } else {
        rt_.fail("%c requires int or char");
      }
      return out;
    }
    std::string out = c.type == 's' ? to_text(rt_, v) : c.type == 'r' ? repr(rt_, v) : ascii_repr(rt_, v);
    if (c.precision >= 0 && c.precision < static_cast<Int>(out.size())) {
      out.resize(unicode::byte_of(out, static_cast<size_t>(c.precision)));
    }
    return out;
  }

  std::string integer(const Conversion& c, const Value& v, std::string* prefix) {
    const bool decimal = c.type == 'd' || c.type == 'i' || c.type == 'u';
    if (!v.is_integral() && !(decimal && v.is(Kind::kFloat))) {
      if (v.undefined()) fail_undefined(rt_, v);
      rt_.fail("%{} format: a{} is required, not {}", std::string_view(&c.type, 1),
               decimal ? " real number" : "n integer", type_name(v));
    }
    const Int i = v.is(Kind::kFloat) ? int_of(rt_, v.as_real()).as_int() : v.as_int();
    if (i < 0) *prefix = "-";
    if (c.alternate && !decimal) *prefix += c.type == 'o' ? "0o" : c.type == 'x' ? "0x" : "0X";
    std::string digits = format_digits(i, c.type == 'o' ? 8 : decimal ? 10 : 16, c.type == 'X');
    if (c.precision > static_cast<Int>(digits.size())) {
      digits = pad(rt_, digits, c.precision - static_cast<Int>(digits.size()), 0, "0");
    }
    return digits;
  }

  Runtime& rt_;
  const std::string_view format_;
  const Value& values_;
  size_t pos_ = 0;
  size_t used_ = 0;  // of a tuple's items; else 1 once the value was taken
  bool keyed_ = false;
  Value key_value_;
};

class BraceFormatter {
 public:
  BraceFormatter(Runtime& rt, const Args& args, const Dict* mapping) : rt_(rt), args_(args), mapping_(mapping) {}

  std::string run(std::string_view format, int nesting) {
    if (nesting > kMaxFieldNesting) rt_.fail("Max string recursion exceeded");
    std::string out;
    for (size_t pos = 0; pos < format.size();) {
      const char c = format[pos];
      if (c != '{' && c != '}') {
        const size_t end = std::min(format.find_first_of("{}", pos), format.size());
        put(out, format.substr(pos, end - pos));
        pos = end;
      } else if (pos + 1 < format.size() && format[pos + 1] == c) {
        put(out, format.substr(pos, 1));
        pos += 2;
      } else if (c == '}') {
        rt_.fail("Single '}}' encountered in format string");
      } else {
        const size_t end = field_end(format, pos + 1);
        put(out, field(format.substr(pos + 1, end - pos - 1), nesting));
        pos = end + 1;
      }
    }
    return out;
  }

 private:
  void put(std::string& out, std::string_view text) {
    rt_.step();
    rt_.charge(text.size());
    out += text;
  }

  size_t field_end(std::string_view format, size_t pos) {
    int depth = 1;
    for (; pos < format.size(); ++pos) {
      if (format[pos] == '{') ++depth;
      if (format[pos] == '}' && --depth == 0) return pos;
    }
    rt_.fail("expected '}}' before end of string");
  }

  std::string field(std::string_view text, int nesting) {
    const size_t name_end = std::min(text.find_first_of("!:"), text.size());
    // A ':' or '!' inside of [..] belongs to the key.
    size_t split = name_end;
    if (const size_t bracket = text.find('['); bracket < name_end) {
      const size_t close = text.find(']', bracket);
      if (close == std::string_view::npos) rt_.fail("Missing ']' in format string");
      split = std::min(text.find_first_of("!:", close), text.size());
    }
    Value v = lookup(text.substr(0, split));
    std::string_view rest = text.substr(split);
    if (rest.starts_with('!')) {
      const char conversion = rest.size() > 1 ? rest[1] : 0;
      if (rest.size() > 2 && rest[2] != ':') rt_.fail("expected ':' after conversion specifier");
      if (conversion == 'r') {
        v = rt_.string(repr(rt_, v));
      } else if (conversion == 's') {
        v = rt_.string(to_text(rt_, v));
      } else if (conversion == 'a') {
        v = rt_.string(ascii_repr(rt_, v));
      } else {
        rt_.fail("Unknown conversion specifier");
      }
      rest.remove_prefix(2);
    }
    if (rest.empty()) return format_value(rt_, v, "");
    return format_value(rt_, v, run(rest.substr(1), nesting + 1));
  }

  Value lookup(std::string_view name) {
    size_t pos = std::min(name.find_first_of(".["), name.size());
    const std::string_view first = name.substr(0, pos);
    const bool number = !first.empty() && std::all_of(first.begin(), first.end(), is_digit);
    Value v;
    if (name.empty() || (number && first.size() == name.size())) {
      const int numbering = name.empty() ? 1 : 2;
      if (numbering_ != 0 && numbering_ != numbering) {
        rt_.fail("cannot switch between manual field specification and automatic field numbering");
      }
      numbering_ = numbering;
    }
    if (name.empty() || number) {
      if (first.size() > kMaxWidthDigits) rt_.fail("Too many decimal digits in format string");
      const size_t index = name.empty() ? next_++ : std::stoul(std::string(first));
      if (mapping_ != nullptr || index >= args_.positional.size()) {
        rt_.fail("Replacement index {} out of range for positional args tuple", index);
      }
      v = args_.positional[index];
    } else {
      v = named(first);
    }
    while (pos < name.size()) {
      rt_.step();
      if (name[pos] == '.') {
        const size_t end = std::min(name.find_first_of(".[", pos + 1), name.size());
        if (end == pos + 1) rt_.fail("Empty attribute in format string");
        v = get_attribute(rt_, v, name.substr(pos + 1, end - pos - 1));
        pos = end;
      } else if (name[pos] == '[') {
        const size_t end = name.find(']', pos);
        if (end == std::string_view::npos) rt_.fail("Missing ']' in format string");
        const std::string_view key = name.substr(pos + 1, end - pos - 1);
        if (key.empty()) rt_.fail("Empty attribute in format string");
        const bool index = std::all_of(key.begin(), key.end(), is_digit) && key.size() <= kMaxWidthDigits;
        v = get_item(rt_, v, index ? Value::integer(std::stol(std::string(key))) : rt_.string(std::string(key)));
        pos = end + 1;
      } else {
        rt_.fail("Only '.' or '[' may follow ']' in format field specifier");
      }
    }
    return v;
  }

  Value named(std::string_view name) {
    if (mapping_ != nullptr) {
      if (const Value* found = mapping_->find(name)) return *found;
    }
    for (const auto& [key, value] : args_.named) {
      if (key == name) return value;
    }
    rt_.fail("KeyError: '{}'", name.substr(0, 100));
  }

  Runtime& rt_;
  const Args& args_;
  const Dict* mapping_;
  size_t next_ = 0;
  int numbering_ = 0;  // 1: automatic, 2: manual
};

}  // namespace

Value percent_format(Runtime& rt, const Value& format, const Value& values) {
  return rt.string(PercentFormatter(rt, format.text(), values).run(), format.as_str().safe);
}

std::string brace_format(Runtime& rt, std::string_view format, const Args& args) {
  return BraceFormatter(rt, args, nullptr).run(format, 1);
}

std::string brace_format_map(Runtime& rt, std::string_view format, const Value& mapping) {
  if (!mapping.is(Kind::kDict)) rt.fail("format_map() needs a mapping, not '{}'", type_name(mapping));
  return BraceFormatter(rt, Args(), &mapping.as_dict()).run(format, 1);
}

}  // namespace nfp::jinja
