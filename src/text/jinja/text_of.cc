// str() and repr() as Python prints them.
#include <charconv>
#include <cmath>

#include "text/jinja/callables.h"
#include "text/jinja/loop.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

void put(Runtime& rt, std::string& out, std::string_view text) {
  rt.charge(text.size());
  out += text;
}

// repr of a str: single quotes unless only double ones avoid an escape.
void put_quoted(Runtime& rt, std::string& out, std::string_view text) {
  rt.charge(text.size() + 2);
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (size_t pos = 0; pos < text.size();) {
    const uint32_t c = unicode::next(text, pos);
    if (c == static_cast<unsigned char>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (unicode::is_printable(c)) {
      unicode::append(out, c);
    } else if (c < 0x100) {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", c);
    } else if (c < 0x10000) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", c);
    } else {
      fmt::format_to(std::back_inserter(out), "\\U{:08x}", c);
    }
  }
  out += quote;
}

void put_repr(Runtime& rt, std::string& out, const Value& v);

void put_items(Runtime& rt, std::string& out, const std::vector<Value>& items) {
  bool first = true;
  for (const Value& item : items) {
    if (!first) put(rt, out, ", ");
    first = false;
    put_repr(rt, out, item);
  }
}

void put_dict(Runtime& rt, std::string& out, const Dict& dict) {
  put(rt, out, "{");
  bool first = true;
  for (const Dict::Entry& entry : dict.entries) {
    if (!first) put(rt, out, ", ");
    first = false;
    put_repr(rt, out, entry.key);
    put(rt, out, ": ");
    put_repr(rt, out, entry.value);
  }
  put(rt, out, "}");
}

void put_repr(Runtime& rt, std::string& out, const Value& v) {
  const Runtime::Nest nest(rt);
  rt.step();
  switch (v.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
      return put(rt, out, "Undefined");
    case Kind::kNone:
      return put(rt, out, "None");
    case Kind::kBool:
      return put(rt, out, v.as_bool() ? "True" : "False");
    case Kind::kInt:
      return put(rt, out, repr_int(v.as_int()));
    case Kind::kFloat:
      return put(rt, out, repr_real(v.as_real()));
    case Kind::kString:
      if (v.as_str().safe) put(rt, out, "Markup(");
      put_quoted(rt, out, v.text());
      if (v.as_str().safe) put(rt, out, ")");
      return;
    case Kind::kList:
      put(rt, out, "[");
      put_items(rt, out, v.as_list().items);
      return put(rt, out, "]");
    case Kind::kTuple:
      put(rt, out, "(");
      put_items(rt, out, v.as_list().items);
      return put(rt, out, v.as_list().items.size() == 1 ? ",)" : ")");
    case Kind::kDict:
      return put_dict(rt, out, v.as_dict());
    case Kind::kView:
      put(rt, out, type_name(v));
      put(rt, out, "([");
      put_items(rt, out, items_of(rt, v));
      return put(rt, out, "])");
    case Kind::kRange: {
      const Range& range = v.as<Range>();
      put(rt, out, fmt::format("range({}, {}", repr_int(range.start), repr_int(range.stop)));
      if (range.step != 1) put(rt, out, fmt::format(", {}", repr_int(range.step)));
      return put(rt, out, ")");
    }
    case Kind::kNamespace:
      put(rt, out, "<Namespace ");
      put_dict(rt, out, v.as<Namespace>().attributes);
      return put(rt, out, ">");
    case Kind::kLoop: {
      Loop& loop = v.as<Loop>();
      return put(rt, out, fmt::format("<LoopContext {}/{}>", repr_int(loop.index0 + 1), repr_int(loop.length(rt))));
    }
    case Kind::kMacro: {
      const Macro& macro = v.as<Macro>();
      return put(rt, out, macro.name.empty() ? "<Macro anonymous>" : fmt::format("<Macro '{}'>", macro.name));
    }
    case Kind::kMethod:
      return put(rt, out,
                 fmt::format("<built-in method {} of {} object>", method_name(v.as_method()), type_name(v.self())));
    default:
      return put(rt, out, fmt::format("<{} object>", type_name(v)));
  }
}

}  // namespace

void fail_undefined(Runtime& rt, const Value& undefined) { rt.fail(undefined.as<Undefined>().message); }

std::string repr_int(Int i) { return fmt::format("{}", i); }

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
  const char* first = scientific.data() + e + (scientific[e + 1] == '+' ? 2 : 1);
  std::from_chars(first, end, exponent);
  if (exponent >= 16 || exponent < -4) {
    const std::string fraction = digits.size() > 1 ? "." + digits.substr(1) : "";
    return fmt::format("{}{}{}e{}{:02}", sign, digits[0], fraction, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return fmt::format("{}0.{}{}", sign, std::string(static_cast<size_t>(-exponent) - 1, '0'), digits);
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return fmt::format("{}{}{}.0", sign, digits, std::string(whole - digits.size(), '0'));
  return fmt::format("{}{}.{}", sign, digits.substr(0, whole), digits.substr(whole));
}

std::string repr(Runtime& rt, const Value& v) {
  std::string out;
  put_repr(rt, out, v);
  return out;
}

void append_text(Runtime& rt, std::string& out, const Value& v) {
  if (v.is(Kind::kString)) {
    put(rt, out, v.text());
  } else if (!v.undefined()) {
    put_repr(rt, out, v);
  }
}

std::string to_text(Runtime& rt, const Value& v) {
  std::string out;
  append_text(rt, out, v);
  return out;
}

}  // namespace nfp::jinja
