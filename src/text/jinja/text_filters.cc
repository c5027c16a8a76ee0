// The filters on text.
#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/format_text.h"
#include "text/jinja/html.h"
#include "text/jinja/operators.h"
#include "text/jinja/strings.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

// What jinja2 calls soft_str: text as it is (safe or not), everything else as str() prints it.
Value as_string(Runtime& rt, const Value& v) { return v.is(Kind::kString) ? v : rt.string(to_text(rt, v)); }

// A filter that is a str method without arguments.
template <std::string (*change)(std::string_view)>
Value change_text(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "filter", args, 0, 0);
  const Value s = as_string(rt, v);
  rt.work(s.text().size());
  return rt.string(change(s.text()), s.as_str().safe);
}

bool begins_word(uint32_t c) {
  return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || unicode::is_space(c);
}

// Each word begins with a capital; words end at white space, '-' and opening brackets.
std::string title(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    size_t end = pos;
    uint32_t c = unicode::next(text, end);
    const size_t second = end;
    const bool separator = begins_word(c);
    while (end < text.size()) {
      size_t after = end;
      c = unicode::next(text, after);
      if (begins_word(c) != separator) break;
      end = after;
    }
    out += unicode::upper(text.substr(pos, second - pos));
    out += unicode::lower(text.substr(second, end - second));
    pos = end;
  }
  return out;
}

Value center(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "center", args, {"width"});
  Args width;
  width.positional = {bound[0].missing() ? Value::integer(80) : bound[0]};
  return call_string_method(rt, as_string(rt, v).as_str(), Method::kCenter, width);
}

Value escape(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "escape", args, 0, 0);
  if (v.is(Kind::kString) && v.as_str().safe) return v;
  return rt.string(escape_html(rt, to_text(rt, v)), true);
}

Value force_escape(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "forceescape", args, 0, 0);
  return rt.string(escape_html(rt, to_text(rt, v)), true);
}

Value safe(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "safe", args, 0, 0);
  return rt.string(to_text(rt, v), true);
}

Value format(Runtime& rt, const Value& v, const Args& args) {
  if (!args.positional.empty() && !args.named.empty()) {
    rt.fail("can't handle positional and keyword arguments at the same time");
  }
  const Value s = as_string(rt, v);
  if (!args.named.empty()) {
    auto* dict = rt.make<Dict>();
    for (const auto& [name, value] : args.named) rt.set(*dict, rt.string(std::string(name)), value);
    return percent_format(rt, s, Value::dict(dict));
  }
  auto* tuple = rt.make<List>();
  tuple->items = args.positional;
  return percent_format(rt, s, Value::tuple(tuple));
}

Value indent(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "indent", args, {"width", "first", "blank"});
  if (!v.is(Kind::kString)) {
    if (v.undefined()) fail_undefined(rt, v);
    rt.fail("indent needs a string, not '{}'", type_name(v));
  }
  std::string margin;
  if (bound[0].is(Kind::kString)) {
    margin = bound[0].text();
  } else {
    const Int width = bound[0].missing() ? 4 : int_argument(rt, bound[0], "width");
    margin = pad(rt, "", std::max<Int>(width, 0), 0, " ");
  }
  const bool blank = truthy(rt, bound[2]);
  std::string out;
  const auto put = [&](std::string_view part) {
    rt.charge(part.size());
    out += part;
  };
  if (truthy(rt, bound[1])) put(margin);
  bool first = true;
  const std::string text = std::string(v.text()) + "\n";
  for (const std::string_view line : split_lines(rt, text, false)) {
    if (!first) {
      put("\n");
      if (blank || !line.empty()) put(margin);
    }
    first = false;
    put(line);
  }
  return rt.string(std::move(out), v.as_str().safe);
}

Value replace_text(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "replace", args, {"old", "new", "count"}, 2);
  const Int count = bound[2].none_or_missing() ? -1 : int_argument(rt, bound[2], "count");
  return rt.string(replace(rt, to_text(rt, v), to_text(rt, bound[0]), to_text(rt, bound[1]), count));
}

Value trim(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "trim", args, {"chars"});
  const Value s = as_string(rt, v);
  if (bound[0].none_or_missing())
    return rt.string(std::string(strip(rt, s.text(), nullptr, true, true)), s.as_str().safe);
  if (!bound[0].is(Kind::kString)) rt.fail("strip arg must be None or str");
  const std::string_view chars = bound[0].text();
  return rt.string(std::string(strip(rt, s.text(), &chars, true, true)), s.as_str().safe);
}

Value truncate(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "truncate", args, {"length", "killwords", "end", "leeway"});
  const Int size = bound[0].missing() ? 255 : int_argument(rt, bound[0], "length");
  const Value end = bound[2].missing() ? rt.string("...") : bound[2];
  const Int leeway = bound[3].none_or_missing() ? 5 : int_argument(rt, bound[3], "leeway");
  if (size < length(rt, end)) rt.fail("expected length >= {}, got {}", repr_int(length(rt, end)), repr_int(size));
  if (leeway < 0) rt.fail("expected leeway >= 0, got {}", repr_int(leeway));
  if (length(rt, v) <= size + leeway) return v;
  if (!v.is(Kind::kString)) rt.fail("truncate needs a string, not '{}'", type_name(v));
  Value kept = slice(rt, v, Value(), Value::integer(size - length(rt, end)), Value());
  if (!truthy(rt, bound[1])) {
    const auto parts = split(rt, kept.text(), " ", 1, true);
    kept = rt.string(std::string(parts[0]), v.as_str().safe);
  }
  return add(rt, kept, end);
}

Value word_count(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "wordcount", args, 0, 0);
  const std::string text = to_text(rt, v);
  Int n = 0;
  bool inside = false;
  for (size_t pos = 0; pos < text.size();) {
    const bool word = unicode::is_word(unicode::next(text, pos));
    if (word && !inside) ++n;
    inside = word;
  }
  return Value::integer(n);
}

std::string quoted_url(Runtime& rt, std::string_view text, bool for_query) {
  rt.charge(text.size() * 3);
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
        c == '-' || c == '~' || (c == '/' && !for_query)) {
      out += c;
    } else if (c == ' ' && for_query) {
      out += '+';
    } else {
      out += fmt::format("%{:02X}", byte);
    }
  }
  return out;
}

Value url_encode(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "urlencode", args, 0, 0);
  if (v.is(Kind::kString) || !is_iterable(v)) return rt.string(quoted_url(rt, to_text(rt, v), false));
  Value pairs = v;
  if (v.is(Kind::kDict)) pairs = call_method(rt, v, Method::kItems, Args());
  std::string out;
  Iterator* iterator = iterate(rt, pairs);
  for (Value pair; iterator->next(rt, &pair);) {
    const std::vector<Value> both = items_of(rt, pair);
    if (both.size() != 2) rt.fail("urlencode needs pairs of a name and a value");
    if (!out.empty()) out += '&';
    out += quoted_url(rt, to_text(rt, both[0]), true) + "=" + quoted_url(rt, to_text(rt, both[1]), true);
  }
  return rt.string(std::move(out));
}

struct Entry {
  std::string_view name;
  FilterFunction function;
};
constexpr Entry kFilters[] = {
    {"capitalize", change_text<unicode::capitalize>},
    {"center", center},
    {"e", escape},
    {"escape", escape},
    {"forceescape", force_escape},
    {"format", format},
    {"indent", indent},
    {"lower", change_text<unicode::lower>},
    {"replace", replace_text},
    {"safe", safe},
    {"title", change_text<title>},
    {"trim", trim},
    {"truncate", truncate},
    {"upper", change_text<unicode::upper>},
    {"urlencode", url_encode},
    {"wordcount", word_count},
};

}  // namespace

FilterFunction find_text_filter(std::string_view name) {
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.function;
  }
  return nullptr;
}

}  // namespace nfp::jinja
