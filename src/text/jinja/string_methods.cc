// The methods of Python's str.
#include <algorithm>

#include "text/jinja/callables.h"
#include "text/jinja/format_text.h"
#include "text/jinja/operators.h"
#include "text/jinja/search.h"
#include "text/jinja/strings.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

constexpr auto kNotFound = std::string_view::npos;

std::string_view text_argument(Runtime& rt, Method method, const Value& v) {
  if (v.is(Kind::kString)) return v.text();
  if (v.undefined()) fail_undefined(rt, v);
  rt.fail("{}() argument must be str, not {}", method_name(method), type_name(v));
}

const Value& argument(const Args& args, size_t i) {
  static const Value kMissing{};
  return i < args.positional.size() ? args.positional[i] : kMissing;
}

// The bytes that arguments `first` (start) and first+1 (stop) select; false when start lies behind the end.
bool window(Runtime& rt, const Str& self, const Args& args, size_t first, size_t* begin, size_t* end) {
  const auto size = static_cast<Int>(self.length);
  const auto bound = [&](const Value& v, Int if_absent) {
    if (v.none_or_missing()) return if_absent;
    const Int i = int_argument(rt, v, "slice indices");
    return std::max<Int>(i < 0 ? i + size : i, 0);
  };
  const Int start = bound(argument(args, first), 0);
  const Int stop = std::min(bound(argument(args, first + 1), size), size);
  if (start > size) return false;
  const auto to_byte = [&](Int i) {
    if (self.ascii() || i == 0) return static_cast<size_t>(i);
    rt.work(self.text.size());
    return i == size ? self.text.size() : unicode::byte_of(self.text, static_cast<size_t>(i));
  };
  *begin = to_byte(start);
  *end = to_byte(stop);
  return start <= stop;
}

Value find(Runtime& rt, const Str& self, Method method, const Args& args) {
  expect_positional(rt, method_name(method), args, 1, 3);
  const std::string_view needle = text_argument(rt, method, args.positional[0]);
  const bool backward = method == Method::kRfind || method == Method::kRindex;
  size_t begin = 0, end = 0, at = kNotFound;
  if (window(rt, self, args, 1, &begin, &end)) {
    const std::string_view part = std::string_view(self.text).substr(begin, end - begin);
    at = backward ? find_text_backward(rt, part, needle, part.size()) : find_text(rt, part, needle, 0);
  }
  if (at == kNotFound) {
    if (method == Method::kIndex || method == Method::kRindex) rt.fail("substring not found");
    return Value::integer(-1);
  }
  return Value::integer(static_cast<Int>(unicode::count(std::string_view(self.text).substr(0, begin + at))));
}

Value count(Runtime& rt, const Str& self, const Args& args) {
  expect_positional(rt, "count", args, 1, 3);
  const std::string_view needle = text_argument(rt, Method::kCount, args.positional[0]);
  size_t begin = 0, end = 0;
  if (!window(rt, self, args, 1, &begin, &end)) return Value::integer(0);
  const std::string_view part = std::string_view(self.text).substr(begin, end - begin);
  if (needle.empty()) return Value::integer(static_cast<Int>(unicode::count(part)) + 1);
  Int n = 0;
  for (size_t at = find_text(rt, part, needle, 0); at != kNotFound;
       at = find_text(rt, part, needle, at + needle.size())) {
    ++n;
  }
  return Value::integer(n);
}

Value starts_or_ends(Runtime& rt, const Str& self, Method method, const Args& args) {
  expect_positional(rt, method_name(method), args, 1, 3);
  std::vector<Value> choices = {args.positional[0]};
  if (choices[0].is(Kind::kTuple)) choices = items_of(rt, choices[0]);
  size_t begin = 0, end = 0;
  const bool inside = window(rt, self, args, 1, &begin, &end);
  const std::string_view part = inside ? std::string_view(self.text).substr(begin, end - begin) : std::string_view();
  bool found = false;
  for (const Value& choice : choices) {
    const std::string_view affix = text_argument(rt, method, choice);
    rt.work(affix.size());
    found = found || (inside && (method == Method::kStartswith ? part.starts_with(affix) : part.ends_with(affix)));
  }
  return Value::boolean(found);
}

Value justify(Runtime& rt, const Str& self, Method method, const Args& args) {
  expect_positional(rt, method_name(method), args, 1, 2);
  const Int width = int_argument(rt, args.positional[0], "width");
  std::string_view fill = " ";
  if (args.positional.size() > 1) {
    fill = text_argument(rt, method, args.positional[1]);
    if (unicode::count(fill) != 1) rt.fail("The fill character must be exactly one character long");
  }
  const Int missing = width - static_cast<Int>(self.length);
  if (missing <= 0) return rt.string(self.text, self.safe);
  // Python's center puts the odd one to the left when the width is odd.
  const Int left = method == Method::kLjust   ? 0
                   : method == Method::kRjust ? missing
                                              : missing / 2 + (missing & width & 1);
  return rt.string(pad(rt, self.text, left, missing - left, fill), self.safe);
}

Value zero_fill(Runtime& rt, const Str& self, const Args& args) {
  expect_positional(rt, "zfill", args, 1, 1);
  const Int missing = int_argument(rt, args.positional[0], "width") - static_cast<Int>(self.length);
  if (missing <= 0) return rt.string(self.text, self.safe);
  const bool sign = !self.text.empty() && (self.text[0] == '-' || self.text[0] == '+');
  const std::string_view digits = std::string_view(self.text).substr(sign ? 1 : 0);
  return rt.string(self.text.substr(0, sign ? 1 : 0) + pad(rt, digits, missing, 0, "0"), self.safe);
}

Value partition(Runtime& rt, const Str& self, Method method, const Args& args) {
  expect_positional(rt, method_name(method), args, 1, 1);
  const std::string_view separator = text_argument(rt, method, args.positional[0]);
  if (separator.empty()) rt.fail("empty separator");
  const bool backward = method == Method::kRpartition;
  const size_t at = backward ? find_text_backward(rt, self.text, separator, self.text.size())
                             : find_text(rt, self.text, separator, 0);
  auto* parts = rt.make<List>();
  if (at == kNotFound) {
    parts->items = {rt.string(""), rt.string(""), rt.string("")};
    parts->items[backward ? 2 : 0] = rt.string(self.text, self.safe);
  } else {
    parts->items = {rt.string(self.text.substr(0, at), self.safe), rt.string(std::string(separator), self.safe),
                    rt.string(self.text.substr(at + separator.size()), self.safe)};
  }
  return Value::tuple(parts);
}

Value expand_tabs(Runtime& rt, const Str& self, const Args& args) {
  const auto bound = bind(rt, "expandtabs", args, {"tabsize"});
  const Int size = bound[0].missing() ? 8 : int_argument(rt, bound[0], "tabsize");
  std::string out;
  Int column = 0;
  for (const char c : self.text) {
    if (c == '\t') {
      if (size > 0) {
        const Int spaces = size - column % size;
        out += pad(rt, "", spaces, 0, " ");
        column += spaces;
      }
      continue;
    }
    out += c;
    if (c == '\n' || c == '\r') {
      column = 0;
    } else if ((static_cast<unsigned char>(c) & 0xC0) != 0x80) {
      ++column;
    }
  }
  return rt.string(std::move(out), self.safe);
}

Value split_method(Runtime& rt, const Str& self, Method method, const Args& args) {
  const auto bound = bind(rt, method_name(method), args, {"sep", "maxsplit"});
  const Int limit = bound[1].missing() ? -1 : int_argument(rt, bound[1], "maxsplit");
  const bool from_right = method == Method::kRsplit;
  std::vector<std::string_view> parts;
  if (bound[0].none_or_missing()) {
    parts = split_space(rt, self.text, limit, from_right);
  } else {
    const std::string_view separator = text_argument(rt, method, bound[0]);
    if (separator.empty()) rt.fail("empty separator");
    parts = split(rt, self.text, separator, limit, from_right);
  }
  auto* list = rt.make<List>();
  for (const std::string_view part : parts) rt.push(*list, rt.string(std::string(part), self.safe));
  return Value::list(list);
}

Value join(Runtime& rt, const Str& self, const Args& args) {
  expect_positional(rt, "join", args, 1, 1);
  std::string out;
  size_t index = 0;
  Iterator* items = iterate(rt, args.positional[0]);
  for (Value item; items->next(rt, &item); ++index) {
    if (!item.is(Kind::kString)) {
      rt.fail("sequence item {}: expected str instance, {} found", index, type_name(item));
    }
    rt.charge(item.text().size() + self.text.size());
    if (index > 0) out += self.text;
    out += item.text();
  }
  return rt.string(std::move(out), self.safe);
}

template <typename Predicate>
Value all_of(const Str& self, const Predicate& predicate, bool if_empty = false) {
  if (self.text.empty()) return Value::boolean(if_empty);
  for (size_t pos = 0; pos < self.text.size();) {
    if (!predicate(unicode::next(self.text, pos))) return Value::boolean(false);
  }
  return Value::boolean(true);
}

Value is_title_cased(const Str& self) {
  bool any = false, after_letter = false;
  for (size_t pos = 0; pos < self.text.size();) {
    const uint32_t c = unicode::next(self.text, pos);
    const bool upper = unicode::is_upper(c) || unicode::is_title(c);
    const bool lower = unicode::is_lower(c);
    if ((upper && after_letter) || (lower && !after_letter)) return Value::boolean(false);
    any = any || upper || lower;
    after_letter = upper || lower;
  }
  return Value::boolean(any);
}

Value is_identifier(const Str& self) {
  size_t pos = 0;
  if (self.text.empty() || unicode::is_numeric(unicode::next(self.text, pos))) return Value::boolean(false);
  return all_of(self, unicode::is_word);
}

Value predicate(Runtime& rt, const Str& self, Method method, const Args& args) {
  expect_positional(rt, method_name(method), args, 0, 0);
  rt.work(self.text.size());
  switch (method) {
    case Method::kIsalnum:
      return all_of(self, unicode::is_alnum);
    case Method::kIsalpha:
      return all_of(self, unicode::is_alpha);
    case Method::kIsascii:
      return Value::boolean(self.ascii());
    case Method::kIsdecimal:
      return all_of(self, unicode::is_decimal);
    case Method::kIsdigit:
      return all_of(self, unicode::is_digit);
    case Method::kIsidentifier:
      return is_identifier(self);
    case Method::kIslower:
      return Value::boolean(is_lower_text(self.text));
    case Method::kIsnumeric:
      return all_of(self, unicode::is_numeric);
    case Method::kIsprintable:
      return all_of(self, unicode::is_printable, true);
    case Method::kIsspace:
      return all_of(self, unicode::is_space);
    case Method::kIstitle:
      return is_title_cased(self);
    default:
      return Value::boolean(is_upper_text(self.text));
  }
}

Value change_case(Runtime& rt, const Str& self, Method method, const Args& args) {
  expect_positional(rt, method_name(method), args, 0, 0);
  const auto change = [&] {
    switch (method) {
      case Method::kCapitalize:
        return unicode::capitalize(self.text);
      case Method::kCasefold:
        return unicode::casefold(self.text);
      case Method::kLower:
        return unicode::lower(self.text);
      case Method::kSwapcase:
        return unicode::swapcase(self.text);
      case Method::kTitle:
        return unicode::title(self.text);
      default:
        return unicode::upper(self.text);
    }
  };
  rt.work(self.text.size());
  return rt.string(change(), self.safe);
}

}  // namespace

Value call_string_method(Runtime& rt, const Str& self, Method method, const Args& args) {
  switch (method) {
    case Method::kCapitalize:
    case Method::kCasefold:
    case Method::kLower:
    case Method::kSwapcase:
    case Method::kTitle:
    case Method::kUpper:
      return change_case(rt, self, method, args);
    case Method::kCenter:
    case Method::kLjust:
    case Method::kRjust:
      return justify(rt, self, method, args);
    case Method::kCount:
      return count(rt, self, args);
    case Method::kStartswith:
    case Method::kEndswith:
      return starts_or_ends(rt, self, method, args);
    case Method::kExpandtabs:
      return expand_tabs(rt, self, args);
    case Method::kFind:
    case Method::kIndex:
    case Method::kRfind:
    case Method::kRindex:
      return find(rt, self, method, args);
    case Method::kFormat:
      return rt.string(brace_format(rt, self.text, args), self.safe);
    case Method::kFormatMap: {
      expect_positional(rt, "format_map", args, 1, 1);
      return rt.string(brace_format_map(rt, self.text, args.positional[0]), self.safe);
    }
    case Method::kJoin:
      return join(rt, self, args);
    case Method::kLstrip:
    case Method::kRstrip:
    case Method::kStrip: {
      expect_positional(rt, method_name(method), args, 0, 1);
      const Value& chars = argument(args, 0);
      const bool any_space = chars.none_or_missing();
      const std::string_view set = any_space ? std::string_view() : text_argument(rt, method, chars);
      return rt.string(std::string(strip(rt, self.text, any_space ? nullptr : &set, method != Method::kRstrip,
                                         method != Method::kLstrip)),
                       self.safe);
    }
    case Method::kPartition:
    case Method::kRpartition:
      return partition(rt, self, method, args);
    case Method::kRemoveprefix:
    case Method::kRemovesuffix: {
      expect_positional(rt, method_name(method), args, 1, 1);
      const std::string_view affix = text_argument(rt, method, args.positional[0]);
      std::string_view rest = self.text;
      if (method == Method::kRemoveprefix && rest.starts_with(affix)) {
        rest.remove_prefix(affix.size());
      } else if (method == Method::kRemovesuffix && rest.ends_with(affix)) {
        rest.remove_suffix(affix.size());
      }
      return rt.string(std::string(rest), self.safe);
    }
    case Method::kReplace: {
      expect_positional(rt, "replace", args, 2, 3);
      const Int limit = args.positional.size() > 2 ? int_argument(rt, args.positional[2], "count") : -1;
      return rt.string(replace(rt, self.text, text_argument(rt, method, args.positional[0]),
                               text_argument(rt, method, args.positional[1]), limit),
                       self.safe);
    }
    case Method::kSplit:
    case Method::kRsplit:
      return split_method(rt, self, method, args);
    case Method::kSplitlines: {
      const auto bound = bind(rt, "splitlines", args, {"keepends"});
      auto* list = rt.make<List>();
      for (const std::string_view line : split_lines(rt, self.text, truthy(rt, bound[0]))) {
        rt.push(*list, rt.string(std::string(line), self.safe));
      }
      return Value::list(list);
    }
    case Method::kZfill:
      return zero_fill(rt, self, args);
    default:
      return predicate(rt, self, method, args);
  }
}

}  // namespace nfp::jinja
