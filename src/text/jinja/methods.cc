// Python's methods that jinja2's immutable sandbox allows, the global functions, and how arguments meet parameters.
#include <algorithm>
#include <ctime>

#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
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

// --- str

// The code points that a search from `start` to `end` sees; nothing where these leave not even an empty text.
struct Searched {
  std::string_view text;
  Int first = 0;  // the place of its first code point
};
std::optional<Searched> searched(Runtime& rt, const Value& self, const Value& start, const Value& end) {
  const Int size = length(rt, self);
  const auto place = [&](const Value& v, Int otherwise) {
    if (v.none_or_missing()) return otherwise;
    const Int given = int_argument(rt, v, "slice indices");
    return given < 0 ? std::max<Int>(given + size, 0) : given;
  };
  const Int first = place(start, 0), last = std::min(place(end, size), size);
  if (first > last) return std::nullopt;
  rt.work(self.text().size());
  const size_t begin = text::byte_of(self.text(), static_cast<size_t>(first));
  const size_t stop = text::byte_of(self.text(), static_cast<size_t>(last));
  return Searched{self.text().substr(begin, stop - begin), first};
}

// The first or last place of a text, in code points; -1 where it is not there.
template <bool from_right>
Int place_of(Runtime& rt, const Value& self, const Args& args) {
  const std::string_view needle = text_argument(rt, args[0]);
  const auto part = searched(rt, self, args[1], args[2]);
  if (!part) return -1;
  const size_t at = from_right ? find_last(rt, part->text, needle) : find_text(rt, part->text, needle, 0);
  if (at == std::string_view::npos) return -1;
  return part->first + static_cast<Int>(text::count_code_points(part->text.substr(0, at)));
}
template <bool from_right>
Value find(Runtime& rt, const Value& self, const Args& args) {
  return Value::integer(place_of<from_right>(rt, self, args));
}
template <bool from_right>
Value index(Runtime& rt, const Value& self, const Args& args) {
  const Int place = place_of<from_right>(rt, self, args);
  if (place < 0) rt.fail("substring not found");
  return Value::integer(place);
}

Value count_text(Runtime& rt, const Value& self, const Args& args) {
  const std::string_view needle = text_argument(rt, args[0]);
  const auto part = searched(rt, self, args[1], args[2]);
  if (!part) return Value::integer(0);
  if (needle.empty()) return Value::integer(static_cast<Int>(text::count_code_points(part->text)) + 1);
  return Value::integer(static_cast<Int>(split(rt, part->text, needle, -1).size()) - 1);
}

template <bool at_end>
Value has_affix(Runtime& rt, const Value& self, const Args& args) {
  const auto part = searched(rt, self, args[1], args[2]);
  const std::vector<Value> choices = args[0].is(Kind::kTuple) ? args[0].items() : std::vector<Value>{args[0]};
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
  return rt.string_of(self, strip(rt, self.text(), args[0], left, right));
}

Value replace_method(Runtime& rt, const Value& self, const Args& args) {
  const Int limit = args[2].missing() ? -1 : int_argument(rt, args[2], "count");
  const std::string_view from = text_argument(rt, args[0]), to = text_argument(rt, args[1]);
  if (!self.is_safe()) return rt.string(replace(rt, self.text(), from, to, limit));
  return rt.string_of(self, replace(rt, self.text(), from, escaped(rt, args[1]), limit));
}

Value list_of(Runtime& rt, const Value& whole, const std::vector<std::string_view>& parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  for (const std::string_view part : parts) items.push_back(rt.string_of(whole, part));
  return rt.list(std::move(items));
}

template <bool from_right>
Value split_method(Runtime& rt, const Value& self, const Args& args) {
  const Int limit = args[1].missing() ? -1 : int_argument(rt, args[1], "maxsplit");
  std::optional<std::string_view> separator;
  if (!args[0].none_or_missing()) separator = text_argument(rt, args[0]);
  if (separator && separator->empty()) rt.fail("empty separator");
  return list_of(
      rt, self,
      from_right ? split_from_right(rt, self.text(), separator, limit) : split(rt, self.text(), separator, limit));
}

// What is before a separator, it, and what is behind it; the whole text and two empty ones where it is not there.
template <bool from_right>
Value partition(Runtime& rt, const Value& self, const Args& args) {
  const std::string_view text = self.text(), separator = text_argument(rt, args[0]);
  if (separator.empty()) rt.fail("empty separator");
  const size_t at = from_right ? find_last(rt, text, separator) : find_text(rt, text, separator, 0);
  const auto part = [&](std::string_view of) { return rt.string_of(self, of); };
  if (at == std::string_view::npos) {
    return rt.list(from_right ? std::vector<Value>{part(""), part(""), part(text)}
                              : std::vector<Value>{part(text), part(""), part("")},
                   Kind::kTuple);
  }
  return rt.list({part(text.substr(0, at)), part(separator), part(text.substr(at + separator.size()))}, Kind::kTuple);
}

template <bool at_end>
Value remove_affix(Runtime& rt, const Value& self, const Args& args) {
  std::string_view text = self.text();
  const std::string_view affix = text_argument(rt, args[0]);
  rt.work(affix.size());
  if (at_end && text.ends_with(affix)) text.remove_suffix(affix.size());
  if (!at_end && text.starts_with(affix)) text.remove_prefix(affix.size());
  return rt.string_of(self, text);
}

enum class Align { kLeft, kRight, kCentre };
template <Align align>
Value pad(Runtime& rt, const Value& self, const Args& args) {
  const Int width = int_argument(rt, args[0], "width"), missing = std::max<Int>(width - length(rt, self), 0);
  const std::string_view fill = args[1].missing() ? " " : text_argument(rt, args[1]);
  if (text::count_code_points(fill) != 1) rt.fail("The fill character must be exactly one character long");
  const Int left = align == Align::kLeft ? 0 : align == Align::kRight ? missing : missing / 2 + (missing & width & 1);
  rt.charge(fill.size(), missing);
  std::string out;
  for (Int i = 0; i < left; ++i) out += fill;
  out += self.text();
  for (Int i = left; i < missing; ++i) out += fill;
  return rt.string_of(self, std::move(out));
}

Value zero_fill(Runtime& rt, const Value& self, const Args& args) {
  const std::string_view text = self.text();
  const Int missing = std::max<Int>(int_argument(rt, args[0], "width") - length(rt, self), 0);
  const size_t sign = text.starts_with('+') || text.starts_with('-') ? 1 : 0;
  rt.charge(1, missing);
  return rt.string_of(self, std::string(text.substr(0, sign)) + std::string(static_cast<size_t>(missing), '0') +
                                std::string(text.substr(sign)));
}

// Whether there are characters and all are of a kind. Of other than ASCII only white space is known.
template <bool of_kind(char)>
Value all_are(Runtime& rt, const Value& self, const Args&) {
  rt.work(self.text().size());
  if (!self.as_str().ascii()) {
    rt.fail("the kind of characters other than ASCII's is not supported in chat templates");
  }
  return Value::boolean(!self.text().empty() && std::all_of(self.text().begin(), self.text().end(), of_kind));
}
bool is_decimal_digit(char c) { return c >= '0' && c <= '9'; }
bool is_ascii_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_letter_or_digit(char c) { return is_decimal_digit(c) || is_ascii_letter(c); }

Value is_space(Runtime& rt, const Value& self, const Args&) {
  rt.work(self.text().size());
  return Value::boolean(!self.text().empty() && text::strip_space(self.text()).empty());
}

template <text::Case to>
Value is_in_case(Runtime& rt, const Value& self, const Args&) {
  return Value::boolean(has_case(rt, self.text(), to));
}

Value split_lines_method(Runtime& rt, const Value& self, const Args& args) {
  return list_of(rt, self, split_lines(rt, self.text(), truthy(rt, args[0])));
}

Value join_method(Runtime& rt, const Value& self, const Args& args) {
  std::string out;
  size_t index = 0;
  Cursor cursor(rt, args[0]);
  for (Value item; cursor.next(&item); ++index) {
    if (!item.is(Kind::kString)) {
      rt.fail("sequence item {}: expected str instance, {} found", index, type_name(item));
    }
    rt.charge(item.text().size() + self.text().size());
    if (index > 0) out += self.text();
    if (self.is_safe()) {
      out += escaped(rt, item);
    } else {
      out += item.text();
    }
  }
  return rt.string_of(self, std::move(out));
}

template <text::Case to>
Value change_case(Runtime& rt, const Value& self, const Args&) {
  return rt.string_of(self, with_case(rt, self.text(), to));
}

// The argument that a field of str.format asks for; `next` counts the fields without a name or number.
Value field_value(Runtime& rt, std::string_view field, const Args& args, size_t* next) {
  if (field.find_first_of("!:.[{") != field.npos) {
    rt.fail("a field of str.format that is no name or number is not supported in chat templates");
  }
  const bool number = !field.empty() && field.find_first_not_of("0123456789") == field.npos;
  if (field.empty() || number) {
    const Int place = number ? parse_int(field).value_or(kIntBound) : static_cast<Int>((*next)++);
    if (place >= static_cast<Int>(args.positional.size()))
      rt.fail("format() has no argument for the field {{{}}}", short_name(field));
    return args.positional[static_cast<size_t>(place)];
  }
  for (const auto& [name, value] : args.named) {
    if (name == field) return value;
  }
  rt.fail("format() has no argument for the field {{{}}}", short_name(field));
}

Value format_method(Runtime& rt, const Value& self, const Args& args) {
  const std::string_view text = self.text();
  std::string out;
  size_t unnumbered = 0;
  bool numbered = false;
  for (size_t pos = 0; pos < text.size();) {
    rt.step();
    const size_t brace = std::min(text.find_first_of("{}", pos), text.size());
    rt.charge(brace - pos + 1);
    out += text.substr(pos, brace - pos);
    pos = brace + 2;
    if (brace == text.size()) break;
    if (text.substr(brace + 1, 1) == text.substr(brace, 1)) {
      out += text[brace];
      continue;
    }
    const size_t end = text[brace] == '{' ? text.find('}', brace) : text.npos;
    if (end == text.npos) rt.fail("Single '{}' encountered in format string", text[brace]);
    const std::string_view field = text.substr(brace + 1, end - brace - 1);
    const Value value = field_value(rt, field, args, &unnumbered);
    out += self.is_safe() ? escaped(rt, value) : to_text(rt, value);
    numbered = numbered || (!field.empty() && field.find_first_not_of("0123456789") == field.npos);
    if (numbered && unnumbered > 0) rt.fail("format() has fields with numbers and without");
    pos = end + 1;
  }
  return rt.string_of(self, std::move(out));
}

constexpr Callable kStringMethods[] = {{"capitalize", change_case<text::Case::kCapitalize>},
                                       {"center", pad<Align::kCentre>, 1, 2},
                                       {"count", count_text, 1, 3},
                                       {"endswith", has_affix<true>, 1, 3},
                                       {"find", find<false>, 1, 3},
                                       {"format", format_method, 0, Callable::kAny},
                                       {"index", index<false>, 1, 3},
                                       {"isalnum", all_are<is_letter_or_digit>},
                                       {"isalpha", all_are<is_ascii_letter>},
                                       {"isdecimal", all_are<is_decimal_digit>},
                                       {"isdigit", all_are<is_decimal_digit>},
                                       {"islower", is_in_case<text::Case::kLower>},
                                       {"isnumeric", all_are<is_decimal_digit>},
                                       {"isspace", is_space},
                                       {"isupper", is_in_case<text::Case::kUpper>},
                                       {"join", join_method, 1, 1},
                                       {"ljust", pad<Align::kLeft>, 1, 2},
                                       {"lower", change_case<text::Case::kLower>},
                                       {"lstrip", strip_method<true, false>, 0, 1},
                                       {"partition", partition<false>, 1, 1},
                                       {"removeprefix", remove_affix<false>, 1, 1},
                                       {"removesuffix", remove_affix<true>, 1, 1},
                                       {"replace", replace_method, 2, 3},
                                       {"rfind", find<true>, 1, 3},
                                       {"rindex", index<true>, 1, 3},
                                       {"rjust", pad<Align::kRight>, 1, 2},
                                       {"rpartition", partition<true>, 1, 1},
                                       {"rsplit", split_method<true>, 0, 2, {"sep", "maxsplit"}},
                                       {"rstrip", strip_method<false, true>, 0, 1},
                                       {"split", split_method<false>, 0, 2, {"sep", "maxsplit"}},
                                       {"splitlines", split_lines_method, 0, 1, {"keepends"}},
                                       {"startswith", has_affix<false>, 1, 3},
                                       {"strip", strip_method<true, true>, 0, 1},
                                       {"title", change_case<text::Case::kTitle>},
                                       {"upper", change_case<text::Case::kUpper>},
                                       {"zfill", zero_fill, 1, 1}};

// --- dict

Value dict_get(Runtime& rt, const Value& self, const Args& args) {
  const Value* found = rt.find(self.as_dict(), args[0]);
  return found != nullptr ? *found : args[1].missing() ? Value::none() : args[1];
}

enum class Part { kItems, kKeys, kValues };
template <Part part>
Value dict_view(Runtime& rt, const Value& self, const Args&) {
  std::vector<Value> items;
  rt.charge(sizeof(Value), static_cast<Int>(self.as_dict().entries.size()));
  for (const Dict::Entry& entry : self.as_dict().entries) {
    items.push_back(part == Part::kItems  ? rt.tuple(entry.key, entry.value)
                    : part == Part::kKeys ? entry.key
                                          : entry.value);
  }
  return rt.list(std::move(items), Kind::kView);
}

Value copy_dict(Runtime& rt, const Value& self, const Args&) {
  rt.charge(2 * sizeof(Dict::Entry), static_cast<Int>(self.as_dict().entries.size()));
  return Value::object(Kind::kDict, rt.make<Dict>(self.as_dict()));
}

constexpr Callable kDictMethods[] = {{"copy", copy_dict},
                                     {"get", dict_get, 1, 2},
                                     {"items", dict_view<Part::kItems>},
                                     {"keys", dict_view<Part::kKeys>},
                                     {"values", dict_view<Part::kValues>}};

// --- list and tuple

Value copy_list(Runtime& rt, const Value& self, const Args&) { return rt.list(self.items()); }

Value count_items(Runtime& rt, const Value& self, const Args& args) {
  Int count = 0;
  for (const Value& item : self.items()) {
    rt.step();
    count += identical(item, args[0]) || equals(rt, item, args[0]) ? 1 : 0;
  }
  return Value::integer(count);
}

Value index_of(Runtime& rt, const Value& self, const Args& args) {
  const std::vector<Value>& items = self.items();
  for (size_t i = 0; i < items.size(); ++i) {
    rt.step();
    if (identical(items[i], args[0]) || equals(rt, items[i], args[0])) return Value::integer(static_cast<Int>(i));
  }
  rt.fail("{} is not in {}", repr(rt, args[0]).substr(0, 100), type_name(self));
}

constexpr Callable kTupleMethods[] = {{"count", count_items, 1, 1}, {"index", index_of, 1, 1}};
constexpr Callable kListMethods[] = {{"copy", copy_list}, {"count", count_items, 1, 1}, {"index", index_of, 1, 1}};

// --- loop

Value cycle(Runtime& rt, const Value& self, const Args& args) {
  if (args.positional.empty() || !args.named.empty()) rt.fail("no items for cycling given");
  return args.positional[self.as<Loop>().index0 % args.positional.size()];
}

Value changed(Runtime& rt, const Value& self, const Args& args) {
  if (!args.named.empty()) rt.fail("changed() takes no keyword arguments");
  Value& last = self.as<Loop>().last_changed;
  const Value now = rt.list(args.positional, Kind::kTuple);
  const bool differs = last.missing() || !equals(rt, last, now);
  if (differs) last = now;
  return Value::boolean(differs);
}

constexpr Callable kLoopMethods[] = {{"changed", changed, 0, Callable::kAny}, {"cycle", cycle, 0, Callable::kAny}};

// --- Global functions

Value make_range(Runtime& rt, const Value&, const Args& args) {
  const bool one = args[1].missing();
  const Int start = one ? 0 : int_argument(rt, args[0], "range() argument");
  const Int stop = int_argument(rt, one ? args[0] : args[1], "range() argument");
  const Int step = args[2].missing() ? 1 : int_argument(rt, args[2], "range() argument");
  if (step == 0) rt.fail("range() arg 3 must not be zero");
  const Int distance = step > 0 ? stop - start : start - stop;
  const Int size = distance > 0 ? (distance - 1) / (step > 0 ? step : -step) + 1 : 0;
  if (size > kMaxRange) {
    rt.fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kMaxRange);
  }
  rt.charge(sizeof(Value), size);
  std::vector<Value> items;
  for (Int i = 0; i < size; ++i) items.push_back(Value::integer(start + i * step));
  return rt.list(std::move(items), Kind::kView);
}

// What dict(mapping or pairs, **named) holds.
void fill(Runtime& rt, const Args& args, const char* function, Dict* dict) {
  if (args.positional.size() > 1) {
    rt.fail("{} expected at most 1 argument, got {}", function, args.positional.size());
  }
  if (args[0].is(Kind::kDict)) {
    for (const Dict::Entry& entry : args[0].as_dict().entries) rt.set(*dict, entry.key, entry.value);
  } else if (!args[0].missing()) {
    Cursor cursor(rt, args[0]);
    for (Value item; cursor.next(&item);) {
      const std::vector<Value> pair = items_of(rt, item);
      if (pair.size() != 2) rt.fail("{}: an element has length {}; 2 is required", function, pair.size());
      rt.set(*dict, pair[0], pair[1]);
    }
  }
  for (const auto& [name, value] : args.named) rt.set(*dict, rt.string(name), value);
}

Value make_dict(Runtime& rt, const Value&, const Args& args) {
  auto* dict = rt.make<Dict>();
  fill(rt, args, "dict", dict);
  return Value::object(Kind::kDict, dict);
}

Value make_namespace(Runtime& rt, const Value&, const Args& args) {
  auto* space = rt.make<Namespace>();
  fill(rt, args, "namespace", &space->attributes);
  return Value::object(Kind::kNamespace, space);
}

// What joiner() gives: called, it gives nothing the first time and its separator from then on.
Value join_next(Runtime& rt, const Value& self, const Args&) {
  auto& separator = self.as<Iterator>();
  return separator.position++ == 0 ? rt.string("") : separator.items[0];
}
constexpr Callable kJoinNext = {"joiner", join_next};

Value make_joiner(Runtime& rt, const Value&, const Args& args) {
  return function(rt, &kJoinNext, rt.list({args[0].missing() ? rt.string(", ") : args[0]}, Kind::kIterator));
}

// What cycler() gives: a namespace of its state and of the two functions that change it.
struct Cycler : Iterator {
  Namespace* shown = nullptr;

  void move(Runtime& rt, size_t to) {
    position = to;
    rt.set(shown->attributes, rt.string("current"), items[position]);
    rt.set(shown->attributes, rt.string("pos"), Value::integer(static_cast<Int>(position)));
  }
};

Value cycle_next(Runtime& rt, const Value& self, const Args&) {
  auto& cycler = self.as<Cycler>();
  const Value now = cycler.items[cycler.position];
  cycler.move(rt, (cycler.position + 1) % cycler.items.size());
  return now;
}
Value cycle_reset(Runtime& rt, const Value& self, const Args&) {
  self.as<Cycler>().move(rt, 0);
  return Value::none();
}
constexpr Callable kCycleNext = {"next", cycle_next}, kCycleReset = {"reset", cycle_reset};

Value make_cycler(Runtime& rt, const Value&, const Args& args) {
  if (!args.named.empty()) rt.fail("cycler() takes no keyword arguments");
  if (args.positional.empty()) rt.fail("at least one item has to be provided");
  rt.charge(sizeof(Value), static_cast<Int>(args.positional.size()));
  auto* cycler = rt.make<Cycler>();
  cycler->items = args.positional;
  cycler->shown = rt.make<Namespace>();
  const Value self = Value::object(Kind::kIterator, cycler);
  Dict& attributes = cycler->shown->attributes;
  rt.set(attributes, rt.string("items"), rt.list(args.positional, Kind::kTuple));
  rt.set(attributes, rt.string("next"), function(rt, &kCycleNext, self));
  rt.set(attributes, rt.string("reset"), function(rt, &kCycleReset, self));
  cycler->move(rt, 0);
  return Value::object(Kind::kNamespace, cycler->shown);
}

Value raise_exception(Runtime& rt, const Value&, const Args& args) { rt.fail(to_text(rt, args[0])); }

// datetime.now().strftime(format): local time without a zone, so %z and %Z print nothing.
Value strftime_now(Runtime& rt, const Value&, const Args& args) {
  const std::string_view format = text_argument(rt, args[0]);
  if (format.size() > kMaxDateFormat) rt.fail("strftime_now() format is longer than {} bytes", kMaxDateFormat);
  const auto now = rt.now.value_or(std::chrono::system_clock::now());
  const auto whole = std::chrono::floor<std::chrono::seconds>(now);
  const std::time_t seconds = std::chrono::system_clock::to_time_t(whole);
  std::tm parts{};
  localtime_r(&seconds, &parts);
  std::string plain;  // what Python and C make of it alike
  for (size_t i = 0; i < format.size(); ++i) {
    const std::string_view directive = format[i] == '%' ? format.substr(i++, 2) : format.substr(i, 1);
    if (directive == "%f") {
      plain += fmt::format("{:06}", std::chrono::duration_cast<std::chrono::microseconds>(now - whole).count());
    } else if (directive != "%z" && directive != "%Z") {
      plain += directive == "%" ? "%%" : directive;
    }
  }
  std::vector<char> out(64 * (plain.size() + 1));
  return rt.string(std::string_view(out.data(), strftime(out.data(), out.size(), plain.c_str(), &parts)));
}

constexpr Callable kFunctions[] = {{"cycler", make_cycler, 0, Callable::kAny},
                                   {"dict", make_dict, 0, Callable::kAny},
                                   {"joiner", make_joiner, 0, 1, {"sep"}},
                                   {"namespace", make_namespace, 0, Callable::kAny},
                                   {"raise_exception", raise_exception, 1, 1, {"message"}},
                                   {"range", make_range, 1, 3},
                                   {"strftime_now", strftime_now, 1, 1, {"format"}}};

// A copy of the arguments with each in its place.
Args in_places(Runtime& rt, const Callable& callable, const Args& args) {
  Args out{args.positional, {}};
  if (out.positional.size() > callable.most) {
    rt.fail("{}() takes {} to {} argument(s) but {} were given", callable.name, callable.least, callable.most,
            out.positional.size());
  }
  out.positional.resize(callable.most);
  for (const auto& [name, value] : args.named) {
    size_t place = 0;
    while (place < callable.most && (place == callable.parameters.size() || callable.parameters[place] != name))
      ++place;
    if (place == callable.most) rt.fail("{}() got an unexpected keyword argument '{}'", callable.name, name);
    if (!out[place].missing()) rt.fail("{}() got multiple values for argument '{}'", callable.name, name);
    out.positional[place] = value;
  }
  for (size_t place = 0; place < callable.least; ++place) {
    if (out[place].missing()) rt.fail("{}() needs at least {} argument(s)", callable.name, callable.least);
  }
  return out;
}

}  // namespace

Value function(Runtime& rt, const Callable* callable, const Value& self) {
  auto* function = rt.make<Function>();
  function->callable = callable;
  function->self = self;
  return Value::object(Kind::kFunction, function);
}

Value invoke(Runtime& rt, const Callable& callable, const Value& subject, const Args& args) {
  return callable.call(rt, subject, callable.most == Callable::kAny ? args : in_places(rt, callable, args));
}

const Callable* find_function(std::string_view name) { return find_name(kFunctions, name); }

const Callable* find_method(Kind kind, std::string_view name) {
  if (kind == Kind::kString) return find_name(kStringMethods, name);
  if (kind == Kind::kList) return find_name(kListMethods, name);
  if (kind == Kind::kTuple) return find_name(kTupleMethods, name);
  if (kind == Kind::kLoop) return find_name(kLoopMethods, name);
  return kind == Kind::kDict ? find_name(kDictMethods, name) : nullptr;
}

std::string why_no_method(const Value& object, std::string_view name) {
  const auto among = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const bool list = object.is(Kind::kList), dict = object.is(Kind::kDict);
  if ((list && among({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"})) ||
      (dict && among({"clear", "pop", "popitem", "setdefault", "update"}))) {
    return fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object));
  }
  if (!object.is(Kind::kString) && !(dict && name == "fromkeys")) return {};
  return fmt::format("the method {} of {} is not supported in chat templates", name, type_name(object));
}

std::string why_no_function(std::string_view name) {
  if (name != "lipsum") return {};
  return fmt::format("the function {} is not supported in chat templates", name);
}

}  // namespace nfp::jinja
