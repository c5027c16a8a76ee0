// The methods of Python's types that the immutable sandbox allows; those of str are in string_methods.cc.
#include <algorithm>

#include "text/jinja/callables.h"
#include "text/jinja/loop.h"
#include "text/jinja/operators.h"

namespace nfp::jinja {
namespace {

struct MethodName {
  std::string_view name;
  Method method;
};
constexpr MethodName kStringMethods[] = {
    {"capitalize", Method::kCapitalize},
    {"casefold", Method::kCasefold},
    {"center", Method::kCenter},
    {"count", Method::kCount},
    {"encode", Method::kForbidden},
    {"endswith", Method::kEndswith},
    {"expandtabs", Method::kExpandtabs},
    {"find", Method::kFind},
    {"format", Method::kFormat},
    {"format_map", Method::kFormatMap},
    {"index", Method::kIndex},
    {"isalnum", Method::kIsalnum},
    {"isalpha", Method::kIsalpha},
    {"isascii", Method::kIsascii},
    {"isdecimal", Method::kIsdecimal},
    {"isdigit", Method::kIsdigit},
    {"isidentifier", Method::kIsidentifier},
    {"islower", Method::kIslower},
    {"isnumeric", Method::kIsnumeric},
    {"isprintable", Method::kIsprintable},
    {"isspace", Method::kIsspace},
    {"istitle", Method::kIstitle},
    {"isupper", Method::kIsupper},
    {"join", Method::kJoin},
    {"ljust", Method::kLjust},
    {"lower", Method::kLower},
    {"lstrip", Method::kLstrip},
    {"maketrans", Method::kForbidden},
    {"partition", Method::kPartition},
    {"removeprefix", Method::kRemoveprefix},
    {"removesuffix", Method::kRemovesuffix},
    {"replace", Method::kReplace},
    {"rfind", Method::kRfind},
    {"rindex", Method::kRindex},
    {"rjust", Method::kRjust},
    {"rpartition", Method::kRpartition},
    {"rsplit", Method::kRsplit},
    {"rstrip", Method::kRstrip},
    {"split", Method::kSplit},
    {"splitlines", Method::kSplitlines},
    {"startswith", Method::kStartswith},
    {"strip", Method::kStrip},
    {"swapcase", Method::kSwapcase},
    {"title", Method::kTitle},
    {"translate", Method::kForbidden},
    {"upper", Method::kUpper},
    {"zfill", Method::kZfill},
};
constexpr MethodName kListMethods[] = {
    {"append", Method::kForbidden},  {"clear", Method::kForbidden},  {"copy", Method::kCopy},
    {"count", Method::kCount},       {"extend", Method::kForbidden}, {"index", Method::kIndex},
    {"insert", Method::kForbidden},  {"pop", Method::kForbidden},    {"remove", Method::kForbidden},
    {"reverse", Method::kForbidden}, {"sort", Method::kForbidden}};
constexpr MethodName kTupleMethods[] = {{"count", Method::kCount}, {"index", Method::kIndex}};
constexpr MethodName kDictMethods[] = {
    {"clear", Method::kForbidden},  {"copy", Method::kCopy},         {"fromkeys", Method::kForbidden},
    {"get", Method::kGet},          {"items", Method::kItems},       {"keys", Method::kKeys},
    {"pop", Method::kForbidden},    {"popitem", Method::kForbidden}, {"setdefault", Method::kForbidden},
    {"update", Method::kForbidden}, {"values", Method::kValues}};
constexpr MethodName kIntMethods[] = {{"bit_length", Method::kBitLength},
                                      {"conjugate", Method::kForbidden},
                                      {"to_bytes", Method::kForbidden},
                                      {"as_integer_ratio", Method::kForbidden}};
constexpr MethodName kFloatMethods[] = {{"is_integer", Method::kIsInteger},
                                        {"conjugate", Method::kForbidden},
                                        {"hex", Method::kForbidden},
                                        {"as_integer_ratio", Method::kForbidden}};
constexpr MethodName kLoopMethods[] = {{"changed", Method::kLoopChanged}, {"cycle", Method::kLoopCycle}};
constexpr MethodName kCyclerMethods[] = {{"next", Method::kCyclerNext}, {"reset", Method::kCyclerReset}};

template <size_t N>
std::optional<Method> find_in(const MethodName (&methods)[N], std::string_view name) {
  for (const MethodName& m : methods) {
    if (m.name == name) return m.method;
  }
  return std::nullopt;
}

template <size_t N>
std::string_view name_in(const MethodName (&methods)[N], Method method) {
  for (const MethodName& m : methods) {
    if (m.method == method) return m.name;
  }
  return {};
}

Value make_view(Runtime& rt, const Dict& dict, View::Part part) {
  auto* view = rt.make<View>();
  view->dict = &dict;
  view->part = part;
  return Value::object(Kind::kView, view);
}

Value dict_get(Runtime& rt, const Dict& dict, const Args& args) {
  expect_positional(rt, "get", args, 1, 2);
  if (!is_hashable(args.positional[0])) rt.fail("unhashable type: '{}'", type_name(args.positional[0]));
  const Value* found = dict.find(args.positional[0]);
  return found != nullptr ? *found : args.positional.size() > 1 ? args.positional[1] : Value::none();
}

Value list_index(Runtime& rt, const List& list, const Args& args) {
  expect_positional(rt, "index", args, 1, 3);
  const auto size = static_cast<Int>(list.items.size());
  const auto bound = [&](size_t place, Int if_absent) {
    if (args.positional.size() <= place) return if_absent;
    const Int i = int_argument(rt, args.positional[place], "slice indices");
    return std::clamp<Int>(i < 0 ? i + size : i, 0, size);
  };
  const Int stop = bound(2, size);
  for (Int i = bound(1, 0); i < stop; ++i) {
    rt.step();
    if (equals(rt, list.items[static_cast<size_t>(i)], args.positional[0])) return Value::integer(i);
  }
  rt.fail("{} is not in list", repr(rt, args.positional[0]).substr(0, 100));
}

Value list_method(Runtime& rt, const Value& self, Method method, const Args& args) {
  const List& list = self.as_list();
  switch (method) {
    case Method::kIndex:
      return list_index(rt, list, args);
    case Method::kCount: {
      expect_positional(rt, "count", args, 1, 1);
      Int n = 0;
      for (const Value& item : list.items) {
        rt.step();
        if (identical(item, args.positional[0]) || equals(rt, item, args.positional[0])) ++n;
      }
      return Value::integer(n);
    }
    default: {  // copy
      expect_positional(rt, "copy", args, 0, 0);
      auto* copy = rt.make<List>();
      copy->items = items_of(rt, self);
      return Value::list(copy);
    }
  }
}

Value dict_method(Runtime& rt, const Dict& dict, Method method, const Args& args) {
  if (method == Method::kGet) return dict_get(rt, dict, args);
  expect_positional(rt, method_name(method), args, 0, 0);
  switch (method) {
    case Method::kItems:
      return make_view(rt, dict, View::kItems);
    case Method::kKeys:
      return make_view(rt, dict, View::kKeys);
    case Method::kValues:
      return make_view(rt, dict, View::kValues);
    default: {  // copy
      auto* copy = rt.make<Dict>();
      for (const Dict::Entry& entry : dict.entries) rt.set(*copy, entry.key, entry.value);
      return Value::dict(copy);
    }
  }
}

Value loop_method(Runtime& rt, Loop& loop, Method method, const Args& args) {
  const auto& p = args.positional;
  if (!args.named.empty()) rt.fail("loop.{}() takes no keyword arguments", method_name(method));
  if (method == Method::kLoopCycle) {
    if (p.empty()) rt.fail("no items for cycling given");
    return p[static_cast<size_t>(loop.index0 % static_cast<Int>(p.size()))];
  }
  auto* values = rt.make<List>();
  values->items = p;
  const Value now = Value::tuple(values);
  if (!loop.last_changed.missing() && equals(rt, loop.last_changed, now)) return Value::boolean(false);
  loop.last_changed = now;
  return Value::boolean(true);
}

}  // namespace

std::optional<Method> find_method(Kind kind, std::string_view name) {
  switch (kind) {
    case Kind::kString:
      return find_in(kStringMethods, name);
    case Kind::kList:
      return find_in(kListMethods, name);
    case Kind::kTuple:
    case Kind::kRange:
      return find_in(kTupleMethods, name);
    case Kind::kDict:
      return find_in(kDictMethods, name);
    case Kind::kBool:
    case Kind::kInt:
      return find_in(kIntMethods, name);
    case Kind::kFloat:
      return find_in(kFloatMethods, name);
    case Kind::kLoop:
      return find_in(kLoopMethods, name);
    case Kind::kCycler:
      return find_in(kCyclerMethods, name);
    default:
      return std::nullopt;
  }
}

std::string_view method_name(Method method) {
  std::string_view name = name_in(kStringMethods, method);
  if (name.empty()) name = name_in(kDictMethods, method);
  if (name.empty()) name = name_in(kIntMethods, method);
  if (name.empty()) name = name_in(kFloatMethods, method);
  if (name.empty()) name = name_in(kLoopMethods, method);
  if (name.empty()) name = name_in(kCyclerMethods, method);
  return name;
}

Value call_method(Runtime& rt, const Value& self, Method method, const Args& args) {
  switch (self.kind()) {
    case Kind::kString:
      return call_string_method(rt, self.as_str(), method, args);
    case Kind::kList:
    case Kind::kTuple:
      return list_method(rt, self, method, args);
    case Kind::kRange: {
      auto* list = rt.make<List>();
      list->items = items_of(rt, self);
      return list_method(rt, Value::list(list), method, args);
    }
    case Kind::kDict:
      return dict_method(rt, self.as_dict(), method, args);
    case Kind::kBool:
    case Kind::kInt: {
      expect_positional(rt, "bit_length", args, 0, 0);
      Int n = 0;
      for (Int i = self.as_int() < 0 ? -self.as_int() : self.as_int(); i > 0; i /= 2) ++n;
      return Value::integer(n);
    }
    case Kind::kFloat:
      expect_positional(rt, "is_integer", args, 0, 0);
      return Value::boolean(self.as_real() == static_cast<double>(__builtin_trunc(self.as_real())) &&
                            self.as_real() - self.as_real() == 0);
    case Kind::kLoop:
      return loop_method(rt, self.as<Loop>(), method, args);
    case Kind::kCycler: {
      expect_positional(rt, method_name(method), args, 0, 0);
      Cycler& cycler = self.as<Cycler>();
      if (method == Method::kCyclerReset) {
        cycler.position = 0;
        return Value::none();
      }
      const Value current = cycler.items[cycler.position];
      cycler.position = (cycler.position + 1) % cycler.items.size();
      return current;
    }
    default:
      rt.fail("'{}' object has no method '{}'", type_name(self), method_name(method));
  }
}

}  // namespace nfp::jinja
