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

Value find(Runtime& rt, const Value& self, const Args& args) {
  const size_t at = find_text(rt, self.text(), text_argument(rt, args[0]), 0);
  if (at == std::string_view::npos) return Value::integer(-1);
  return Value::integer(static_cast<Int>(text::count_code_points(self.text().substr(0, at))));
}

Value count_text(Runtime& rt, const Value& self, const Args& args) {
  const std::string_view needle = text_argument(rt, args[0]);
  if (needle.empty()) return Value::integer(length(rt, self) + 1);
  return Value::integer(static_cast<Int>(split(rt, self.text(), needle, -1).size()) - 1);
}

template <bool at_end>
Value has_affix(Runtime& rt, const Value& self, const Args& args) {
  const std::vector<Value> choices = args[0].is(Kind::kTuple) ? args[0].items() : std::vector<Value>{args[0]};
  bool found = false;
  for (const Value& choice : choices) {
    const std::string_view affix = text_argument(rt, choice);
    rt.step();
    rt.work(affix.size());
    found = found || (at_end ? self.text().ends_with(affix) : self.text().starts_with(affix));
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

Value split_method(Runtime& rt, const Value& self, const Args& args) {
  const Int limit = args[1].missing() ? -1 : int_argument(rt, args[1], "maxsplit");
  if (args[0].none_or_missing()) return list_of(rt, self, split(rt, self.text(), std::nullopt, limit));
  const std::string_view separator = text_argument(rt, args[0]);
  if (separator.empty()) rt.fail("empty separator");
  return list_of(rt, self, split(rt, self.text(), separator, limit));
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
                                       {"count", count_text, 1, 1},
                                       {"endswith", has_affix<true>, 1, 1},
                                       {"find", find, 1, 1},
                                       {"format", format_method, 0, Callable::kAny},
                                       {"join", join_method, 1, 1},
                                       {"lower", change_case<text::Case::kLower>},
                                       {"lstrip", strip_method<true, false>, 0, 1},
                                       {"replace", replace_method, 2, 3},
                                       {"rstrip", strip_method<false, true>, 0, 1},
                                       {"split", split_method, 0, 2, {"sep", "maxsplit"}},
                                       {"splitlines", split_lines_method, 0, 1, {"keepends"}},
                                       {"startswith", has_affix<false>, 1, 1},
                                       {"strip", strip_method<true, true>, 0, 1},
                                       {"title", change_case<text::Case::kTitle>},
                                       {"upper", change_case<text::Case::kUpper>}};

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

constexpr Callable kDictMethods[] = {{"get", dict_get, 1, 2},
                                     {"items", dict_view<Part::kItems>},
                                     {"keys", dict_view<Part::kKeys>},
                                     {"values", dict_view<Part::kValues>}};

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

void set_named(Runtime& rt, const Args& args, const char* function, Dict* dict) {
  if (!args.positional.empty()) rt.fail("{}() with a mapping is not supported in chat templates", function);
  for (const auto& [name, value] : args.named) rt.set(*dict, rt.string(name), value);
}

Value make_dict(Runtime& rt, const Value&, const Args& args) {
  auto* dict = rt.make<Dict>();
  set_named(rt, args, "dict", dict);
  return Value::object(Kind::kDict, dict);
}

Value make_namespace(Runtime& rt, const Value&, const Args& args) {
  auto* space = rt.make<Namespace>();
  set_named(rt, args, "namespace", &space->attributes);
  return Value::object(Kind::kNamespace, space);
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

constexpr Callable kFunctions[] = {{"dict", make_dict, 0, Callable::kAny},
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
  const bool has_methods = object.is(Kind::kString) || object.is_sequence() || object.is(Kind::kLoop);
  if (!has_methods && !(dict && among({"copy", "fromkeys"}))) return {};
  return fmt::format("the method {} of {} is not supported in chat templates", name, type_name(object));
}

std::string why_no_function(std::string_view name) {
  if (name != "cycler" && name != "joiner" && name != "lipsum") return {};
  return fmt::format("the function {} is not supported in chat templates", name);
}

}  // namespace nfp::jinja
