// Python's methods that jinja2's immutable sandbox allows, the global functions, and how arguments meet parameters.
#include <algorithm>
#include <array>
#include <ctime>
#include <span>

#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/operators.h"
#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

// jinja2's sandbox refuses larger ranges (jinja2.sandbox.MAX_RANGE).
constexpr Int kMaxRange = 100'000;
constexpr size_t kMaxDateFormat = 1024;  // bytes

std::string_view text_argument(Runtime& rt, const Value& v) {
  if (v.is(Kind::kString)) return v.text();
  if (v.undefined()) rt.fail_undefined(v);
  rt.fail("argument must be str, not {}", type_name(v));
}

const Value& argument(const Args& args, size_t i) {
  static const Value kMissing{};
  return i < args.positional.size() ? args.positional[i] : kMissing;
}

// --- str

// The part that the arguments 1 (start) and 2 (stop) select, with its first byte; nullopt when start is behind the end.
struct Window {
  std::string_view text;
  size_t begin = 0;
};
std::optional<Window> window(Runtime& rt, const Str& self, const Args& args) {
  const auto size = static_cast<Int>(self.length);
  const auto bound = [&](const Value& v, Int if_absent) {
    if (v.none_or_missing()) return if_absent;
    const Int i = int_argument(rt, v, "slice indices");
    return std::max<Int>(i < 0 ? i + size : i, 0);
  };
  const Int start = bound(argument(args, 1), 0);
  const Int stop = std::min(bound(argument(args, 2), size), size);
  if (start > stop) return std::nullopt;
  if (args.positional.size() > 1) rt.work(self.text.size());
  const size_t begin = start == 0 ? 0 : text::byte_of(self.text, static_cast<size_t>(start));
  const size_t end = stop == size ? self.text.size() : text::byte_of(self.text, static_cast<size_t>(stop));
  return Window{std::string_view(self.text).substr(begin, end - begin), begin};
}

template <bool backward>
Value find(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "find", args, 1, 3);
  const std::string_view needle = text_argument(rt, args.positional[0]);
  size_t at = std::string_view::npos;
  const auto part = window(rt, self.as_str(), args);
  if (part) {
    at =
        backward ? find_text_backward(rt, part->text, needle, part->text.size()) : find_text(rt, part->text, needle, 0);
  }
  if (at == std::string_view::npos) return Value::integer(-1);
  rt.work(part->begin + at);
  return Value::integer(static_cast<Int>(text::count_code_points(self.text().substr(0, part->begin + at))));
}

Value count_text(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "count", args, 1, 3);
  const std::string_view needle = text_argument(rt, args.positional[0]);
  const auto part = window(rt, self.as_str(), args);
  if (!part) return Value::integer(0);
  if (needle.empty()) return Value::integer(static_cast<Int>(text::count_code_points(part->text)) + 1);
  Int n = 0;
  for (size_t at = 0; (at = find_text(rt, part->text, needle, at)) != std::string_view::npos; at += needle.size()) ++n;
  return Value::integer(n);
}

template <bool at_end>
Value has_affix(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, at_end ? "endswith" : "startswith", args, 1, 3);
  std::vector<Value> choices = {args.positional[0]};
  if (choices[0].is(Kind::kTuple)) choices = choices[0].items();
  const auto part = window(rt, self.as_str(), args);
  bool found = false;
  for (const Value& choice : choices) {
    const std::string_view affix = text_argument(rt, choice);
    rt.step();
    rt.work(affix.size());
    found = found || (part && (at_end ? part->text.ends_with(affix) : part->text.starts_with(affix)));
  }
  return Value::boolean(found);
}

template <bool left, bool right>
Value strip_method(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "strip", args, 0, 1);
  return rt.string(strip(rt, self.text(), argument(args, 0), left, right));
}

template <bool at_end>
Value without_affix(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, at_end ? "removesuffix" : "removeprefix", args, 1, 1);
  const std::string_view affix = text_argument(rt, args.positional[0]);
  std::string_view rest = self.text();
  if (!at_end && rest.starts_with(affix)) rest.remove_prefix(affix.size());
  if (at_end && rest.ends_with(affix)) rest.remove_suffix(affix.size());
  return rt.string(rest);
}

Value replace_method(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "replace", args, 2, 3);
  const Int limit = args.positional.size() > 2 ? int_argument(rt, args.positional[2], "count") : -1;
  return rt.string(
      replace(rt, self.text(), text_argument(rt, args.positional[0]), text_argument(rt, args.positional[1]), limit));
}

Value list_of(Runtime& rt, const std::vector<std::string_view>& parts) {
  std::vector<Value> items;
  for (const std::string_view part : parts) items.push_back(rt.string(part));
  return rt.list(std::move(items));
}

template <bool from_right>
Value split_method(Runtime& rt, const Value& self, const Args& args) {
  const auto bound = bind(rt, "split", args, {"sep", "maxsplit"});
  const Int limit = bound[1].missing() ? -1 : int_argument(rt, bound[1], "maxsplit");
  if (bound[0].none_or_missing()) return list_of(rt, split_space(rt, self.text(), limit, from_right));
  const std::string_view separator = text_argument(rt, bound[0]);
  if (separator.empty()) rt.fail("empty separator");
  return list_of(rt, split(rt, self.text(), separator, limit, from_right));
}

Value split_lines_method(Runtime& rt, const Value& self, const Args& args) {
  const auto bound = bind(rt, "splitlines", args, {"keepends"});
  return list_of(rt, split_lines(rt, self.text(), truthy(rt, bound[0])));
}

Value join_method(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "join", args, 1, 1);
  std::string out;
  size_t index = 0;
  Cursor cursor(rt, args.positional[0]);
  for (Value item; cursor.next(&item); ++index) {
    if (!item.is(Kind::kString)) {
      rt.fail("sequence item {}: expected str instance, {} found", index, type_name(item));
    }
    rt.charge(item.text().size() + self.text().size());
    if (index > 0) out += self.text();
    out += item.text();
  }
  return rt.string(std::move(out));
}

template <text::Case to>
Value change_case(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "method", args, 0, 0);
  return rt.string(with_case(rt, self.text(), to));
}

template <bool (*holds)(char32_t)>
Value all_are(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "method", args, 0, 0);
  rt.work(self.text().size());
  for (size_t pos = 0; pos < self.text().size();) {
    if (!holds(text::next_code_point(self.text(), pos))) return Value::boolean(false);
  }
  return Value::boolean(!self.text().empty());
}

constexpr auto kStringMethods = std::to_array<Callable>({{"capitalize", change_case<text::Case::kCapitalize>},
                                                         {"count", count_text},
                                                         {"endswith", has_affix<true>},
                                                         {"find", find<false>},
                                                         {"isalnum", all_are<text::is_alnum>},
                                                         {"isalpha", all_are<text::is_alpha>},
                                                         {"isdigit", all_are<text::is_digit>},
                                                         {"isspace", all_are<text::is_python_space>},
                                                         {"join", join_method},
                                                         {"lower", change_case<text::Case::kLower>},
                                                         {"lstrip", strip_method<true, false>},
                                                         {"removeprefix", without_affix<false>},
                                                         {"removesuffix", without_affix<true>},
                                                         {"replace", replace_method},
                                                         {"rfind", find<true>},
                                                         {"rsplit", split_method<true>},
                                                         {"rstrip", strip_method<false, true>},
                                                         {"split", split_method<false>},
                                                         {"splitlines", split_lines_method},
                                                         {"startswith", has_affix<false>},
                                                         {"strip", strip_method<true, true>},
                                                         {"title", change_case<text::Case::kTitle>},
                                                         {"upper", change_case<text::Case::kUpper>}});
// Those that chat templates do not use: named in the error.
constexpr auto kOtherStringMethods = std::to_array<Callable>(
    {{"casefold", nullptr},    {"center", nullptr},       {"encode", nullptr},    {"expandtabs", nullptr},
     {"format", nullptr},      {"format_map", nullptr},   {"index", nullptr},     {"isascii", nullptr},
     {"isdecimal", nullptr},   {"isidentifier", nullptr}, {"islower", nullptr},   {"isnumeric", nullptr},
     {"isprintable", nullptr}, {"istitle", nullptr},      {"isupper", nullptr},   {"ljust", nullptr},
     {"maketrans", nullptr},   {"partition", nullptr},    {"rindex", nullptr},    {"rjust", nullptr},
     {"rpartition", nullptr},  {"swapcase", nullptr},     {"translate", nullptr}, {"zfill", nullptr}});

// --- list, tuple and dict

Value list_count(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "count", args, 1, 1);
  Int n = 0;
  for (const Value& item : self.items()) {
    rt.step();
    if (identical(item, args.positional[0]) || equals(rt, item, args.positional[0])) ++n;
  }
  return Value::integer(n);
}

Value list_index(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "index", args, 1, 1);
  Int i = 0;
  for (const Value& item : self.items()) {
    rt.step();
    if (identical(item, args.positional[0]) || equals(rt, item, args.positional[0])) return Value::integer(i);
    ++i;
  }
  rt.fail("the value is not in the list");
}

Value list_copy(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "copy", args, 0, 0);
  return self;  // no template can change either of them
}

Value dict_get(Runtime& rt, const Value& self, const Args& args) {
  expect_positional(rt, "get", args, 1, 2);
  const Value* found = rt.find(self.as_dict(), args.positional[0]);
  return found != nullptr ? *found : args.positional.size() > 1 ? args.positional[1] : Value::none();
}

enum class Part { kItems, kKeys, kValues };
template <Part part>
Value dict_view(Runtime& rt, const Value& self, const Args& args) {
  constexpr const char* kTypeNames[] = {"dict_items", "dict_keys", "dict_values"};
  expect_positional(rt, kTypeNames[static_cast<size_t>(part)], args, 0, 0);
  std::vector<Value> items;
  rt.charge(sizeof(Value), static_cast<Int>(self.as_dict().entries.size()));
  for (const Dict::Entry& entry : self.as_dict().entries) {
    items.push_back(part == Part::kItems  ? rt.tuple(entry.key, entry.value)
                    : part == Part::kKeys ? entry.key
                                          : entry.value);
  }
  const Value view = rt.list(std::move(items), Kind::kView);
  view.as<View>().type_name = kTypeNames[static_cast<size_t>(part)];
  return view;
}

constexpr auto kListMethods =
    std::to_array<Callable>({{"copy", list_copy}, {"count", list_count}, {"index", list_index}});
constexpr auto kTupleMethods = std::to_array<Callable>({{"count", list_count}, {"index", list_index}});
constexpr auto kDictMethods = std::to_array<Callable>({{"copy", list_copy},
                                                       {"fromkeys", nullptr},
                                                       {"get", dict_get},
                                                       {"items", dict_view<Part::kItems>},
                                                       {"keys", dict_view<Part::kKeys>},
                                                       {"values", dict_view<Part::kValues>}});

// --- loop

Value loop_cycle(Runtime& rt, const Value& self, const Args& args) {
  if (args.positional.empty() || !args.named.empty()) rt.fail("no items for cycling given");
  const auto count = static_cast<Int>(args.positional.size());
  return args.positional[static_cast<size_t>(self.as<Loop>().index0 % count)];
}

constexpr auto kLoopMethods = std::to_array<Callable>({{"changed", nullptr}, {"cycle", loop_cycle}});

// --- Global functions

Value make_range(Runtime& rt, const Value&, const Args& args) {
  expect_positional(rt, "range", args, 1, 3);
  auto* range = rt.make<Range>();
  const auto& p = args.positional;
  range->start = p.size() > 1 ? int_argument(rt, p[0], "range() argument") : 0;
  range->stop = int_argument(rt, p.size() > 1 ? p[1] : p[0], "range() argument");
  range->step = p.size() > 2 ? int_argument(rt, p[2], "range() argument") : 1;
  if (range->step == 0) rt.fail("range() arg 3 must not be zero");
  if (range->size() > kMaxRange) {
    rt.fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kMaxRange);
  }
  return Value::object(Kind::kRange, range);
}

// dict(mapping or pairs, **named), also of namespace().
void fill_dict(Runtime& rt, std::string_view function, const Args& args, Dict& out) {
  if (args.positional.size() > 1) {
    rt.fail("{} expected at most 1 argument, got {}", function, args.positional.size());
  }
  if (!args.positional.empty() && args.positional[0].is(Kind::kDict)) {
    for (const Dict::Entry& entry : args.positional[0].as_dict().entries) rt.set(out, entry.key, entry.value);
  } else if (!args.positional.empty()) {
    Cursor pairs(rt, args.positional[0]);
    for (Value pair; pairs.next(&pair);) {
      const std::vector<Value> both = items_of(rt, pair);
      if (both.size() != 2) rt.fail("dictionary update sequence element has length {}; 2 is required", both.size());
      rt.set(out, both[0], both[1]);
    }
  }
  for (const auto& [name, value] : args.named) rt.set(out, rt.string(name), value);
}

Value make_dict(Runtime& rt, const Value&, const Args& args) {
  auto* dict = rt.make<Dict>();
  fill_dict(rt, "dict", args, *dict);
  return Value::object(Kind::kDict, dict);
}

Value make_namespace(Runtime& rt, const Value&, const Args& args) {
  auto* space = rt.make<Namespace>();
  fill_dict(rt, "namespace", args, space->attributes);
  return Value::object(Kind::kNamespace, space);
}

Value raise_exception(Runtime& rt, const Value&, const Args& args) {
  const auto bound = bind(rt, "raise_exception", args, {"message"}, 1);
  rt.fail(to_text(rt, bound[0]));
}

// datetime.now().strftime(format): local time without a zone, so %z and %Z print nothing.
Value strftime_now(Runtime& rt, const Value&, const Args& args) {
  const auto bound = bind(rt, "strftime_now", args, {"format"}, 1);
  const std::string_view format = text_argument(rt, bound[0]);
  if (format.size() > kMaxDateFormat) rt.fail("strftime_now() format is longer than {} bytes", kMaxDateFormat);
  const auto now = rt.now.value_or(std::chrono::system_clock::now());
  const auto whole = std::chrono::floor<std::chrono::seconds>(now);
  const std::time_t seconds = std::chrono::system_clock::to_time_t(whole);
  std::tm parts{};
  localtime_r(&seconds, &parts);
  std::string out;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%' || i + 1 == format.size()) {
      out += format[i];
      continue;
    }
    const char kind = format[++i];
    if (kind == 'f') {
      out += fmt::format("{:06}", std::chrono::duration_cast<std::chrono::microseconds>(now - whole).count());
    } else if (kind == '%') {
      out += '%';
    } else if (kind != 'z' && kind != 'Z') {
      std::string directive = {'%', kind};
      if (std::string_view("-_0^#").find(kind) != std::string_view::npos && i + 1 < format.size())
        directive += format[++i];
      char buffer[256];
      out.append(buffer, strftime(buffer, sizeof(buffer), directive.c_str(), &parts));
    }
  }
  return rt.string(std::move(out));
}

constexpr auto kFunctions = std::to_array<Callable>({{"cycler", nullptr},
                                                     {"dict", make_dict},
                                                     {"joiner", nullptr},
                                                     {"lipsum", nullptr},
                                                     {"namespace", make_namespace},
                                                     {"raise_exception", raise_exception},
                                                     {"range", make_range},
                                                     {"strftime_now", strftime_now}});

const Callable* find_in(std::span<const Callable> callables, std::string_view name) {
  for (const Callable& c : callables) {
    if (c.name == name) return &c;
  }
  return nullptr;
}

}  // namespace

const Callable* find_method(Kind kind, std::string_view name) {
  switch (kind) {
    case Kind::kString:
      if (const Callable* method = find_in(kStringMethods, name)) return method;
      return find_in(kOtherStringMethods, name);
    case Kind::kList:
      return find_in(kListMethods, name);
    case Kind::kTuple:
      return find_in(kTupleMethods, name);
    case Kind::kDict:
      return find_in(kDictMethods, name);
    case Kind::kLoop:
      return find_in(kLoopMethods, name);
    default:
      return nullptr;
  }
}

const Callable* find_function(std::string_view name) { return find_in(kFunctions, name); }

bool changes_its_object(Kind kind, std::string_view name) {
  constexpr auto kOfLists =
      std::to_array<std::string_view>({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"});
  constexpr auto kOfDicts = std::to_array<std::string_view>({"clear", "pop", "popitem", "setdefault", "update"});
  return (kind == Kind::kList && std::find(kOfLists.begin(), kOfLists.end(), name) != kOfLists.end()) ||
         (kind == Kind::kDict && std::find(kOfDicts.begin(), kOfDicts.end(), name) != kOfDicts.end());
}

void bind_arguments(Runtime& rt, std::string_view function, const Args& args, const std::string_view* names,
                    size_t count, size_t required, Value* out) {
  if (args.positional.size() > count) {
    rt.fail("{}() takes at most {} argument(s) but {} were given", function, count, args.positional.size());
  }
  std::copy(args.positional.begin(), args.positional.end(), out);
  for (const auto& [name, value] : args.named) {
    const std::string_view* place = std::find(names, names + count, name);
    if (place == names + count) rt.fail("{}() got an unexpected keyword argument '{}'", function, name);
    Value& slot = out[place - names];
    if (!slot.missing()) rt.fail("{}() got multiple values for argument '{}'", function, name);
    slot = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (out[i].missing()) rt.fail("{}() missing required argument '{}'", function, names[i]);
  }
}

void expect_positional(Runtime& rt, std::string_view function, const Args& args, size_t least, size_t most) {
  if (!args.named.empty()) rt.fail("{}() takes no keyword arguments", function);
  const size_t n = args.positional.size();
  if (n < least || n > most) {
    rt.fail("{}() takes {} to {} arguments but {} were given", function, least, most, n);
  }
}

}  // namespace nfp::jinja
