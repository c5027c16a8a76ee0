// What a template can call: macros, globals, and the methods of Python's types that jinja2's immutable sandbox allows.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nfp::jinja {

struct Stmt;
struct Scope;

struct Macro : Object {
  const Stmt* node = nullptr;  // a macro or call block
  Scope* scope = nullptr;      // where it was defined
  std::string_view name;
};

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

// Puts arguments into places as a Python function with these parameter names does: parameters not given stay
// kMissing; those before `required` must be given. `function` is for the error message.
void bind_arguments(Runtime& rt, std::string_view function, const Args& args, const std::string_view* names,
                    size_t count, size_t required, Value* out);

template <size_t N>
struct Bound {
  Value at[N];
  const Value& operator[](size_t i) const { return at[i]; }
};
template <size_t N>
Bound<N> bind(Runtime& rt, std::string_view function, const Args& args, const std::string_view (&names)[N],
              size_t required = 0) {
  Bound<N> bound;
  bind_arguments(rt, function, args, names, N, required, bound.at);
  return bound;
}
// Between `least` and `most` arguments, none of them by name.
void expect_positional(Runtime& rt, std::string_view function, const Args& args, size_t least, size_t most);

enum class Function : uint16_t { kRange, kDict, kNamespace, kCycler, kJoiner, kRaiseException, kStrftimeNow };
std::optional<Function> find_function(std::string_view name);
Value call_function(Runtime& rt, Function function, const Args& args);

enum class Method : uint16_t {
  kForbidden,  // exists, but may change its object or looks inside Python
  // of str
  kCapitalize,
  kCasefold,
  kCenter,
  kCount,
  kEndswith,
  kExpandtabs,
  kFind,
  kFormat,
  kFormatMap,
  kIndex,
  kIsalnum,
  kIsalpha,
  kIsascii,
  kIsdecimal,
  kIsdigit,
  kIsidentifier,
  kIslower,
  kIsnumeric,
  kIsprintable,
  kIsspace,
  kIstitle,
  kIsupper,
  kJoin,
  kLjust,
  kLower,
  kLstrip,
  kPartition,
  kRemoveprefix,
  kRemovesuffix,
  kReplace,
  kRfind,
  kRindex,
  kRjust,
  kRpartition,
  kRsplit,
  kRstrip,
  kSplit,
  kSplitlines,
  kStartswith,
  kStrip,
  kSwapcase,
  kTitle,
  kUpper,
  kZfill,
  // of dict
  kCopy,
  kGet,
  kItems,
  kKeys,
  kValues,
  // of numbers
  kBitLength,
  kIsInteger,
  // of jinja2's own
  kLoopCycle,
  kLoopChanged,
  kCyclerNext,
  kCyclerReset,
};
std::optional<Method> find_method(Kind kind, std::string_view name);
std::string_view method_name(Method method);

Value call_method(Runtime& rt, const Value& self, Method method, const Args& args);
Value call_string_method(Runtime& rt, const Str& self, Method method, const Args& args);  // string_methods.cc

}  // namespace nfp::jinja
